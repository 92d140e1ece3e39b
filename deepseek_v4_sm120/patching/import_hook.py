"""Callbacks on imports, by exact module name, through one finder at the head of `sys.meta_path`.

    before_import(name, callback)   callback() when `name` is first searched for, before any of its code runs
    on_import(name, callback)       callback(module) right after each execution of the module (import and reload),
                                    inside the import: before any importer can bind a name of it
    provide(name, file, condition)  a stand-in for a module that is not installed

A callback that raises makes the import fail, by design. Loaders are wrapped for the one execution and restored before
it, so that `module.__loader__` is what it would be without us. Loaded in every Python process: standard library only.
"""

import sys

_before = {}  # name -> [callback()], each called once
_after = {}  # name -> [callback(module)]
_provided = {}  # name -> (file, condition())
_missed = []  # (name, callback): the module was half imported when the hook came


def before_import(name, callback):
    """Call back when `name` is first searched for; at once if it is already imported."""
    if name in sys.modules:
        callback()
        return
    _before.setdefault(name, []).append(callback)
    _install_finder()


def on_import(name, callback):
    """Call back after every execution of module `name`.

    A module that is complete fires at once. One that is still initialising does not, because half of its names are
    missing: it is kept for `fire_missed()`.
    """
    _after.setdefault(name, []).append(callback)
    _install_finder()
    module = sys.modules.get(name)
    if module is None:
        return
    if is_initialising(module):
        _missed.append((name, callback))
    else:
        callback(module)


def fire_missed():
    """Call the callbacks of modules that were half imported when they were hooked and are complete now."""
    for entry in list(_missed):
        module = sys.modules.get(entry[0])
        if module is not None and not is_initialising(module):
            _missed.remove(entry)
            entry[1](module)


def provide(name, file, condition):
    """Serve module `name` from package file `file` where no other finder has it and condition() holds then."""
    _provided[name] = (file, condition)
    if _stand_ins not in sys.meta_path:
        sys.meta_path.append(_stand_ins)


def find_without_hooks(name):
    """The spec of a top-level module as the other finders give it: no callback runs, no stand-in is offered."""
    return _search(name, None, None, skip=(_finder, _stand_ins))


def forget(name=None):
    """Drop every hook and stand-in (of one name or of all): for tests and for undo."""
    for table in (_before, _after, _provided):
        for key in list(table) if name is None else [name]:
            table.pop(key, None)
    _missed[:] = [entry for entry in _missed if name is not None and entry[0] != name]
    if name is None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in (_finder, _stand_ins)]


def is_initialising(module):
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _HookedLoader:
    """Stands in front of a module's loader for one execution."""

    def __init__(self, loader, name):
        self.loader = loader
        self.name = name

    def __getattr__(self, attribute):  # get_code, get_source, is_package ... of whoever asked find_spec() only
        if attribute == "loader":  # a copy made without __init__
            raise AttributeError(attribute)
        return getattr(self.loader, attribute)

    def create_module(self, spec):
        create = getattr(self.loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module):
        module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _missed[:] = [entry for entry in _missed if entry[0] != self.name]
        for callback in list(_after.get(self.name, ())):
            callback(module)


class _Finder:
    """First in sys.meta_path: lets the other finders search, then wraps the loader of the modules that are hooked."""

    def find_spec(self, name, path=None, target=None):
        self._ring(name)
        if name not in _after:
            return None
        spec = _search(name, path, target, skip=(self,))
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _HookedLoader(spec.loader, name)
        return spec

    @staticmethod
    def _ring(name):
        callbacks = _before.pop(name, None)  # taken out first: a callback may search for the same name
        for callback in callbacks or ():
            try:
                callback()
            except BaseException:
                _before[name] = callbacks  # the import fails; the next attempt must not pass unhooked
                raise


class _StandIns:
    """Last in sys.meta_path: reached only for modules that nothing else provides."""

    def find_spec(self, name, path=None, target=None):
        if name not in _provided:
            return None
        file, condition = _provided[name]
        if not condition():
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, file, submodule_search_locations=[file.rpartition("/")[0]])


_finder = _Finder()
_stand_ins = _StandIns()


def _install_finder():
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _search(name, path, target, skip):
    for finder in list(sys.meta_path):
        if finder in skip or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
