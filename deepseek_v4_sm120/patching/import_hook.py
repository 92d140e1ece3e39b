"""Callbacks on imports, by exact module name, through one finder at the head of `sys.meta_path`.

    before_import(name, callback)   callback() when `name` is first searched for, before any of its code runs
    on_import(name, callback)       callback(module) right after each execution of the module (import and reload),
                                    inside the import: before any importer can bind a name of it
    provide(name, file, condition)  a stand-in for a module that is not installed

A callback that raises makes the import fail, by design. Loaders are wrapped for the one execution and restored before
it, so that `module.__loader__` is what it would be without us. Loaded in every Python process: standard library only.

A finder that somebody puts in front of ours later may answer without asking us (typeguard's does, for the packages that
it instruments). `catch_up` finds the modules that came in so, calls their callbacks late, and puts our finder in front
again; every search that does reach us does the same.
"""

import sys
from _thread import get_ident  # not threading: loaded in every Python process

_before = {}  # name -> [callback()], each called once
_after = {}  # name -> [callback(module)]
_waiting = {}  # name -> [callback(module)] not yet called for a module of that name: absent, half imported or bypassed
_executing = set()  # names of hooked modules in execution, their callbacks included
_provided = {}  # name -> (file, condition())
_searching = set()  # (thread, name) that our finder has handed on to the others


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
    missing: `catch_up` fires it later.
    """
    _after.setdefault(name, []).append(callback)
    _install_finder()
    module = sys.modules.get(name)
    if module is not None and not is_initialising(module) and name not in _executing:
        callback(module)
    else:
        _waiting.setdefault(name, []).append(callback)


def is_executing(name):
    """True inside the import of `name`, its callbacks included: only it can have been asked for a name. False: late."""
    return name in _executing


def catch_up():
    """Call what was missed: modules that were half imported when they were hooked and are complete now, and those that
    a finder in front of ours brought in. Our finder is put in front again where that happened, or where it is gone."""
    _install_finder()
    bypassed = [name for name in list(_before) if name in sys.modules]
    for name in bypassed:
        _ring(name)
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is None or is_initialising(module) or name in _executing:
            continue
        bypassed.append(name)
        for callback in _waiting.pop(name, ()):
            callback(module)
    if bypassed and sys.meta_path[0] is not _finder:
        sys.meta_path.remove(_finder)
        sys.meta_path.insert(0, _finder)


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
    for table in (_before, _after, _waiting, _provided):
        for key in list(table) if name is None else [name]:
            table.pop(key, None)
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
        _executing.add(self.name)
        try:
            self.loader.exec_module(module)
            _waiting.pop(self.name, None)
            for callback in list(_after.get(self.name, ())):
                callback(module)
        finally:
            _executing.discard(self.name)


class _Finder:
    """First in sys.meta_path: lets the other finders search, then wraps the loader of the modules that are hooked."""

    def find_spec(self, name, path=None, target=None):
        if _before or _waiting:
            catch_up()
        _ring(name)
        if name not in _after:
            return None
        search = (get_ident(), name)
        if search in _searching:  # another finder asks importlib from inside of its own search
            return None
        _searching.add(search)
        try:
            spec = _search(name, path, target, skip=(self,))
        finally:
            _searching.discard(search)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _HookedLoader(spec.loader, name)
        return spec


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
