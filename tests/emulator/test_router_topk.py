"""router_topk against SGLang's own Triton kernel of each release, both as PTX for SM120: the same ids and bits."""

from __future__ import annotations

import functools

import pytest
import torch
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.ops.router_topk import PART_NUMBERS, router_topk, row_argmax, triton_adds_in_pairs
from deepseek_v4_sm120.reference import router_topk as reference
from deepseek_v4_sm120.sglang_patches.table import ROUTER_TOPK
from deepseek_v4_sm120.specs.router_topk import KINDS, LOGITS, TOPK, make_inputs, make_logits
from tests.emulator.emulated import emulated, ran
from tests.emulator.triton_kernels import on_emulator
from tests.patching import triton_router
from tests.patching.wheels import every_release, fetch

CHOICES = {"seed": 1, "most_instructions": 100, "multiprocessors": 4}
EXPERTS = (256, 384, 64)  # the model's, Pro's, a small engine's


def bits(weights: torch.Tensor) -> torch.Tensor:
    """Of a NaN a processor chooses the sign."""
    return weights.nan_to_num(nan=-1.0, posinf=torch.inf).view(torch.int32)


@functools.cache
def hostile(experts: int):
    """[30, experts] logits of all kinds, and a bias of which half the values are few."""
    parts = [
        make_inputs(5, torch.Generator().manual_seed(n), experts=experts, kind=kind) for n, kind in enumerate(KINDS)
    ]
    bias = torch.cat([parts[0].bias[: experts // 2], parts[1].bias[experts // 2 :]])
    return torch.cat([part.logits for part in parts]), bias


@functools.cache
def found(experts: int, log1p: bool, padded: bool):
    logits, bias = hostile(experts)
    real = torch.tensor([13], dtype=torch.int32) if padded else None
    release = {"log1p": log1p, "in_pairs": triton_adds_in_pairs(), "scale": 1.5}
    with emulated(**CHOICES):
        weights, ids = router_topk(logits, bias, TOPK, real_rows=real, **release)
        alone = router_topk(logits[7:8], bias, TOPK, **release)
        assert torch.equal(alone[0][0], weights[7]) and torch.equal(alone[1][0], ids[7]) and ran("router_topk_kernel")
    return weights, ids


@functools.cache
def theirs(source: str, experts: int, padded: bool, folder):
    logits, bias = hostile(experts)
    module = triton_router.load(source, folder / f"router_{abs(hash(source))}.py")
    real = torch.tensor([13], dtype=torch.int32) if padded else None
    with emulated(**CHOICES), on_emulator(module):
        weights, ids = triton_router.moe_fused_gate(module, logits, bias, TOPK, scale=1.5, real_rows=real)
        return weights.clone(), ids.clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("router")


@every_release("0.5.15")
@pytest.mark.parametrize("experts", EXPERTS)
def test_each_releases_kernel(version, experts, folder):
    """By the row that is for the release: which softplus, and whether padding is its own."""
    (row,) = [t for t in ROUTER_TOPK.targets if SpecifierSet(t.sglang).contains(version, prereleases=True)]
    kind, source = row.replacement.rpartition("_")[2], triton_router.source_in(fetch(version))
    assert ("HAS_PADDING" in source) == (kind == "masked")
    for padded in (False, True)[: 1 + (kind == "masked")]:
        weights, ids = found(experts, kind != "log", padded)
        their_weights, their_ids = theirs(source, experts, padded, folder)
        assert torch.equal(ids, their_ids)
        assert torch.equal(bits(weights), bits(their_weights))
        assert not padded or bool((ids[13:] == -1).all())


@pytest.mark.parametrize("experts", [8, 33, 100, 160, 512])
def test_other_numbers_of_experts(experts):
    logits, bias = hostile(experts)
    expected = reference.router_topk(logits, bias, TOPK, scale=1.5)
    weights, ids = found(experts, True, False)
    assert torch.equal(ids.long(), expected[1])
    torch.testing.assert_close(weights.double(), expected[0], rtol=1e-6, atol=1e-12, equal_nan=True)


def test_the_order_in_which_a_rows_weights_are_added_up():
    """Both, from the scores: the Triton that is here has one of them, engines the other."""
    logits, bias = (part[:10] if part.ndim == 2 else part for part in hostile(256))
    with emulated(**CHOICES):
        scores, _ = router_topk(logits, bias, 8, renormalize=False)
        found = {in_pairs: router_topk(logits, bias, 8, in_pairs=in_pairs)[0] for in_pairs in (True, False)}
    v = scores.T
    sums = {
        True: ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])),
        False: (v[0] + v[1] + v[2] + v[3]) + (v[4] + v[5] + v[6] + v[7]),
    }
    assert not torch.equal(sums[True], sums[False])
    for in_pairs, weights in found.items():
        assert torch.equal(bits(weights), bits(scores / sums[in_pairs][:, None]))


@pytest.mark.parametrize("columns", [4, 1028, PART_NUMBERS, 2 * PART_NUMBERS + 260])
def test_the_places_of_rows_greatest(columns):
    """Rows of a wider tensor, of all kinds of ties and no numbers."""
    made = torch.Generator().manual_seed(columns)
    kinds = [make_logits(kind, made, rows=4, columns=columns + 8) for kind in LOGITS]
    rows = torch.cat(kinds)[:, :columns]
    with emulated(**CHOICES):
        found = row_argmax(rows)
        assert ran("argmax_part_kernel") == ran("argmax_row_kernel") == 1
        assert torch.equal(row_argmax(rows[3:4]), found[3:4])
    assert torch.equal(found, rows.argmax(-1)) and torch.equal(found, reference.row_argmax(rows))


def test_a_row_of_more_parts_than_a_warp_has_lanes():
    rows = make_logits("ties", torch.Generator().manual_seed(3), rows=1, columns=34 * PART_NUMBERS)
    rows[0, 33 * PART_NUMBERS + 5] = 9.5
    with emulated(**CHOICES):
        assert row_argmax(rows).tolist() == [33 * PART_NUMBERS + 5]
