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


def test_a_half_imported_module_waits_for_fire_missed(modules):
    modules({"hk_a.py": "import hk_late\nvalue = 1\n", "hk_late.py": "import hk_register\nhk_register.now()\n"})
    seen = []
    register = type(sys)("hk_register")
    register.now = lambda: import_hook.on_import("hk_a", lambda m: seen.append(m.value))
    sys.modules["hk_register"] = register
    import hk_a  # noqa: F401

    assert seen == []
    import_hook.fire_missed()
    import_hook.fire_missed()
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


def test_forget_removes_everything():
    import_hook.on_import("hk_x", lambda m: None)
    import_hook.provide("hk_y", "/nowhere/__init__.py", lambda: True)
    import_hook.forget()
    assert [f for f in sys.meta_path if type(f).__module__ == import_hook.__name__] == []
