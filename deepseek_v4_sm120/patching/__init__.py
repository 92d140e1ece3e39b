"""The patch platform: `install()` is the one entrance, for sitecustomize.py and for SGLang's plugin entry point.

import_hook   callbacks on imports                            (loaded in every process)
spec          what a patch is: Patch, Target, Table           (from here on: loaded by the first import of SGLang)
contract      what a target must look like, checked by ast
engine        version -> target -> contract -> needs -> setattr -> record
report        log line, JSON per process, status table
"""

from deepseek_v4_sm120.patching import import_hook

HOST = "sglang"  # the package whose first import starts us; every other name of it is in sglang_patches.py

_installed = False
_engine = None


def install():
    """Hook the first import of SGLang; start at once where it is already imported. A second call does nothing."""
    global _installed
    if not _installed:
        import_hook.before_import(HOST, _start)
        _installed = True


def active_engine():
    """This process's engine, or None before SGLang is imported and with DSV4_SM120=off."""
    return _engine


def left_out(patch, way):
    """Why DSV4_SM120_PROFILE leaves out one way of a patch on this machine; None where it may be taken."""
    return None if _engine is None else _engine.profile.left_out(patch, way)


def _start():
    global _engine
    from deepseek_v4_sm120.settings import settings

    if _engine is not None or settings().off:
        return
    from deepseek_v4_sm120.patching.engine import Engine
    from deepseek_v4_sm120.sglang_patches import TABLE

    _engine = Engine(TABLE, host=HOST, settings=settings())
    _engine.start()
