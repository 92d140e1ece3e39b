"""A wrong kernel must not pass what users run: faults made of the references (wrong_results.py) through the error that
calibrate asks, which is the self-test's, and through shadow mode's comparison. On the CPU."""

from __future__ import annotations

import functools

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import shadow
from deepseek_v4_sm120.specs import fp8_linear, index_select, mxfp4_moe, sparse_decode, wo_a
from deepseek_v4_sm120.specs.provider import error_of
from tests.ops import wrong_results

# beside SGLang's own: what hides in its rounding of activations, in the bf16 of its sums, and in TF32
UNSEEN = {
    "fp8_linear": {
        "8 outputs of a row's last 128 are not written",
        "8 outputs of a row's last 128 are another row's",
        "a lane's column of 32, in the last 128 of a row",
        "one number of a row is not written",
        "one block's scale a power of two up",
        "the last 16 inputs of a row",
        "activations in E4M3",
    },
    "router's projection": {"rounded to bf16", "parts added in f16"},
    "C128": {"the first key of a row's window", "the last key of a row's second list"},  # of 2,176, that weigh little
    "mxfp4_moe by MXFP8": {
        "8 outputs of a row's last 128 are not written",
        "8 outputs of a row's last 128 are another row's",
        "a lane's column of 32, in the last 128 of a row",
        "one number of a row is not written",
    },
    "mhc": {
        "streams: one number of a row is not written",
        "Sinkhorn once less",
        "Sinkhorn once more",
        "Sinkhorn without eps",
        "one post of a row",
        "one comb of a row",
    },
    "sums of four": {"a rank's term is left out of one sum of all", "rounded at every rank"},
}


# what takes most of the time of an error: a function of the spec's reference
TRUTHS = {
    sparse_decode: "sparse_decode",
    index_select: "mqa_logits",
    fp8_linear: "fp8_linear",
    wo_a: "wo_a",
    mxfp4_moe: "mxfp4_moe",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products
    yield
    torch.set_num_threads(threads)


made = functools.cache(lambda name: wrong_results.EVERY[name]())


def once(function):
    """The function, of the same tensors asked once; a case's faults are all judged by its inputs' truth."""
    known = {}

    def call(*args, **named):
        key = (*map(id, args), *((name, id(value)) for name, value in named.items()))
        if key not in known:
            known[key] = args, named, function(*args, **named)  # kept, so that no other gets their ids
        return known[key][-1]

    return call


@pytest.mark.parametrize("name", wrong_results.EVERY)
def test_what_is_wrong_is_too_far_from_float64(name, monkeypatch):
    wrong = made(name)
    if (truth := TRUTHS.get(wrong.spec)) is not None:
        monkeypatch.setattr(wrong.spec.reference, truth, once(getattr(wrong.spec.reference, truth)))
    allowed = wrong.spec.max_error(wrong.way, wrong.case)
    errors = {fault: wrong.spec.error(wrong.way, result, wrong.inputs) for fault, result in wrong.faults.items()}
    assert wrong.spec.error(wrong.way, wrong.right, wrong.inputs) <= allowed
    assert not {fault: error for fault, error in errors.items() if error <= allowed}


def test_all_of_ours_are_judged_by_their_worst_block():
    truth = torch.ones(64, 128)
    result = truth.clone()
    result[5] *= 1.1
    for way, is_seen in (("ours", True), ("ours, mxfp8, wide", True), ("stock", False)):
        assert (error_of(way, result, truth) > 0.03) is is_seen


def is_bad(ours, stock, bound: float, monkeypatch) -> bool:
    """Whether shadow mode calls it so; each tensor by itself, as mhc's are, or together."""
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    shadow.reset()
    for pairs in ours, stock:
        assert all(torch.is_tensor(tensor) for tensor in pairs)
    for number, pair in enumerate(zip(ours, stock, strict=True)):
        shape = {"rows": len(pair[0]), "output": number}
        shadow.record("test", [tuple(t.float() for t in pair)], identity=0, shape=shape, relative_l2=bound)
    found = any(record["bad_calls"] for record in shadow.report())
    shadow.reset()
    return found


@pytest.mark.parametrize("name", [name for name in wrong_results.EVERY if name != "index"])
def test_what_is_wrong_is_seen_beside_the_original(name, monkeypatch):
    wrong = made(name)

    def bad(result) -> bool:
        return is_bad(list(wrong.tensors(result)), list(wrong.tensors(wrong.stock)), wrong.shadow, monkeypatch)

    assert not bad(wrong.right)
    assert {fault for fault, result in wrong.faults.items() if not bad(result)} == UNSEEN.get(name, set())
