"""The patch platform: `install()` is the one entrance, for sitecustomize.py and for SGLang's plugin entry point.

import_hook   callbacks on imports                            (loaded in every process)
spec          what a patch is: Patch, Target, Table           (from here on: loaded by the first import of SGLang)
contract      what a target must look like, checked by ast
engine        version -> target -> contract -> needs -> setattr -> record
verdict       what the first process of a server decided, for those that it starts
report        log line, JSON per process, status table
report_files  the files of these reports
lifetime      whether the process of a report still runs
"""

import os
import sys

from deepseek_v4_sm120 import LAYERS, PROFILE, REPORT
from deepseek_v4_sm120.patching import import_hook

VERDICT = "_DSV4_SM120_VERDICT"  # what the first process of a server decided (verdict.py); no setting of users
HOST = "sglang"  # the package whose first import starts us; every other name of it is in sglang_patches/

_installed = False
_engine = None
_started_in = None  # the working directory when we were installed: entries of PYTHONPATH are relative to it
_were_relative = {}  # variable -> (what it was, relative to what)


def install():
    """Hook the first import of SGLang; start at once where it is already imported. A second call, by SGLang's plugin
    entry point, catches up with what came in without us: see import_hook.catch_up."""
    global _installed, _started_in
    if _installed:
        import_hook.catch_up()
        return
    _installed = True
    _started_in = working_directory()
    make_absolute()
    import_hook.before_import(HOST, _start)


def make_absolute():
    """Makes of a relative REPORT, PROFILE or LAYERS the path that it is here: the processes that this one starts
    inherit it, wherever they work."""
    base = working_directory()
    for name in (REPORT, PROFILE, LAYERS):
        given = os.environ.get(name)
        if given and base and not os.path.isabs(given):
            _were_relative[name] = given, base
            os.environ[name] = os.path.join(base, given)


def relative_places():
    """A sentence for each variable that was made absolute in this process: others may make another path of it."""
    return [
        f"{name}={given} is relative to {base}: here, and in what is started from here, it is {os.environ[name]}; "
        "another terminal or container makes another path of it, so write that one"
        for name, (given, base) in _were_relative.items()
    ]


def relative_entry():
    """A sentence about the entry of PYTHONPATH that is our folder, where only a relative one is; else None."""
    folder, base = _folder(), _started_in or working_directory()
    ours = [entry for entry, place in _entries() if place == folder]
    if not ours or any(map(os.path.isabs, ours)):
        return None
    return (
        f"PYTHONPATH has our folder as {ours[0]!r}, relative to {base}: a process that starts elsewhere runs without "
        f"us; write {folder}"
    )


def other_copies():
    """A sentence where PYTHONPATH has our package in further folders, of an image's own build, say; else None."""
    places = dict.fromkeys(place for _, place in _entries() if place != _folder())
    others = [
        place for place in places if os.path.isfile(os.path.join(place, __name__.partition(".")[0], "__init__.py"))
    ]
    if not others:
        return None
    return f"PYTHONPATH has our package in {' and '.join(others)}, too: {_folder()} is the one that runs"


def _folder():
    return os.path.realpath(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def _entries():
    """(entry, the folder that it is here) of PYTHONPATH."""
    base = _started_in or working_directory()
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    return [(entry, os.path.realpath(os.path.join(base, entry))) for entry in entries if base]


def not_hooked():
    """A sentence where this Python, and so a server that is started like it, has not run our sitecustomize.py."""
    if _installed or os.environ.get("DSV4_SM120") == "off":
        return None
    return (
        "our sitecustomize.py has not run in this Python: a server that is started like it runs without us, or has us "
        "late, by SGLang's plugins; put the folder that the build made, as a whole, first on PYTHONPATH"
    )


def working_directory():
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def active_engine():
    """This process's engine, or None before SGLang is imported and with DSV4_SM120=off."""
    return _engine


def value(default):
    """The number of a default that is on in this process; 0 where it is not."""
    return 0 if _engine is None else _engine.steering.value(default)


def left_out(patch, way):
    """Why DSV4_SM120_PROFILE leaves out one way of a patch on this machine; None where it may be taken."""
    return None if _engine is None else _engine.profile.left_out(patch, way)


def _start():
    """Inside the import of SGLang, whatever it is to serve: half a folder must not make that import fail. What of it
    is missing or cut off may be any module, the engine, which could stop our model alone, among them."""
    global _engine
    if _engine is not None:
        return
    try:
        from deepseek_v4_sm120.settings import settings

        if settings().off:
            return
        from deepseek_v4_sm120.patching.engine import Engine
        from deepseek_v4_sm120.sglang_patches.table import TABLE
    except Exception as error:
        if os.environ.get(VERDICT):  # the process that started this one has us: all of a server run the same code
            raise
        folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        sys.stderr.write(
            f"deepseek_v4_sm120: {folder} cannot be loaded ({type(error).__name__}: {error}): SGLang runs as without "
            "us; copy the folder that the build made again, as a whole, or rebuild it with ./build_docker.sh\n"
        )
        return
    _engine = Engine(TABLE, host=HOST, settings=settings())
    _engine.start()
