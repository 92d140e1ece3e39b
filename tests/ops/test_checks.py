"""What every public function of every operator refuses, argument by argument: one table, ops.checks.RAISES. CPU only.

Each tensor of a good call is made wrong in one way at a time; what only one operator knows is in its own test file.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.ops.shared.checks import RAISES
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.specs import compressor, index_select, mxfp4_moe
from deepseek_v4_sm120.specs import mhc as mhc_spec
from deepseek_v4_sm120.specs.wo_a import make_wo_a

ROWS = 3
MODULES = {op: importlib.import_module(f"deepseek_v4_sm120.ops.{op}") for op in OPS}


pytestmark = pytest.mark.usefixtures("fake")


def bf16(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def int32(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def e4m3(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _calls() -> dict[str, tuple[str, dict]]:
    """Good calls, but for the device: name -> (operator, arguments)."""
    product = {"x": bf16(ROWS, 384), "weight": e4m3(256, 384), "weight_scale": torch.ones(2, 3)}
    groups = {"x": bf16(ROWS, 2, 384), "weight": e4m3(2, 256, 384), "weight_scale": torch.ones(2, 2, 3)}
    rotated = make_wo_a(ROWS, 2, torch.Generator().manual_seed(1), outputs=128, inputs=1024, table=9)
    rotated = dict(zip(("x", "weight", "weight_scale", "freqs_cis", "positions"), rotated, strict=True))
    mhc = mhc_spec.make_inputs(mhc_spec.Shape(ROWS), device="cpu")
    moe_shape = mxfp4_moe.Shape(ROWS, hidden=256, inter=128, experts=4, topk=2)
    moe = mxfp4_moe.make_inputs(moe_shape, device="cpu").arguments()
    chosen = {"out": int32(ROWS, 512), "entries": int32(ROWS, 512), "logits": torch.zeros(ROWS, 512)}
    dealt = {"dealt": int32(2, -(-ROWS // 2), 512), "out": chosen["out"], "entries": chosen["entries"]}
    table = {"lengths": int32(ROWS), "page_table": int32(ROWS, 10)}
    keys = {"k_pages": index_select.new_pages(5, False), "weights": torch.zeros(ROWS, 64), **table}
    fp4_keys = {**keys, "k_pages": index_select.new_pages(5, True), "q_scales": int32(ROWS, 1, 64)}
    window = {"kv_pages": kv_pages.new_pages(3, 256), "indices": int32(ROWS, 1, 128), "topk_length": int32(ROWS)}
    extra = {f"extra_{name}": tensor for name, tensor in window.items()}
    attention = {"q": bf16(ROWS, 1, 16, 512), **window, "attn_sink": torch.zeros(16), "out": bf16(ROWS, 1, 16, 512)}
    by_table = {**extra, "extra_page_table": int32(2, 8), "extra_page_table_rows": int32(ROWS)}
    del by_table["extra_indices"]
    group = SimpleNamespace(hidden=4096, max_rows=512, ranks=2, slot_vectors=9000, device=torch.device("cpu"))

    def given(inputs) -> dict:
        return {name: value for name, value in inputs.arguments().items() if value is not None}

    return {
        "all_reduce": ("all_reduce", {"x": bf16(ROWS, 4096), "group": group, "out": bf16(ROWS, 4096)}),
        "all_gather": ("all_reduce", {"x": bf16(ROWS, 4096), "group": group, "out": bf16(ROWS, 8192)}),
        "bf16_linear": ("bf16_linear", {"x": bf16(2, 512), "weight": bf16(8, 512), "out": torch.zeros(2, 8)}),
        "router_topk": (
            "router_topk",
            {"router_logits": bf16(ROWS, 16), "bias": bf16(16), "topk": 6, "real_rows": int32(1)},
        ),
        "compressor": ("compressor", given(compressor.make_inputs("c4", [4, 5, 8], device="cpu"))),
        "compressor, many": ("compressor", given(compressor.make_step("c4", [compressor.Request(5, 4)], device="cpu"))),
        "clear_drafts": ("compressor", compressor.make_drafts(ROWS, 4, 2, ring=128, device="cpu").arguments()),
        "fp8_linear": ("fp8_linear", {**product, "out": bf16(ROWS, 256)}),
        "fp8_linear_unmerged": ("fp8_linear", product),
        "merge": ("fp8_linear", {"partial": torch.zeros(4, ROWS, 256)}),
        "row_argmax": ("router_topk", {"x": torch.zeros(ROWS, 256)}),
        "latent_norm": ("fp8_linear", {"x": bf16(ROWS, 1024), "weight": bf16(1024), "eps": 1e-6}),
        "fp8_grouped_linear": ("fp8_linear", {**groups, "out": bf16(ROWS, 2, 256)}),
        "wo_a": ("wo_a", rotated),
        "multiply_expanded": ("wo_a", {**groups, "out": bf16(ROWS, 2, 256)}),
        "expanded": ("wo_a", {name: groups[name] for name in ("weight", "weight_scale")}),
        "mhc": ("mhc", mhc.boundary()),
        "mhc_pre": ("mhc", mhc.pre()),
        "mhc_post": ("mhc", mhc.post_only()),
        "mhc_head": ("mhc", {**mhc.head(), **mhc.post_only(), "norm_weight": mhc.norm_weight}),
        "add_shared": ("mxfp4_moe", {"shared": bf16(ROWS, 256), "routed": bf16(ROWS, 256)}),
        "mxfp4_moe": ("mxfp4_moe", {**moe, "expert_map": int32(9), "out": bf16(ROWS, 256)}),
        "index_select": ("index_select", {"q": e4m3(ROWS, 1, 64, 128), **keys, **chosen}),
        "index_select, fp4": ("index_select", {"q": torch.zeros(ROWS, 1, 64, 64).char(), **fp4_keys, **chosen}),
        "mqa_logits": ("index_select", {"q": e4m3(ROWS, 1, 64, 128), **keys, "out": torch.zeros(ROWS, 640)}),
        "mqa_logits, fp4": ("index_select", {"q": torch.zeros(ROWS, 1, 64, 64).char(), **fp4_keys}),
        "topk_select": ("index_select", {"scores": torch.zeros(ROWS, 600), **table, **chosen}),
        "dealt_slots": ("index_select", {**dealt, "page_table": int32(ROWS, 10), "num_pages": 5}),
        "sparse_decode": ("sparse_decode", {**attention, **extra}),
        "sparse_decode, table": ("sparse_decode", {**attention, **by_table}),
    }


CALLS = _calls()
BAD_MHC = [("norm_eps", -1e-6), ("rms_eps", -1.0), ("hc_eps", math.nan), ("kernels", "two")]
BAD_SUM = ("sum_over", "tp")
BAD_VALUES = {
    "all_reduce": [("algorithm", "three_shot")],
    "compressor": [("norm_eps", 0.0), ("norm_eps", math.nan), ("page_size", 48), ("page_size", 0), ("fp4", True)],
    "clear_drafts": [("states", []), ("states", [None] * 65), ("ring", 0), ("tokens", 0)],
    "bf16_linear": [("out_dtype", torch.float16)],
    "latent_norm": [("eps", -1e-6), ("eps", math.nan)],
    "router_topk": [("topk", 0), ("topk", 9), ("topk", 1.5)],
    "mhc": [*BAD_MHC, ("sinkhorn_iters", 0), BAD_SUM],
    "mhc_pre": [*BAD_MHC, ("sinkhorn_iters", 0), ("kernels", "many")],
    "mhc_head": [*BAD_MHC, ("kernels", "many"), BAD_SUM],
    "mxfp4_moe": [("activations", "fp4")],
    "index_select": [("k", 0), ("k", 1025), ("k", 1.0)],
    "topk_select": [("k", 0), ("k", 1025)],
    "dealt_slots": [("num_pages", 0), ("num_pages", 5.0)],
}
# what has no wrong value, or none that is looked at: hints, factors, positions of a rank's experts; a group of ranks,
# which test_all_reduce_validation.py has
UNCHECKED = {
    "router_topk": {"in_pairs", "log1p", "renormalize", "scale"},
    "wo_a": {"reproducible"},
    "all_reduce": {"group", "tag"},
    "all_gather": {"group", "tag"},
    "mhc": {"post_scale", "tag", "routed", "scaling"},  # of a sum: test_mhc_validation.py
    "mhc_pre": {"post_scale"},
    "fp8_linear": {"whole"},
    "mhc_head": {"tag"},
    "mxfp4_moe": {"routed_scaling", "swiglu_limit", "first_expert", "up_first", "reproducible"},
    "add_shared": {"scaling"},
    "index_select": {"rows_per_request"},
    "mqa_logits": {"rows_per_request"},
    "topk_select": {"num_pages"},
    "sparse_decode": {"softmax_scale", "return_lse", "prefill", "pairs"},
}
# of the public functions of ops: sizes and predicates
NO_CHECKS = {
    *("takes", "takes_sum", "summing_rows", "takes_prefill", "has_fp8_mma", "width", "entry_page_bytes", "most_states"),
    *("splits_of", "takes_latent", "takes_terms", "takes_own_terms", "takes_row_argmax"),
    *("check_product", "check_weight"),
    *("algorithm_for", "describe_fault", "is_exiting", "made_together", "is_narrow", "multiplies_block_scaled"),
    "triton_adds_in_pairs",
}
ANY_STRIDES = {"weight_scale", "kv_pages", "extra_kv_pages", "k_pages"}
ALIGNED = {
    *("x", "weight", "norm_weight", "streams", "f", "fn", "hidden", "w13", "w13_scale", "w2", "w2_scale", "q"),
    *("k_pages", "kv_pages", "extra_kv_pages", "freqs_cis", "state", "kv_score", "ape", "plan", "cache"),
    *("writes", "shared", "routed", "partial"),
}
ALIGNED_OUT = {"all_gather", "all_reduce", "fp8_linear", "fp8_grouped_linear", "mxfp4_moe", "sparse_decode"}
WRONG_DTYPES = {torch.int32: torch.int64, torch.bfloat16: torch.float16, torch.float32: torch.bfloat16}
WRITTEN = ("out", "entries", "logits")


def function_of(name: str):
    return getattr(MODULES[CALLS[name][0]], name.split(",")[0])


def first_of(name: str) -> str:
    """The argument whose device is the call's."""
    if name.startswith(("compressor", "mhc")):
        return "state" if name.startswith("compressor") else "streams"
    return next(iter(CALLS[name][1]))


def refused(name: str, argument: str, kind: str, **changes) -> str:
    """The message of a call that must be refused before anything is allocated."""
    function, arguments = function_of(name), {**CALLS[name][1], **changes}
    nothing = mock.Mock(side_effect=AssertionError("allocated before the checks were through"))
    with mock.patch.multiple(torch, empty=nothing, zeros=nothing), pytest.raises(RAISES[kind]) as raised:
        function(**arguments)
    message, head = str(raised.value), name.split(",")[0]
    assert raised.type is RAISES[kind]
    assert message.startswith(f"{head}: ") and argument in message and " must " in message and ", got " in message
    return message


def accepted(name: str, **changes) -> None:
    first = first_of(name)
    message = refused(name, first, "device", **changes)
    assert message.endswith(f"{first}.device must be a CUDA device, got cpu")


TENSORS = [(name, arg) for name, (_, good) in CALLS.items() for arg, v in good.items() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_a_good_call_ends_at_the_device(name):
    accepted(name)


def placed(like: torch.Tensor, dtype=None, *, spread=1, shift=0) -> torch.Tensor:
    """A tensor of the same shape, with strides `spread` times as large, `shift` elements past an aligned address."""
    strides = [spread * stride for stride in like.stride()]
    last = sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
    return torch.zeros(last + 1 + shift, dtype=dtype or like.dtype).as_strided(like.shape, strides, shift)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
@pytest.mark.parametrize("given", [None, [1.0]])
def test_what_is_no_tensor_is_said(name, argument, given):
    if given is None and inspect.signature(function_of(name)).parameters[argument].default is None:
        return  # may be left out, alone or with those that it goes with (test_every_value_is_looked_at)
    expected = f"{argument} must be a tensor, got {'None' if given is None else 'list'}"
    assert refused(name, argument, "dtype", **{argument: given}).endswith(expected)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_every_tensor_is_looked_at(name, argument):
    good, op, first = CALLS[name][1][argument], name.split(",")[0], first_of(name)
    wrong = WRONG_DTYPES.get(good.dtype, torch.float64)
    assert f"{argument}.dtype" in refused(name, argument, "dtype", **{argument: placed(good, wrong)})
    assert f"{argument}.shape" in refused(name, argument, "shape", **{argument: good[None]})
    if argument in ANY_STRIDES or (op, argument) == ("multiply_expanded", "out") or good.numel() == 1:
        accepted(name, **{argument: placed(good, spread=2)})
    else:
        assert "stride" in refused(name, argument, "stride", **{argument: placed(good, spread=2)})
    if argument in ALIGNED or (argument == "out" and op in ALIGNED_OUT):
        assert "-byte boundary" in refused(name, argument, "alignment", **{argument: placed(good, shift=1)})
    else:
        accepted(name, **{argument: placed(good, shift=1)})
    if argument != first:
        assert f"{argument}.device must be {first}'s, cpu" in refused(
            name, argument, "device", **{argument: good.to("meta")}
        )


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name, argument in TENSORS if argument in WRITTEN])
def test_what_is_written_lies_apart(name, argument):
    """From itself, from the first argument, and from all else that is written."""
    good = CALLS[name][1]
    assert "overlap itself" in refused(
        name, argument, "overlap", **{argument: good[argument][:1].expand_as(good[argument])}
    )
    others = [other for other in (first_of(name), *WRITTEN) if other in good and other != argument]
    assert others
    for other in others:
        memory = torch.zeros(max(good[argument].nbytes, good[other].nbytes), dtype=torch.uint8)
        both = {
            key: memory[: good[key].nbytes].view(good[key].dtype).view(good[key].shape) for key in (argument, other)
        }
        assert "not overlap" in refused(name, argument, "overlap", **both)
        end = both[argument].nbytes
        memory = torch.zeros(end + good[other].nbytes, dtype=torch.uint8)
        parts = {argument: memory[:end], other: memory[end:]}
        accepted(name, **{key: part.view(good[key].dtype).view(good[key].shape) for key, part in parts.items()})


@pytest.mark.parametrize(
    ("name", "argument", "bad"), [(name, *case) for name in BAD_VALUES for case in BAD_VALUES[name]]
)
def test_every_value_is_looked_at(name, argument, bad):
    refused(name, argument, "dtype" if argument == "out_dtype" else "value", **{argument: bad})


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_is_forgotten(name):
    """Every parameter is a tensor of the walk, has a bad value, or is said to have none."""
    op = name.split(",")[0]
    looked_at = {argument for name, argument in TENSORS if name.split(",")[0] == op}
    looked_at |= {argument for name, cases in BAD_VALUES.items() if name.split(",")[0] == op for argument, _ in cases}
    unchecked = UNCHECKED.get(op, set())
    assert looked_at | unchecked == set(inspect.signature(function_of(name)).parameters) and not looked_at & unchecked


def test_no_function_is_forgotten():
    public = {
        name
        for module in MODULES.values()
        for name, found in vars(module).items()
        if callable(found)
        and not name.startswith("_")
        and not inspect.isclass(found)
        and found.__module__ == module.__name__
    }
    walked = {name.split(",")[0] for name in CALLS}
    assert walked | NO_CHECKS == public and not walked & NO_CHECKS
    assert set(BAD_VALUES) | set(UNCHECKED) <= set(CALLS) and set(MODULES) <= walked


def raises_line() -> str:
    """What a docstring says: each error and what it is for, in RAISES' order."""
    errors = dict.fromkeys(RAISES.values())
    return ", ".join(f"{e.__name__} ({', '.join(kind for kind in RAISES if RAISES[kind] is e)})" for e in errors)


@pytest.mark.parametrize("name", CALLS)
def test_docstrings_say_what_is_raised(name):
    """By the table's own line, or by the operator whose errors they are."""
    text = " ".join(function_of(name).__doc__.split())
    if f"raises {raises_line()}" not in text:
        owners = [owner for owner in MODULES if owner in text]
        assert re.search(r"errors\b.* (as|are)\b", text) and owners
        assert any(f"raises {raises_line()}" in " ".join(function_of(owner).__doc__.split()) for owner in owners)
