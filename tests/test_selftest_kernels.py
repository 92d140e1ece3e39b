"""The self-test asks every kernel that serves: its checks pass with stand-ins that are right, and each fails with one
kernel that is wrong. On the CPU, by the references."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.reference import bf16_linear as bf16_reference
from deepseek_v4_sm120.reference import bf16_linear_draft_head as draft_head
from deepseek_v4_sm120.reference import fp8_linear as fp8_reference
from deepseek_v4_sm120.reference import mhc as mhc_reference
from deepseek_v4_sm120.reference import mxfp4_moe as moe_reference
from deepseek_v4_sm120.reference import sparse_decode as attention_reference
from deepseek_v4_sm120.specs import all_reduce, bf16_linear, fp8_linear, mhc, mxfp4_moe, router_topk, sparse_decode
from deepseek_v4_sm120.specs.check import Failure, NotRun


def spoiled(out: torch.Tensor) -> torch.Tensor:
    """One element is another, by more than any bound allows; it may be the only one that is wrong."""
    wrong = out.clone()
    wrong.view(-1)[-1] += 100
    return wrong


@pytest.fixture
def small(monkeypatch):
    """Inputs on the CPU, of few rows and few of everything else."""
    for spec in (sparse_decode, mxfp4_moe, mhc):
        monkeypatch.setattr(spec, "make_inputs", functools.partial(spec.make_inputs, device="cpu"))
    cache, call = sparse_decode.CacheShape(64, 64, lengths=64), sparse_decode.Shape
    monkeypatch.setattr(sparse_decode, "Shape", lambda rows, heads, main, extra: call(2, heads, cache, extra and cache))
    shape = mxfp4_moe.Shape
    monkeypatch.setattr(
        mxfp4_moe, "Shape", lambda rows, **sizes: shape(rows, 128, **(sizes | {"inter": 64, "experts": 8}))
    )
    monkeypatch.setattr(mhc, "Shape", lambda rows: SimpleNamespace(rows=rows, hidden=256, x_scale=1.0, mix_scale=1.0))
    monkeypatch.setattr(cuda_tensors, "num_sms", lambda index: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


# ---- sparse_decode


@pytest.mark.parametrize("wrong", [None, "prefill", "pairs"])
def test_attentions_kernels_for_prompts(wrong, small, monkeypatch):
    asked = set()

    def attend(*, prefill=None, pairs=None, return_lse=False, **given):
        asked.add("prefill" if prefill else "pairs" if pairs else "few")
        out, lse = attention_reference.sparse_decode(**given)
        out = out.bfloat16()
        out = spoiled(out) if wrong and {"prefill": prefill, "pairs": pairs}[wrong] else out
        return (out, lse.float()) if return_lse else out

    monkeypatch.setattr(sparse_decode.op, "sparse_decode", attend)
    if wrong is None:
        assert "bit by bit" in sparse_decode._check_prompts() and asked == {"prefill", "pairs", "few"}
    else:
        with pytest.raises(Failure, match="many rows, 8 heads" if wrong == "prefill" else "8 heads in pairs"):
            sparse_decode._check_prompts()


# ---- mxfp4_moe


@pytest.mark.parametrize(("wrong", "words"), [(None, ""), ("many", "relative error"), ("few", "rows 100 to 300 alone")])
def test_reproducible_experts(wrong, words, small, monkeypatch):
    def experts(*, reproducible, **given):
        assert reproducible
        out = moe_reference.mxfp4_moe(**given).bfloat16()
        rows = len(out)
        return spoiled(out) if (wrong == "many" and rows == 300) or (wrong == "few" and rows == 200) else out

    monkeypatch.setattr(mxfp4_moe.op, "mxfp4_moe", experts)
    if wrong is None:
        assert "equal the rows among others" in mxfp4_moe._check_reproducible()
    else:
        with pytest.raises(Failure, match=words):
            mxfp4_moe._check_reproducible()


# ---- fp8_linear


@pytest.fixture
def few_outputs(monkeypatch):
    """wo_b and the norm on the CPU, wo_b of fewer outputs."""
    real, weight = torch.Generator, fp8_linear.make_weight
    monkeypatch.setattr(torch, "Generator", lambda device: real())
    monkeypatch.setattr(fp8_linear, "make_weight", lambda groups, outputs, *more: weight(groups, 128, *more))
    monkeypatch.setattr(torch, "randn", lambda *sizes, device, **more: RANDN(*sizes, **more))


RANDN = torch.randn


@pytest.mark.parametrize("wrong", [None, "merge", "norm", "norm alone"])
def test_the_merge_and_the_latents_norm(wrong, few_outputs, monkeypatch):
    def unmerged(x, weight, scale):
        whole = fp8_reference.fp8_linear(x, weight, scale).bfloat16().float()
        return torch.stack([whole * share for share in (0.5, 0.25, 0.125, 0.125)])

    def merge(partial):
        made = partial.sum(0).bfloat16()
        return spoiled(made) if wrong == "merge" else made

    def norm(x, weight, eps):
        made = fp8_reference.latent_norm(x, weight, eps).bfloat16()
        return spoiled(made) if wrong == "norm" or (wrong == "norm alone" and len(x) == 1) else made

    op = fp8_linear.op
    monkeypatch.setattr(op, "splits_of", lambda rows, outputs, inputs, index: 4 if rows < 64 else 1)
    monkeypatch.setattr(op, "fp8_linear", lambda *given: fp8_reference.fp8_linear(*given).bfloat16())
    for name, made in (("fp8_linear_unmerged", unmerged), ("merge", merge), ("latent_norm", norm)):
        monkeypatch.setattr(op, name, made)
    if wrong is None:
        assert fp8_linear._check_unmerged() == "in 4 parts as the whole"
        assert "relative error" in fp8_linear._check_latent_norm()
        monkeypatch.setattr(op, "splits_of", lambda *sizes: 1)
        with pytest.raises(NotRun, match="this card cuts no inputs"):
            fp8_linear._check_unmerged()
        return
    words = {"merge": "1 rows of 4096 inputs in 4 parts and whole", "norm": "error", "norm alone": "a row alone"}[wrong]
    with pytest.raises(Failure, match=words):
        fp8_linear._check_unmerged() if wrong == "merge" else fp8_linear._check_latent_norm()


@pytest.mark.parametrize("wrong", [None, "all", "alone", "rows"])
def test_what_a_drafts_block_begins_with(wrong, monkeypatch):
    real, make = torch.Generator, fp8_linear.make_draft_input
    monkeypatch.setattr(torch, "Generator", lambda device: real())
    monkeypatch.setattr(
        fp8_linear, "make_draft_input", lambda rows, outputs, inputs, *g, **k: make(rows, 128, 256, *g, **k)
    )

    def operator(hidden, *given, ids=None):
        made = fp8_reference.draft_input(hidden, *given, ids=ids).bfloat16()
        is_wrong = {"all": True, "alone": len(hidden) == 1, "rows": ids is None}.get(wrong, False)
        return spoiled(made) if is_wrong else made

    monkeypatch.setattr(fp8_linear.draft_op, "draft_input", operator)
    if wrong is None:
        assert "relative error" in fp8_linear._check_draft_input()
        return
    with pytest.raises(Failure, match="error" if wrong == "all" else "1 tokens alone and among 64"):
        fp8_linear._check_draft_input()


# ---- bf16_linear


@pytest.mark.parametrize("wrong", [None, 48, 1, 33])
def test_the_tiles_of_a_head(wrong, small, monkeypatch):
    real = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: real())

    def linear(x, weight):
        out = bf16_reference.bf16_linear(x, weight).float()
        return spoiled(out) if len(x) == wrong else out

    monkeypatch.setattr(bf16_linear.op, "bf16_linear", linear)
    if wrong is None:
        assert "equal the rows among others" in bf16_linear._check_head()
    else:
        with pytest.raises(Failure, match="relative error" if wrong == 48 else f"{wrong} rows alone and among 48"):
            bf16_linear._check_head()


# ---- mhc


def boundary(f, streams, post, comb, fn, scale, base, *, norm_weight, kernels=None, sum_over=None):
    assert sum_over is None
    new = mhc_reference.mhc(f, streams, post, comb, fn, scale, base, norm_weight=norm_weight)
    return new.streams.bfloat16(), new.post.float(), new.comb.float(), new.y.bfloat16()


def post_alone(f, streams, post, comb):
    return mhc_reference.mhc_post(f, streams, post, comb).bfloat16()


def pre_alone(streams, fn, scale, base, *, norm_weight):
    y, post, comb = mhc_reference.mhc_pre(streams, fn, scale, base, norm_weight=norm_weight)
    return post.float(), comb.float(), y.bfloat16()


def head(streams, fn, scale, base, *, norm_weight, f=None, post=None, comb=None):
    new = streams if f is None else post_alone(f, streams, post, comb)
    y = mhc_reference.mhc_head(new, fn, scale, base, norm_weight=norm_weight).bfloat16()
    return y if f is None else (new, y)


PARTS = {
    "mhc_post": (post_alone, "streams of a post"),
    "mhc_pre": (lambda *a, **k: tuple(map(spoiled, pre_alone(*a, **k))), "post of a pre"),
    "mhc_head": (lambda *a, **k: spoiled(head(*a, **k)) if "f" not in k else head(*a, **k), "a head alone"),
}


@pytest.mark.parametrize("wrong", [None, *PARTS])
def test_the_parts_of_a_boundary(wrong, small, monkeypatch):
    for name, right in (("mhc", boundary), ("mhc_post", post_alone), ("mhc_pre", pre_alone), ("mhc_head", head)):
        monkeypatch.setattr(mhc.op, name, right)
    if wrong is None:
        assert "bit by bit" in mhc._check_parts()
        return
    kernel, words = PARTS[wrong]
    monkeypatch.setattr(mhc.op, wrong, kernel if wrong != "mhc_post" else lambda *a, **k: spoiled(post_alone(*a, **k)))
    with pytest.raises(Failure, match=words):
        mhc._check_parts()


def added(f, left):
    """By who makes the last addition."""
    if f.ndim == 3:
        return ((f[0] + f[1]) + (f[2] + f[3])).bfloat16()
    return f.add(left["routed"], alpha=left["scaling"]) if left else f


@pytest.mark.parametrize("wrong", [None, "routed", "unmerged", "unscaled", "small card"])
def test_a_boundary_that_adds(wrong, small, monkeypatch):
    def adds(*, f, routed=None, scaling=1.0, **given):
        form = "unmerged" if f.ndim == 3 else "whole" if routed is None else "routed"
        left = {"routed": routed, "scaling": 1.0 if wrong == "unscaled" else scaling} if form == "routed" else {}
        found = boundary(added(f, left), **given)
        return (*found[:3], spoiled(found[3])) if form == wrong else found

    monkeypatch.setattr(mhc.op, "mhc", adds)
    monkeypatch.setattr(mhc.op, "takes_own_terms", lambda like: wrong != "small card")
    if wrong is None:
        assert "bit by bit" in mhc._check_additions()
        return
    with pytest.raises(NotRun if wrong == "small card" else Failure) as raised:
        mhc._check_additions()
    words = {"unscaled": "streams of a boundary that adds what is routed", "small card": "too few multiprocessors"}
    assert words.get(wrong, f"y of a boundary that adds what is {wrong}") in str(raised.value)


@pytest.mark.parametrize("wrong", [None, "bits", "fault", "small card"])
def test_a_boundary_with_a_sum(wrong, small, monkeypatch):
    told = "rank 1 waited in vain" if wrong == "fault" else None
    closed, terms_of, forms = [], {}, []
    rank = SimpleNamespace(fault=lambda: told, close=lambda: closed.append(1))
    module = SimpleNamespace(mhc_fits_summing=lambda rows, num_sms: rows < 16 and wrong != "small card")
    monkeypatch.setattr(extension, "load", lambda: module)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(all_reduce, "in_threads", lambda ranks, transport: [rank] * ranks)

    def summed(group, terms, streams, *, call):
        terms_of["now"] = [added(*term) for term in terms]
        return [call(term, one) for term, one in zip(terms, group, strict=True)]

    def with_sum(*, f, sum_over=None, routed=None, scaling=1.0, **given):
        forms.append((f.ndim, routed is not None))
        if sum_over is None:
            return boundary(f, **given)
        found = boundary(mhc.sum_of_ranks(terms_of["now"]), **given)
        return (*found[:3], spoiled(found[3])) if wrong == "bits" else found

    monkeypatch.setattr(all_reduce, "summed", summed)
    monkeypatch.setattr(mhc.op, "mhc", with_sum)
    if wrong is None:
        assert mhc._check_sum("peer").startswith("rows [1, 8]") and len(closed) == 2
        assert set(forms) == {(2, False), (2, True), (3, False)}  # whole, and without its last addition
    else:
        raised = NotRun if wrong == "small card" else Failure
        words = {
            "bits": "1 rows, terms whole: a boundary with a sum",
            "fault": told,
            "small card": "too few multiprocessors",
        }[wrong]
        with pytest.raises(raised, match=words):
            mhc._check_sum("peer")


# ---- router_topk's argmax of long rows


GENERATOR = torch.Generator
WRONG_PLACES = {
    "the last of equals": lambda x: x.shape[1] - 1 - x.flip(1).argmax(1),
    "a NaN is nothing": lambda x: x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(1),
    "a minus zero is less": lambda x: torch.where(x == 0, torch.where(x.signbit(), -1e-30, 1e-30), x).argmax(1),
    "of one part alone": lambda x: x[:, : router_topk.op.PART_NUMBERS].argmax(1),
    "nothing": lambda x: torch.zeros(len(x), dtype=torch.int64),
}


@pytest.mark.parametrize("wrong", [None, *WRONG_PLACES])
def test_the_argmax_of_a_vocabulary(wrong, monkeypatch):
    monkeypatch.setattr(torch, "Generator", lambda device: GENERATOR())
    monkeypatch.setattr(router_topk.op, "row_argmax", WRONG_PLACES.get(wrong, lambda x: x.argmax(1)))
    if wrong is None:
        assert "torch's, of 6 kinds" in router_topk._check_argmax()
        return
    with pytest.raises(Failure, match="places differ"):
        router_topk._check_argmax()


# ---- what drafts guess with


def of_head(x, copy, weight):
    return draft_head.draft_head(x, copy, weight).float()


def of_the_first_part_alone(x, copy, weight):
    found, by_copy = of_head(x, copy, weight), draft_head.scores(x, copy).float()
    return torch.cat([found[:, :2048], by_copy[:, 2048:]], 1)


WRONG_LOGITS = {
    "the copy's alone": lambda x, copy, weight: draft_head.scores(x, copy).float(),
    "the best of one part": of_the_first_part_alone,
    "the head's of all": lambda x, copy, weight: (x.double() @ weight.double().T).float(),
    "of the row above": lambda *call: of_head(*call).roll(1, 0),
    "of the output beside": lambda *call: of_head(*call).roll(1, 1),
    "of the batch": lambda x, *more: of_head(x, *more) * (1 + 1e-4 * len(x)),
    "no numbers": lambda *call: torch.full_like(of_head(*call), torch.nan),
    "nothing": lambda *call: torch.zeros_like(of_head(*call)),
}


@pytest.mark.parametrize("wrong", [None, *WRONG_LOGITS])
def test_what_drafts_guess_with(wrong, monkeypatch):
    monkeypatch.setattr(torch, "Generator", lambda device: GENERATOR())
    make_head, make_x = bf16_linear.make_head, bf16_linear.make_x
    monkeypatch.setattr(bf16_linear, "make_head", lambda outputs, made: make_head(2560, made, hidden=1024))
    monkeypatch.setattr(bf16_linear, "make_x", lambda rows, made: make_x(rows, made, hidden=1024))
    monkeypatch.setattr(bf16_linear.draft_head, "draft_head", WRONG_LOGITS.get(wrong, of_head))
    if wrong is None:
        assert "guesses are the head's own" in bf16_linear._check_draft_head()
        return
    with pytest.raises(Failure):
        bf16_linear._check_draft_head()
