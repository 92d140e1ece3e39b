"""Run before SGLang in a Python without a GPU: a machine with two SM120 cards, as far as imports and arguments ask.

torch answers for the GPUs; the compiled packages that SGLang needs (STOOD_IN) are modules whose every name is a class
that takes anything. SGLang's own code is the wheel's, untouched.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import quick_imports  # noqa: F401  this folder's
import torch
import torch._dynamo  # before the stand-ins: torch probes for optional packages itself
import torch.distributed  # noqa: F401

STOOD_IN = {
    *("sgl_kernel", "flashinfer", "deep_gemm", "tilelang", "tvm_ffi", "cuda", "torch_memory_saver"),
    *("torchvision", "torchaudio", "torchao", "decord", "soundfile", "compressed_tensors", "gguf"),
    *("xgrammar", "outlines", "llguidance", "interegular", "openai", "openai_harmony", "tiktoken", "sentencepiece"),
    *("IPython", "uvloop", "uvicorn", "aiohttp", "prometheus_client", "datasets", "scipy", "setproctitle", "cutlass"),
    *("jsonschema", "python_multipart"),
}
MEMORY = 97887 << 20


class _Anything(type):
    def __getattr__(cls, name):
        if name == "__func__":
            return lambda *args, **kwargs: None
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __setitem__(cls, key, value):
        pass

    def __getitem__(cls, key):
        return StandIn

    def __contains__(cls, key):
        return False

    def __iter__(cls):
        return iter(())

    def __len__(cls):
        return 0

    def __or__(cls, other):
        return object

    __ror__ = __or__


class StandIn(metaclass=_Anything):
    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    def __class_getitem__(cls, item):
        return StandIn

    @classmethod
    def __get_pydantic_core_schema__(cls, *args):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else StandIn()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class _Module(types.ModuleType):
    def __call__(self, *args, **kwargs):  # tilelang.jit is a module and a decorator
        return StandIn()(*args, **kwargs)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__, module.__version__ = [], "99.0"
        module.__getattr__ = _name_of_module
        return module

    def exec_module(self, module):
        pass


def _name_of_module(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in STOOD_IN:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)


class _Properties:
    name, total_memory, major, minor, multi_processor_count = "RTX PRO 6000", MEMORY, 12, 0, 188


def _register_fake(name, *args, **kwargs):
    if name.startswith("sgl_kernel::"):
        return lambda function: function
    return _true_register_fake(name, *args, **kwargs)


sys.meta_path.append(_Finder())
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (12, 0)
torch.cuda.get_device_name = lambda device=None: "NVIDIA RTX PRO 6000 Blackwell Server Edition"
torch.cuda.get_device_properties = lambda device=None: _Properties
torch.cuda.mem_get_info = lambda device=None: (MEMORY - (1 << 30), MEMORY)
_true_register_fake = torch.library.register_fake
torch.library.register_fake = _register_fake
