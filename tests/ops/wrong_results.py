"""Results of wrong kernels, made of the references: what test_wrong_results.py asks of the checks that users run.

A Wrong has an operator's inputs of calibrate, what a right kernel gives for them, and by name what wrong ones give.
The compressor, which writes in place, has its own: test_wrong_compressors.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from deepseek_v4_sm120.reference import fp8_linear as fp8_reference
from deepseek_v4_sm120.reference import mhc as mhc_reference
from deepseek_v4_sm120.reference import mxfp4_moe as moe_reference
from deepseek_v4_sm120.reference import router_topk as router_reference
from deepseek_v4_sm120.reference import sparse_decode as sparse_reference
from deepseek_v4_sm120.reference import wo_a as wo_a_reference
from deepseek_v4_sm120.reference.all_reduce import all_reduce as sum_of
from deepseek_v4_sm120.specs import (
    all_reduce,
    bf16_linear,
    bounds,
    fp8_linear,
    index_select,
    mhc,
    mxfp4_moe,
    router_topk,
    sparse_decode,
    wo_a,
)
from deepseek_v4_sm120.specs.provider import OURS


@dataclass(frozen=True)
class Wrong:
    """spec     the operator's
    case     of calibrate
    inputs   one of the case's
    right    what a right kernel gives
    faults   what wrong ones give, by what is wrong with them
    shadow   the bound of shadow mode, None where it compares no tensors
    stock    what SGLang's own gives there
    tensors  those of a result
    way      of ours
    """

    spec: ModuleType
    case: object
    inputs: object
    right: object
    faults: dict[str, object]
    shadow: float | None = None
    stock: object = None
    tensors: Callable = lambda result: [result]
    way: str = OURS


def changed(tensor: torch.Tensor, change: Callable) -> torch.Tensor:
    copy = tensor.clone()
    change(copy.view(copy.shape[0], -1))
    return copy


def _swap(rows) -> None:
    rows[[-2, -1]] = rows[[-1, -2]]


def _ordinary(rows) -> None:
    rows[-1, rows[-1].abs().argsort()[rows.shape[1] // 2]] = 0


PLACES = {
    "the last row is the one before": lambda rows: rows[-1].copy_(rows[-2]),
    "the last row is not written": lambda rows: rows[-1].zero_(),
    "the last rows change places": _swap,
    "8 outputs of a row's last 128 are not written": lambda rows: rows[-1, -8:].zero_(),
    "8 outputs of a row's last 128 are another row's": lambda rows: rows[-1, -8:].copy_(rows[0, -8:]),
    "a lane's column of 32, in the last 128 of a row": lambda rows: rows[-1, -128:][5::32].zero_(),
    "one number of a row is not written": _ordinary,
    "one number is no number": lambda rows: rows[0, 3].fill_(torch.nan),
}


def in_places(right: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: changed(right, change) for name, change in PLACES.items()}


# ---- attention


def prompt() -> Wrong:
    """One wrong row of many, in lists of many lengths."""
    case, lengths = sparse_decode.Case("C4", sparse_decode.PREFILL_ROWS, 2, 64, 64, 64), (64, 33, 1)
    window = sparse_decode.CacheShape(sparse_decode.SWA_PAGE, 128, lengths=(128, 5, 77))
    shape = sparse_decode.Shape(151, 2, window, sparse_decode.CacheShape(64, 64, lengths=lengths))
    inputs = sparse_decode.make_inputs(shape, device="cpu")
    right = sparse_reference.sparse_decode(**inputs.arguments())[0].bfloat16()
    cut = inputs.extra_topk_length.clone()
    cut[150] -= 1
    other = sparse_reference.sparse_decode(**inputs.arguments() | {"extra_topk_length": cut})[0].bfloat16()
    faults = in_places(right) | {"the last key of one row's second list": other}
    return Wrong(sparse_decode, case, inputs, right, faults, bounds.SPARSE_DECODE.shadow, right)


def sparse(kind: str, rows: int, page_size: int = 0, length: int = 0, width: int = 0) -> Wrong:
    case = sparse_decode.Case(kind, rows, 8, page_size, length, width)
    inputs = sparse_decode.correctness_inputs(case, "cpu")[0]
    row = (inputs.q.shape[0] - 1) // 3 * 3  # the last with the longest lists

    def out(**other) -> torch.Tensor:
        return sparse_reference.sparse_decode(**inputs.arguments() | other)[0].bfloat16()

    def masked(name: str, at: int | slice) -> torch.Tensor:
        indices = getattr(inputs, name).clone()
        indices[row, 0, at] = -1
        return indices

    right = out()
    faults = in_places(right) | {
        "the last key of a row's window": out(indices=masked("indices", 127)),
        "the first key of a row's window": out(indices=masked("indices", 0)),
        "a masked slot is slot 0": out(indices=inputs.indices.clamp_min(0)),
        "another head's sink": out(attn_sink=inputs.attn_sink.roll(1)),
        "no sink": out(attn_sink=None),
        "the entry behind the window": out(topk_length=inputs.topk_length + 1),
        "one head of one row": changed(right, lambda rows: rows[-1, -512:].copy_(rows[-1, :512])),
    }
    if page_size:
        extra = inputs.extra_indices
        faults |= {
            "the last key of a row's second list": out(extra_indices=masked("extra_indices", length - 1)),
            "the first key of a row's second list": out(extra_indices=masked("extra_indices", 0)),
            "a block of a row's second list": out(extra_indices=masked("extra_indices", slice(64, 96))),
            "the entry behind the second list": out(extra_topk_length=inputs.extra_topk_length + 1),
            "no second list": out(extra_kv_pages=None, extra_indices=None, extra_topk_length=None),
        }
        if page_size == 64:
            faults["a masked slot of the second list is slot 0"] = out(extra_indices=extra.clamp_min(0))
        faults["a key of a row twice"] = out(
            extra_indices=torch.cat([extra[..., :1], extra[..., :1], extra[..., 2:]], dim=-1)
        )
    return Wrong(sparse_decode, case, inputs, right, faults, bounds.SPARSE_DECODE.shadow, right)


# ---- the indexer


def index() -> Wrong:
    """Of a row's 512 entries, as slots."""
    case = index_select.Case("decode", 4, 3000)
    call = index_select.correctness_inputs(case, "cpu")[0]
    inputs = call.inputs
    reference = index_select.reference
    right, entries = reference.index_select(**inputs.arguments())
    logits = reference.mqa_logits(**inputs.arguments())

    def selected(**other) -> torch.Tensor:
        return reference.index_select(**inputs.arguments() | other)[0]

    def swapped(entry_of: Callable) -> torch.Tensor:
        """The last of the first row is the entry of this number."""
        entry = int(entry_of(logits[0]))
        slot = int(inputs.page_table[0, entry // 64]) * 64 + entry % 64
        weakest = int(logits[0, entries[0].long()].argmin())
        return changed(right, lambda rows: rows[0, weakest : weakest + 1].fill_(slot))

    weights = inputs.weights.clone()
    weights[0, [3, 4]] = weights[0, [4, 3]]
    faults = {
        "an entry is missing": changed(right, lambda rows: rows[0, 511:].fill_(-1)),
        "an entry is chosen twice": changed(right, lambda rows: rows[0, 511:].copy_(rows[0, 510:511])),
        "the 600th for the 512th": swapped(lambda row: row[:3000].argsort(descending=True)[600]),
        "the greatest is left out": changed(
            right, lambda rows: rows[0, logits[0, entries[0].long()].argmax()].fill_(swapped_slot(inputs, logits))
        ),
        "another row's list": changed(right, lambda rows: rows[0].copy_(rows[1])),
        "another page": changed(right, lambda rows: rows[0, 7:8].add_(64)),
        "the entry beside": changed(right, lambda rows: rows[0, 7:8].add_(1)),
        "the last entry of a row is not looked at": selected(lengths=inputs.lengths - 64),
        "the entries behind a row's": selected(lengths=inputs.lengths + 64),
        "a neighbour's head weight": selected(weights=weights),
        "no sign of the weights": selected(weights=inputs.weights.abs()),
        "the query of the row before": selected(q=inputs.q.roll(1, 0)),
    }
    return Wrong(index_select, case, call, right, faults)


def swapped_slot(inputs, logits) -> int:
    entry = int(logits[0].argmin())
    return int(inputs.page_table[0, entry // 64]) * 64 + entry % 64


# ---- dense layers


def _product(inputs, **other) -> torch.Tensor:
    given = {"x": inputs.x, "weight": inputs.weight, "scale": inputs.scale} | other
    return fp8_reference.fp8_linear(given["x"], given["weight"], given["scale"]).bfloat16()


def _of_scales(scale: torch.Tensor, run: Callable) -> dict[str, torch.Tensor]:
    """scale [.., outputs / 128, inputs / 128]; run(scale) -> result."""
    one, off, last = (scale.clone() for _ in range(3))
    one.view(-1)[-3] *= 2
    off[..., -1, :] = off[..., -2, :]
    last[..., -1] = last[..., -2]
    return {
        "one block's scale a power of two up": run(one),
        "the last outputs' scales are those before": run(off),
        "the last inputs' scales are those before": run(last),
    }


def fp8() -> Wrong:
    matrix = next(one for one in fp8_linear.matrices(2) if one.name == "shared_down")
    case = fp8_linear.Case(matrix, 128)
    (inputs,) = fp8_linear.correctness_inputs(case, "cpu")
    right, half = _product(inputs), inputs.x.clone()
    half[-1, -16:] = 0
    rounded = fp8_reference.quantized_activations(inputs.x)
    faults = in_places(right) | _of_scales(inputs.scale, lambda scale: _product(inputs, scale=scale))
    faults |= {
        "the last 16 inputs of a row": _product(inputs, x=half),
        "activations in E4M3": _product(inputs, x=rounded),
        "the part of the last inputs twice": _product(
            inputs, x=torch.cat([inputs.x[:, :-256], 2 * inputs.x[:, -256:]], dim=1)
        ),
    }
    stock = _product(inputs, x=rounded)
    return Wrong(fp8_linear, case, inputs, right, faults, bounds.FP8_LINEAR.shadow, stock)


def output_projection() -> Wrong:
    (matrix,) = (one for one in wo_a.matrices(8) if one.name == "wo_a")
    case = wo_a.Case(matrix, 8)
    (inputs,) = wo_a.correctness_inputs(case, "cpu")

    def out(**other) -> torch.Tensor:
        given = {"x": inputs.x, "weight": inputs.weight, "weight_scale": inputs.scale} | inputs.rotation | other
        return wo_a_reference.wo_a(**given).flatten(1).bfloat16()

    freqs, positions = inputs.rotation["freqs_cis"], inputs.rotation["positions"]
    right = out()
    faults = in_places(right) | _of_scales(inputs.scale, lambda scale: out(weight_scale=scale))
    faults |= {
        "the position beside": out(positions=(positions + 1) % len(freqs)),
        "the position of the row before": out(positions=positions.roll(1)),
        "the other way round": out(freqs_cis=freqs.conj()),
        "not rotated": out(freqs_cis=None),
        "half of the rotation": out(freqs_cis=torch.where(torch.arange(32) < 16, freqs, torch.ones_like(freqs))),
    }
    return Wrong(wo_a, case, inputs, right, faults, bounds.WO_A.shadow, right)


def projection(name: str) -> Wrong:
    matrix = next(one for one in bf16_linear.MATRICES if one.name == name)
    case = bf16_linear.Case(matrix, 8)
    inputs = bf16_linear.correctness_inputs(case, "cpu")[0]

    def out(x: torch.Tensor) -> torch.Tensor:
        return (x.double() @ inputs.weight.double().T).to(torch.bfloat16 if matrix.bf16_out else torch.float32)

    half, right = inputs.x.clone(), out(inputs.x)
    half[-1, -16:] = 0
    faults = in_places(right) | {"the last 16 inputs of a row": out(half)}
    if not matrix.bf16_out:
        faults |= {
            "rounded to bf16": right.bfloat16().float(),
            "parts added in f16": sum(out_part.half() for out_part in _parts(inputs)).float(),
        }
    return Wrong(bf16_linear, case, inputs, right, faults, bounds.BF16_LINEAR.shadow, right)


def _parts(inputs) -> list[torch.Tensor]:
    """Products of 16 parts of the inputs."""
    both = zip(inputs.x.double().chunk(16, 1), inputs.weight.double().chunk(16, 1), strict=True)
    return [x @ weight.T for x, weight in both]


# ---- experts


def experts() -> Wrong:
    case = mxfp4_moe.Case(16, 128)
    inputs = mxfp4_moe.make_inputs(mxfp4_moe.Shape(case.rows, 512, case.inter, 16), device="cpu")  # a short hidden
    given = inputs.arguments()
    pairs = _pairs(inputs)
    whole = pairs.sum(1)

    def without(row: int, slot: int, times: int = 1) -> torch.Tensor:
        return changed(whole, lambda rows: rows[row].sub_(times * pairs[row, slot])).bfloat16()

    light = int(inputs.topk_weights[3].argmin())
    expert = int(inputs.topk_ids[3, light])
    of_block = given["w13_scale"].clone()
    of_block[expert, :, 7] = of_block[expert, :, 8]
    down = given["w2_scale"].clone()
    down[expert] += 1
    weights, ids = inputs.topk_weights.clone(), inputs.topk_ids.clone()
    weights[3, [0, 1]] = weights[3, [1, 0]]
    ids[3, light] = int(inputs.topk_ids[4, 0])

    def out(**other) -> torch.Tensor:
        return moe_reference.mxfp4_moe(**given | other).bfloat16()

    right = out()
    faults = in_places(right) | {
        "a row's lightest expert is left out": without(3, light),
        "a row's lightest expert counts twice": without(3, light, -1),
        "a row's lightest expert is another's": out(topk_ids=ids),
        "two weights of a row change places": out(topk_weights=weights),
        "no limit": out(swiglu_limit=None),
        "gate and up change places": out(up_first=True),
        "scales of a group beside, in one expert": out(w13_scale=of_block),
        "all scales a power of two up, in one expert": out(w2_scale=down),
        "no weights": pairs.div(inputs.topk_weights[..., None]).sum(1).bfloat16(),
        "MXFP8 activations": out(activations="mxfp8"),
    }
    return Wrong(mxfp4_moe, case, inputs, right, faults, bounds.MXFP4_MOE.shadow, right)


def experts_by_mxfp8() -> Wrong:
    """A prompt's rows, of which the rounding of activations allows much more."""
    case = mxfp4_moe.Case(300, 128)
    inputs = mxfp4_moe.make_inputs(mxfp4_moe.Shape(case.rows, 512, case.inter, 16), device="cpu")
    given = inputs.arguments() | {"activations": "mxfp8"}
    right, weights = moe_reference.mxfp4_moe(**given).bfloat16(), inputs.topk_weights.clone()
    weights[7, inputs.topk_weights[7].argmax()] = 0
    without = moe_reference.mxfp4_moe(**given | {"topk_weights": weights})
    faults = in_places(right) | {"a row's heaviest expert is left out": without}
    return Wrong(mxfp4_moe, case, inputs, right, faults, bounds.MXFP4_MOE_MXFP8.shadow, right, way=mxfp4_moe.OURS_MXFP8)


def _pairs(inputs) -> torch.Tensor:
    """[rows, topk, hidden] float64 of each choice by itself."""
    every = []
    for slot in range(inputs.topk_ids.shape[1]):
        chosen = {name: getattr(inputs, name)[:, [slot]] for name in ("topk_ids", "topk_weights")}
        every.append(moe_reference.mxfp4_moe(**inputs.arguments() | chosen))
    return torch.stack(every, dim=1)


def router() -> Wrong:
    case = router_topk.Case(40)
    inputs = router_topk.correctness_inputs(case, "cpu")[0]
    right_weights, ids = router_reference.router_topk(inputs.logits, inputs.bias, router_topk.TOPK)
    right = right_weights.float(), ids.int()
    scores, by = router_reference.ranked(inputs.logits, inputs.bias)

    def of(chosen, **more):
        return router_reference.weights_of(scores, chosen, **more).float(), chosen.int()

    next_best, twice = ids.clone(), ids.clone()
    next_best[7, 5] = by[7].argsort(descending=True)[6]
    twice[7, 5] = twice[7, 4]
    without = scores.argsort(dim=1, descending=True)[:, : router_topk.TOPK]
    biased = by.gather(1, ids)
    swapped = right[0].clone()
    swapped[7, [0, 1]] = swapped[7, [1, 0]]
    faults = {
        "the 7th for the 6th, in one row": of(next_best),
        "an expert twice, in one row": of(twice),
        "without the bias": of(without),
        "weights with the bias": ((biased / biased.sum(1, keepdim=True)).float(), ids.int()),
        "not renormalised": of(ids, renormalize=False),
        "two weights of a row change places": (swapped, right[1]),
        "the last row is the one before": (changed(right[0], PLACES["the last row is the one before"]), right[1]),
        "the last ids are those of the row before": (
            right[0],
            changed(right[1], PLACES["the last row is the one before"]),
        ),
    }
    tensors = functools.partial(map, torch.Tensor.float)
    return Wrong(router_topk, case, inputs, right, faults, bounds.ROUTER_TOPK.shadow, right, tensors)


# ---- the residual


def boundary() -> Wrong:
    case = mhc.Case(8)
    inputs = mhc.correctness_inputs(case, "cpu")[0]

    def parts(**other) -> list[torch.Tensor]:
        made = mhc_reference.mhc(**inputs.boundary() | other)
        return [made.streams.bfloat16(), made.post.float(), made.comb.float(), made.y.bfloat16()]

    right = parts()

    def one(number: int, change: Callable) -> list[torch.Tensor]:
        return [changed(part, change) if i == number else part for i, part in enumerate(right)]

    faults = {f"streams: {name}": one(0, change) for name, change in PLACES.items()}
    faults |= {f"y: {name}": one(3, change) for name, change in PLACES.items()}
    scale = inputs.scale.clone()
    scale[1] = scale[2]
    faults |= {
        "Sinkhorn once less": parts(iters=mhc_reference.SINKHORN_ITERS - 1),
        "Sinkhorn once more": parts(iters=mhc_reference.SINKHORN_ITERS + 1),
        "Sinkhorn without eps": parts(eps=0.0),
        "comb the other way round": parts(comb=inputs.comb.mT.contiguous()),
        "another stream's post": parts(post=inputs.post.roll(1, 1)),
        "post's scale is comb's": parts(scale=scale),
        "no norm": parts(norm_weight=torch.ones_like(inputs.norm_weight)),
        "f of the row before": parts(f=inputs.f.roll(1, 0)),
        "one post of a row": one(1, lambda rows: rows[-1, 3:].mul_(1.001)),
        "one comb of a row": one(2, lambda rows: rows[-1, 15:].mul_(1.001)),
        "comb of the row before": one(2, PLACES["the last row is the one before"]),
    }
    return Wrong(mhc, case, inputs, right, faults, bounds.MHC.shadow, right, iter)


def sums(ranks: int) -> Wrong:
    case = all_reduce.Case(8, ranks)
    terms = all_reduce.correctness_inputs(case, "cpu")[0]
    right, without = sum_of(terms), sum_of(terms[:-1])

    def one(rows) -> None:
        rows[-1, -1] = without[-1, -1]

    rounded = functools.reduce(lambda total, term: (total.float() + term.float()).bfloat16(), terms)
    faults = in_places(right) | {
        "a rank's term is left out": without,
        "a rank's term is left out of one sum of all": changed(right, one),
        "a rank's term twice": sum_of([*terms, terms[0]]),
        "a rank's term is that of the call before": sum_of([*terms[:-1], terms[-1].roll(1, 0)]),
    }
    if ranks > 2:
        faults["rounded at every rank"] = rounded
    return Wrong(all_reduce, case, terms, right, faults, bounds.ALL_REDUCE.shadow, right)


EVERY: dict[str, Callable[[], Wrong]] = {
    "window": lambda: sparse("window", 4),
    "C4": lambda: sparse("C4", 4, 64, 256, 256),
    "C128": lambda: sparse("C128", 5, 2, 2048, 2048),
    "C4, a prompt": prompt,
    "index": index,
    "fp8_linear": fp8,
    "wo_a": output_projection,
    "router's projection": lambda: projection(bf16_linear.ROUTER),
    "index's head weights": lambda: projection(bf16_linear.HEAD_WEIGHTS),
    "mxfp4_moe": experts,
    "mxfp4_moe by MXFP8": experts_by_mxfp8,
    "router_topk": router,
    "mhc": boundary,
    "sums of two": lambda: sums(2),
    "sums of four": lambda: sums(4),
}
