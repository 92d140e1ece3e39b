"""Frozen boilerplate, run by every Python with this folder on PYTHONPATH: change deepseek_v4_sm120/patching instead.

1. Run the `sitecustomize` that this file shadows (Debian's and Ubuntu's Pythons ship one), as Python would have run it.
2. Unless DSV4_SM120=off, hook the first import of SGLang. Nothing else is loaded until a process imports SGLang.

Standard library only. Whatever goes wrong here is printed and the interpreter goes on.
"""

import os
import sys


def _chain(folder):
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    seen = sys.__dict__.setdefault("_deepseek_v4_sm120_sitecustomize", set())  # survives a second copy of this file
    seen.add(folder)
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) not in seen])
    if spec is not None and spec.loader is not None:
        seen.add(os.path.dirname(os.path.abspath(spec.origin)))  # it may look for the next one, too, and find us
        spec.loader.exec_module(module_from_spec(spec))


def _report(what):
    import traceback  # 15 ms: only when needed

    sys.stderr.write(f"deepseek_v4_sm120: {what} failed; the interpreter goes on without it:\n{traceback.format_exc()}")


try:
    _chain(os.path.dirname(os.path.abspath(__file__)))
except Exception:
    _report("the sitecustomize that ours shadows")
try:
    if os.environ.get("DSV4_SM120") != "off":
        from deepseek_v4_sm120.patching import install

        install()
except Exception:
    _report("installing the SGLang hooks")
