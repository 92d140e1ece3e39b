"""SGLang's CUDA kernels between our operators, out of a wheel and compiled for this CPU: kernels_on_cpu.h."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import torch

from tests.on_cpu import made_of
from tests.patching.wheels import content, members

SHARED, HEADER = (Path(__file__).with_name(f"{name}_on_cpu.h") for name in ("wheels", "kernels"))
# what SGLang's text adds to its namespaces is beside what is ours there, in releases whose own are within another one
OURS = "namespace device { using namespace ::device; }\nnamespace host { using namespace ::host; }"
FLAGS = ("-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC")


def text_of(wheel, end: str) -> str:
    """A file's text by its path's end; empty where the release has none."""
    found = [member for member in sorted(members(wheel)) if member.endswith(end)]
    return content(wheel, found[0]) if found else ""


def arguments_of(text: str, kernel: str, given: dict[str, str]) -> str:
    """What a kernel's struct is instantiated with: its template's parameters by name, those with a default left out."""
    parameters = re.search(rf"template <([^>]*)>\s*struct {kernel}\b", text)[1]
    names = [one.split("=")[0].split()[-1] for one in parameters.split(",") if "=" not in one]
    return ", ".join(given[name] for name in names)


@functools.cache
def compiled(*parts: tuple[str, str]) -> ctypes.CDLL:
    """Kernels' texts, each with the CALLs that a test writes around them, and apart from the others' names."""
    whole = [SHARED.read_text(), HEADER.read_text()]
    for number, (text, calls) in enumerate(parts):
        text = re.sub(r"^\s*#(include|pragma once).*$", "", text, flags=re.M)
        inside = "using namespace sglang;" if "namespace sglang {" in text else ""
        ours = f"namespace sglang {{\n{OURS}\n}}" if inside else OURS
        whole.append(f"namespace part{number} {{\n{ours}\n{text}\n{inside}\n{calls}\n}}")
    return ctypes.CDLL(str(made_of("\n".join(whole), *FLAGS)))


def call(library: ctypes.CDLL, name: str, numbers: list[int], tensors: list[torch.Tensor]) -> None:
    function = getattr(library, name)
    function.restype = ctypes.c_bool
    given = (ctypes.c_int64 * max(1, len(numbers)))(*numbers)
    assert function(given, (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors)))
