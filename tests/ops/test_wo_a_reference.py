"""wo_a's reference: the rotation taken back, two formulations, and constants that live in two places."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.ops import wo_a as op
from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.reference.fp8_linear import fp8_linear
from deepseek_v4_sm120.specs.wo_a import make_wo_a

CSRC = Path(__file__).resolve().parents[2] / "csrc"


@pytest.fixture
def made():
    return make_wo_a(5, 2, torch.Generator().manual_seed(2), outputs=128, inputs=1024, table=90)


def test_two_rotations(made):
    x, _, _, freqs_cis, positions = made
    one = reference.rotated_back(x, freqs_cis, positions)
    assert torch.equal(one, reference.rotated_back_by_matrices(x, freqs_cis, positions))
    heads, turned = x.unflatten(-1, (-1, 512)), one.unflatten(-1, (-1, 512))
    assert torch.equal(heads[..., :448], turned[..., :448])
    assert relative_error(turned[..., 448:], heads[..., 448:].double()) > 0.05


def test_it_takes_back_what_was_put_in(made):
    x, _, _, freqs_cis, positions = made
    put_in = reference.rotated_back(x, freqs_cis.conj().contiguous(), positions)
    assert relative_error(reference.rotated_back(put_in, freqs_cis, positions), x.double()) < 0.003  # two roundings
    assert torch.equal(reference.rotated_back(x, freqs_cis, torch.zeros_like(positions)), x)


def test_a_group_multiplies_its_own_heads(made):
    x, weight, scale, freqs_cis, positions = made
    out = reference.wo_a(x, weight, scale, freqs_cis, positions)
    turned = reference.rotated_back(x, freqs_cis, positions)
    for group in range(2):
        assert torch.equal(out[:, group], fp8_linear(turned[:, group], weight[group], scale[group]))
    assert torch.equal(reference.wo_a(turned, weight, scale), out)


def test_a_float32_rotation_rounds_to_the_same(made):
    """As the kernel and SGLang's do: products and sum in float32, then bf16."""
    x, _, _, freqs_cis, positions = made
    pairs = x.unflatten(-1, (-1, 512))[..., 448:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    cosine, sine = (part[positions][:, None, None] for part in (freqs_cis.real, freqs_cis.imag))
    turned = torch.stack([a * cosine + b * sine, b * cosine - a * sine], -1).flatten(-2).to(torch.bfloat16)
    expected = reference.rotated_back(x, freqs_cis, positions).unflatten(-1, (-1, 512))[..., 448:]
    assert float((turned != expected).float().mean()) < 0.01


def test_constants_are_the_kernels():
    text = (CSRC / "fp8_linear/config.h").read_text()
    rotated, blocks = map(int, re.search(r"kRotated = (\d+), kHeadBlocks = (\d+);", text).groups())
    block = int(re.search(r"kBlock = (\d+);", text).group(1))
    assert (op.ROTATED, op.HEAD_INPUTS) == (rotated, blocks * block) == (reference.ROTATED, reference.HEAD)
    assert f"kBlock = {block};" in (CSRC / "wo_a/wo_a.h").read_text()
