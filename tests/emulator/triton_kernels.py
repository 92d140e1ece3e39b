"""Triton's kernels on the emulator: compiled for sm_120a as a launch would have them compiled, then run as PTX."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tests.emulator.emulated import CAPABILITY, called, library

_POINTERS = {torch.float8_e4m3fn: "fp8e4nv", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int32: "i32"}
_POINTERS |= {torch.float32: "fp32", torch.int64: "i64", torch.float16: "fp16"}
_PACKED = {"i32": "i", "i64": "q", "fp32": "f"}
_loaded: dict[tuple, tuple[bytes, object]] = {}


@dataclass
class OnEmulator:
    """Stands for a `triton.jit` function: `kernel[grid](...)` launches into the emulator."""

    function: object

    def __getitem__(self, grid):
        return lambda *given, **named: self._launch((*grid, 1, 1)[:3], given, named)

    def _launch(self, grid, given, named) -> None:
        names = self.function.arg_names
        values = dict(zip(names, given, strict=False)) | {n: v for n, v in named.items() if n in names}
        options = {n: v for n, v in named.items() if n not in names}
        constants = {p.name: values[p.name] for p in self.function.params if p.is_constexpr}
        # an integer that is 1 is compiled as such
        constants |= {name: 1 for name in names if type(values[name]) is int and values[name] == 1}
        passed = {name: values[name] for name in names if name not in constants}
        types = {name: _type(value) for name, value in passed.items()}
        entry, made = self._loaded(types, constants, passed, options)
        words = b""
        for name, value in passed.items():
            code, number = ("Q", value.data_ptr()) if isinstance(value, torch.Tensor) else (_PACKED[types[name]], value)
            words += b"\0" * (-len(words) % struct.calcsize(code)) + struct.pack(f"<{code}", number)
        words += b"\0" * (-len(words) % 8 + 16)  # scratch in global memory and a profiler's: none
        sizes = (ctypes.c_uint32 * 5)(*grid, 32 * made.metadata.num_warps, made.metadata.shared)
        called(library().emulator_launch(entry, sizes, words, len(words)))

    def _loaded(self, types, constants, passed, options) -> tuple[bytes, object]:
        """(entry's name, what Triton compiled), specialised as Triton does it: by what is a multiple of 16."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        numbers = {n: v.data_ptr() if isinstance(v, torch.Tensor) else v for n, v in passed.items()}
        aligned = tuple(n for n, v in numbers.items() if isinstance(v, int) and v % 16 == 0)
        name = self.function.__name__
        key = (name, *types.items(), *constants.items(), aligned, *options.items())
        if key not in _loaded:
            attributes = {
                (i,): [["tt.divisibility", 16]] for i, n in enumerate(self.function.arg_names) if n in aligned
            }
            signature = {n: types.get(n, "constexpr") for n in self.function.arg_names}
            source = ASTSource(self.function, signature, constants, attributes)
            arch = 10 * CAPABILITY[0] + CAPABILITY[1]
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            entry = f"{name}_{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}"
            text = made.asm["ptx"].replace(f".entry {name}(", f".entry {entry}(")
            library().emulator_ptx(text.encode())
            _loaded[key] = entry.encode(), made
        return _loaded[key]


def _type(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_POINTERS[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextlib.contextmanager
def on_emulator(module) -> Iterator[None]:
    """Within it all `triton.jit` kernels of a module run on the emulator."""
    from triton.runtime.jit import JITFunction

    kernels = {n: f for n, f in vars(module).items() if isinstance(f, JITFunction) and n.endswith("_kernel")}
    for name, function in kernels.items():
        setattr(module, name, OnEmulator(function))
    try:
        yield
    finally:
        for name, function in kernels.items():
            setattr(module, name, function)
