"""The import hook alone. Module names are unique to each test; every hook is forgotten afterwards."""

import importlib
import importlib.util
import inspect
import sys

import pytest

from deepseek_v4_sm120.patching import import_hook


@pytest.fixture
def modules(tmp_path, monkeypatch, write_tree):
    """write files into a folder on sys.path; modules and hooks that appear are removed again"""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(files):
        write_tree(tmp_path, files)
        importlib.invalidate_caches()

    yield write
    import_hook.forget()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_fires_after_execution_and_before_any_importer_binds(modules):
    modules({"hk_a.py": "value = 1", "hk_b.py": "from hk_a import value"})
    import_hook.on_import("hk_a", lambda m: setattr(m, "value", 2))
    import hk_b

    assert hk_b.value == 2


def test_only_exact_names(modules):
    modules({"hk_pkg/__init__.py": "", "hk_pkg/sub.py": ""})
    seen = []
    import_hook.on_import("hk_pkg", seen.append)
    import hk_pkg.sub

    assert seen == [hk_pkg]


def test_package_reexport_gets_the_replacement(modules):
    modules({"hk_pkg/__init__.py": "from hk_pkg.impl import f", "hk_pkg/impl.py": "def f(): return 1"})
    import_hook.on_import("hk_pkg.impl", lambda m: setattr(m, "f", lambda: 2))
    import hk_pkg

    assert hk_pkg.f() == 2


def test_the_loader_is_restored(modules):
    modules({"hk_a.py": "def f():\n    return 'source is readable'\n"})
    inside = []
    modules({"hk_a.py": "loader = __loader__\ndef f():\n    return 'readable'\n"})
    import_hook.on_import("hk_a", inside.append)
    import hk_a

    assert type(hk_a.__loader__).__name__ == type(hk_a.__spec__.loader).__name__ == "SourceFileLoader"
    assert type(hk_a.loader).__name__ == "SourceFileLoader"
    assert "readable" in inspect.getsource(hk_a.f)
    assert "readable" in importlib.util.find_spec("hk_a").loader.get_source("hk_a")


def test_reload_fires_again(modules):
    modules({"hk_a.py": "value = 1"})
    count = []
    import_hook.on_import("hk_a", lambda m: count.append(m.value) or setattr(m, "value", 2))
    import hk_a

    importlib.reload(hk_a)
    assert count == [1, 1] and hk_a.value == 2


def test_a_complete_module_fires_at_once(modules):
    modules({"hk_a.py": ""})
    import hk_a

    seen = []
    import_hook.on_import("hk_a", seen.append)
    assert seen == [hk_a]


def test_a_half_imported_module_waits_for_catch_up(modules):
    modules({"hk_a.py": "import hk_late\nvalue = 1\n", "hk_late.py": "import hk_register\nhk_register.now()\n"})
    seen = []
    register = type(sys)("hk_register")
    register.now = lambda: import_hook.on_import("hk_a", lambda m: seen.append(m.value))
    sys.modules["hk_register"] = register
    import hk_a  # noqa: F401

    assert seen == []
    import_hook.catch_up()
    import_hook.catch_up()
    assert seen == [1]


def test_a_raising_callback_makes_the_import_fail(modules):
    modules({"hk_a.py": ""})

    def broken(module):
        raise RuntimeError("does not fit")

    import_hook.on_import("hk_a", broken)
    with pytest.raises(RuntimeError, match="does not fit"):
        import hk_a  # noqa: F401
    assert "hk_a" not in sys.modules


def test_a_module_that_raises_fires_nothing(modules):
    modules({"hk_a.py": "1/0"})
    seen = []
    import_hook.on_import("hk_a", seen.append)
    with pytest.raises(ZeroDivisionError):
        import hk_a  # noqa: F401
    assert seen == []


def test_a_missing_module_stays_missing(modules):
    import_hook.on_import("hk_nowhere", lambda m: None)
    with pytest.raises(ModuleNotFoundError):
        import hk_nowhere  # noqa: F401


def test_before_import_rings_once_and_before_the_code(modules):
    modules({"hk_a.py": "import sys\nseen = list(sys.hk_rung)\n"})
    sys.hk_rung = []
    import_hook.before_import("hk_a", lambda: sys.hk_rung.append("hk_a" in sys.modules))
    import hk_a

    importlib.reload(hk_a)
    assert hk_a.seen == [False]


def test_before_import_may_hook_the_same_module(modules):
    modules({"hk_a.py": "value = 1"})
    import_hook.before_import("hk_a", lambda: import_hook.on_import("hk_a", lambda m: setattr(m, "value", 2)))
    import hk_a

    assert hk_a.value == 2


def test_a_stand_in_serves_only_where_nothing_else_does(modules, tmp_path):
    modules({"stand/__init__.py": "from hk_absent.part import f", "stand/part.py": "def f(): return 'stand-in'"})
    allowed = []
    import_hook.provide("hk_absent", str(tmp_path / "stand/__init__.py"), lambda: bool(allowed))
    assert importlib.util.find_spec("hk_absent") is None
    allowed.append(True)
    import hk_absent

    assert hk_absent.f() == "stand-in"
    assert import_hook.find_without_hooks("hk_absent") is None
    modules({"hk_real.py": "real = True"})
    import_hook.provide("hk_real", str(tmp_path / "stand/__init__.py"), lambda: True)
    import hk_real

    assert hk_real.real


def test_a_stand_in_can_be_hooked(modules, tmp_path):
    modules({"stand/__init__.py": "value = 1"})
    import_hook.on_import("hk_absent", lambda m: setattr(m, "value", 2))
    import_hook.provide("hk_absent", str(tmp_path / "stand/__init__.py"), lambda: True)
    import hk_absent

    assert hk_absent.value == 2


class _Typeguard:
    """As typeguard's import hook: in front of everybody, and for its packages it asks PathFinder itself."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.PathFinder.find_spec(name, path, target)
        return None


@pytest.fixture
def finder_in_front():
    """finder_in_front(finder) puts it first in sys.meta_path for this test"""
    added = []

    def put(finder):
        sys.meta_path.insert(0, finder)
        added.append(finder)

    yield put
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in added]


def test_a_finder_put_in_front_of_ours_hides_nothing_for_long(modules, finder_in_front):
    modules({"hk_pkg/__init__.py": "import hk_other\n", "hk_pkg/sub.py": "value = 1", "hk_other.py": ""})
    rung, seen = [], []
    import_hook.before_import("hk_pkg", lambda: rung.append("hk_pkg.sub" in sys.modules))
    import_hook.on_import("hk_pkg.sub", lambda m: seen.append(import_hook.is_executing("hk_pkg.sub")))
    finder_in_front(_Typeguard({"hk_pkg"}))
    import hk_pkg.sub  # noqa: F401

    assert rung == [False], "hk_other was the first search that reached us; the package was there already"
    assert seen == [True], "and from then on ours is in front again"


def test_what_came_in_without_us_is_called_late(modules, finder_in_front):
    modules({"hk_a.py": "value = 1"})
    seen = []
    import_hook.on_import("hk_a", lambda m: seen.append((m.value, import_hook.is_executing("hk_a"))))
    finder_in_front(_Typeguard({"hk_a"}))
    import hk_a

    assert seen == []
    import_hook.catch_up()
    import_hook.catch_up()
    assert seen == [(1, False)] and sys.meta_path[0] is import_hook._finder
    importlib.reload(hk_a)
    assert seen[1:] == [(1, True)]


def test_a_finder_of_ours_that_is_gone_is_put_back(modules):
    modules({"hk_a.py": "", "hk_b.py": ""})
    seen = []
    import_hook.on_import("hk_a", lambda m: seen.append(m.__name__))
    import_hook.on_import("hk_b", lambda m: seen.append(m.__name__))
    sys.meta_path.remove(import_hook._finder)
    import hk_a  # noqa: F401

    import_hook.catch_up()
    import hk_b  # noqa: F401

    assert seen == ["hk_a", "hk_b"]


def test_a_finder_that_asks_importlib_from_inside_its_search(modules, finder_in_front):
    """Alone it is no recursion: it stands aside while it asks. Ours must not lead it back to itself, nor fire twice."""
    modules({"hk_a.py": ""})

    class Asking:
        depth = 0

        def find_spec(self, name, path=None, target=None):
            if name != "hk_a":
                return None
            self.depth += 1
            assert self.depth < 5, "recursion"
            others = [finder for finder in sys.meta_path if finder is not self]
            for finder in others:  # what importlib.util.find_spec does, without itself
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
            return None

    seen = []
    finder_in_front(Asking())
    import_hook.on_import("hk_a", lambda m: seen.append(type(m.__spec__.loader).__name__))
    import hk_a

    assert seen == ["SourceFileLoader"] and type(hk_a.__loader__).__name__ == "SourceFileLoader"


def test_forget_removes_everything():
    import_hook.on_import("hk_x", lambda m: None)
    import_hook.provide("hk_y", "/nowhere/__init__.py", lambda: True)
    import_hook.forget()
    assert [f for f in sys.meta_path if type(f).__module__ == import_hook.__name__] == []
