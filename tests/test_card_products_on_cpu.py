"""The self-test's probe of the tensor cores, its own text compiled for a CPU (card_products_on_cpu.cpp): which lane has
which element and scale, against the PTX ISA's text. No card that has the block-scaled instruction has run it."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.commands.selftest import card
from deepseek_v4_sm120.specs.check import Failure
from tests.on_cpu import Numbered, made_together

REPO = Path(__file__).resolve().parents[1]
SCALED = r"^// scale-a: .*?^}\n"  # the function around the instruction, with what is said in front of it


def text(name: str) -> str:
    return (REPO / "csrc/card" / name).read_text()


def changed(*changes: tuple[str, str]) -> str:
    """The kernel, each change made in its text, which must have it."""
    found = text("card.h") + re.sub(SCALED, "", text("products.cu"), count=1, flags=re.M | re.S)
    found = re.sub(r"^#(include|pragma)[^\n]*$|^void launch_products\([^;]*?\) {.*?^}$", "", found, flags=re.M | re.S)
    for old, new in changes:
        assert old in found, old
        found = found.replace(old, new)
    return (REPO / "tests/card_products_on_cpu.cpp").read_text().replace("//@@ the kernel", found)


def multiply(library, a, b, c, a_scale=None, b_scale=None, *, dtype=torch.float8_e4m3fn):
    """As card._products."""
    a, b, c = a.to(dtype).contiguous(), b.to(dtype).contiguous(), c.float().contiguous()
    d = torch.full_like(c, float("nan"))
    addresses = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (a, b, a_scale, b_scale, c, d)]
    library.products.restype = ctypes.c_bool
    assert library.products(*addresses, a.shape[0], dtype == torch.float16), "lanes wait for ever"
    return d


@pytest.fixture(scope="module")
def libraries() -> dict[str, Numbered]:
    """The kernel as it is (""), and each mutant."""
    texts = {"": changed()} | {name: changed(change) for name, change in MUTANTS.items()}
    return dict(zip(texts, made_together(list(texts.values()), "-O1", "-w"), strict=True))


@pytest.fixture(scope="module")
def library(libraries):
    return libraries[""]


def test_a_card_that_multiplies_as_ptx_says_passes(library):
    assert "23 bits" in card.judge_bits(card.kept_bits(functools.partial(multiply, library), torch))
    assert "small integers exactly" in card.judge_block_scaled(functools.partial(multiply, library), torch)
    assert "23 bits" in card.judge_f16_sums(functools.partial(multiply, library, dtype=torch.float16), torch)


MUTANTS = {
    "a row's scale from the wrong lanes": ("group + lane % 2 * 8]", "group + quarter / 2 * 8]"),
    "a column's scale from the wrong lanes": ("p.b_scale[i * kColumns + group]", "p.b_scale[i * kColumns + lane % 8]"),
    "a's registers in another order": (
        "word_at(a_at + 8 * kDepth), word_at(a_at + 16)",
        "word_at(a_at + 16), word_at(a_at + 8 * kDepth)",
    ),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_another_layout_fails(libraries, what):
    wrong = functools.partial(multiply, libraries[what])
    with pytest.raises(Failure, match="MXFP8"):
        card.judge_block_scaled(wrong, torch)


def test_the_instruction_is_the_one_that_is_written_down():
    """Scales of a, then of b, with byte and thread selectors of zero, which the lanes above are for."""
    found = re.search(SCALED, text("products.cu"), re.M | re.S)[0]
    assert "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0" in found
    operands = re.search(r'"\{%0.*?;"', found)[0]
    assert operands == '"{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"'
    inputs = re.findall(r'"([+\w]+)"\((\w+(?:\[\d\])?)\)', found)
    names = [name for _, name in inputs]
    assert names == [
        *(f"d[{i}]" for i in range(4)),
        *(f"a[{i}]" for i in range(4)),
        "b0",
        "b1",
        "a_scale",
        "b_scale",
        "0",
    ]
