"""What each kernel may read before it has waited for the kernels in front: one table, for the test and for the docs.

A pointer among a kernel's parameters is constant where nothing writes its memory while requests are served: weights,
their scales, tables, biases, sinks. Everything else comes from kernels in front, whoever's they are.
"""

from __future__ import annotations

from dataclasses import dataclass

# Pointers of each parameter struct (namespace::struct), constant ones first.
_ALL_REDUCE = ("x", "out", "places", "state", "fault")
_MHC = (
    ("fn", "scale", "base", "norm_weight"),
    ("x", "f", "post", "comb", "streams", "exchange", "y", "post_out", "comb_out", "partials", "counters"),
)
POINTERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_reduce::Params": ((), _ALL_REDUCE),
    "bf16_linear::Params": (("weight",), ("x", "out")),
    "bf16_linear::DraftHeadParams": (("copy", "weight"), ("x", "scores", "out")),
    "compressor::Params": (
        ("ape", "norm_weight", "freqs"),
        ("kv_score", "state", "plan", "out_loc", "cache", "pooled", "arrived", "writes"),
    ),
    "compressor::DraftsParams": ((), ("requests", "lengths", "accepted", "states")),
    "fp8_linear::DraftNormParams": (
        ("hidden_norm", "embedded_norm", "table"),
        ("hidden", "embedded", "ids", "hidden_out", "embedded_out"),
    ),
    "fp8_linear::DraftSumParams": ((), ("hidden", "embedded", "out")),
    "fp8_linear::NormParams": (("weight",), ("x", "out")),
    "fp8_linear::Params": (
        ("weight", "scale", "rotation"),
        ("x", "out", "partial", "positions"),
    ),
    "index_select::ScoreParams": (
        (),
        (
            *("split.lengths", "lists.headers", "lists.keys", "lists.offsets", "table.pages"),
            *("q", "q_scales", "weights", "k_pages", "logits"),
        ),
    ),
    "index_select::ListParams": ((), ("split.lengths", "lists.headers", "lists.keys", "lists.offsets", "logits")),
    "index_select::MergeParams": (
        (),
        (
            *("split.lengths", "lists.headers", "lists.keys", "lists.offsets", "table.pages"),
            *("slots", "entries", "logits"),
        ),
    ),
    "index_select::SlotParams": ((), ("dealt", "table.pages", "slots", "entries")),
    "mhc::Params": _MHC,
    "mhc::AddingParams": (
        tuple(f"boundary.{name}" for name in _MHC[0]),
        (*(f"boundary.{name}" for name in _MHC[1]), "term.routed", "term.partial"),
    ),
    "mhc::SummingParams": (
        tuple(f"boundary.{name}" for name in _MHC[0]),
        (
            *(f"boundary.{name}" for name in _MHC[1]),
            *(f"sum.{name}" for name in _ALL_REDUCE),
            *("term.routed", "term.partial"),
        ),
    ),
    "mxfp4_moe::Params": (
        ("expert_map", "w13.codes", "w13.scales", "w2.codes", "w2.scales"),
        ("x", "topk_ids", "topk_weights", "h", "y", "out"),
    ),
    "mxfp4_moe::SharedParams": ((), ("shared", "routed")),
    "mxfp4_moe::PrepareParams": ((), ("from", "to", "powers")),
    "mxfp4_moe::QuantizeParams": ((), ("from", "to.numbers", "to.scales")),
    "mxfp4_moe::ScaledParams": (
        ("w.codes", "w.scales"),
        (
            *("x.numbers", "x.scales", "pairs", "expert", "begin", "end"),
            *("h.numbers", "h.scales", "y", "taken"),
        ),
    ),
    "mxfp4_moe::SortedParams": (
        ("w.codes", "w.scales"),
        ("x", "powers", "pairs", "expert", "begin", "end", "h", "y", "y16", "taken"),
    ),
    "mxfp4_moe::SumParams": ((), ("y", "pair_expert", "topk_weights", "out")),
    "mxfp4_moe::TilesParams": (
        ("expert_map",),
        ("topk_ids", "pairs", "pair_expert", "expert", "begin", "end", "scratch", "taken"),
    ),
    "router_topk::ArgmaxParams": ((), ("x", "parts", "out")),
    "router_topk::Params": ((), ("logits", "bias", "weights", "ids", "real_rows")),
    "sparse_decode::Params": (
        ("attn_sink",),
        (
            *("q", "out", "lse", "partials", "control"),
            *("main.pages", "main.indices", "main.topk_length"),
            *("extra.pages", "extra.indices", "extra.topk_length", "extra_table.pages", "extra_table.table_of_row"),
        ),
    ),
    "wo_a::Params": (("weight", "scale"), ("out",)),
}

BEHIND, BEFORE, NEVER = "behind the wait", "before the wait", "never"


@dataclass(frozen=True)
class Kernel:
    """`pattern`: of its name without dsv4::, with template arguments where they decide; `first`: with `older`.

    ahead: constant pointers that are read before the wait.
    older: pointers that are read there although kernels write them, because `first` has waited for those: a kernel of
        the same call that lets its successors start only behind its own wait. By loads at the scope of the device.
    hints: pointers that are read there although kernels in front may write them, to ask early for what is then
        likely to be needed; they are read again behind the wait, and no result comes of a hint that was another. By
        loads at the scope of the device, too.
    trigger: where it lets its successors start; never: they start when it ends.
    """

    pattern: str
    params: str
    trigger: str
    ahead: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    cooperative: bool = False  # launched without programmatic launch: it has no wait and needs none


GATE_UP = r"mxfp4_moe::experts_kernel<.*Config<\d+, \d+, \d+, true, "
SORTED = r"mxfp4_moe::(sorted|wide)_kernel<"
SCORES = (r"index_select::score_kernel<", r"index_select::list_kernel")
W2 = ("w2.codes", "w2.scales")
COMPRESSOR = ("ape", "norm_weight", "freqs")

# of the self-test and of the sums' probe: they ask what a card does where kernels do not wait, and serve nobody
PROBES = r"card::|all_reduce::ping_kernel"

KERNELS: dict[str, Kernel] = {
    "all_reduce, one hop": Kernel(r"all_reduce::one_shot_kernel<", "all_reduce::Params", BEHIND),
    "all_reduce, gather": Kernel(r"all_reduce::gather_kernel<", "all_reduce::Params", BEHIND),
    "all_reduce, two hops": Kernel(r"all_reduce::two_shot_kernel<", "all_reduce::Params", BEHIND),
    "bf16_linear": Kernel(r"bf16_linear::bf16_linear_kernel<", "bf16_linear::Params", BEFORE, ahead=("weight",)),
    "bf16_linear, tiles": Kernel(
        r"bf16_linear::bf16_linear_tile_kernel<", "bf16_linear::Params", BEFORE, ahead=("weight",)
    ),
    "bf16_linear, drafts' scores": Kernel(
        r"bf16_linear::draft_head_kernel<", "bf16_linear::DraftHeadParams", BEFORE, ahead=("copy",)
    ),
    "bf16_linear, drafts' best": Kernel(
        r"bf16_linear::draft_head_best_kernel<", "bf16_linear::DraftHeadParams", BEHIND
    ),
    "compressor, groups of 4": Kernel(
        r"compressor::short_kernel", "compressor::Params", BEHIND, ahead=COMPRESSOR, hints=("plan",)
    ),
    "compressor, the indexer's": Kernel(
        r"compressor::index_kernel<", "compressor::Params", BEHIND, ahead=COMPRESSOR, hints=("plan",)
    ),
    "compressor, groups of 128": Kernel(
        r"compressor::long_kernel", "compressor::Params", BEHIND, ahead=("ape",), hints=("plan",)
    ),
    "compressor, many tokens, groups of 4": Kernel(
        r"compressor::(short|index)_many_kernel", "compressor::Params", BEHIND, ahead=COMPRESSOR, hints=("plan",)
    ),
    "compressor, many tokens, groups of 128": Kernel(
        r"compressor::long_many_kernel", "compressor::Params", BEHIND, hints=("plan",)
    ),
    "compressor, drafts cleared": Kernel(r"compressor::clear_drafts_kernel", "compressor::DraftsParams", BEFORE),
    "fp8_linear, few rows": Kernel(
        r"fp8_linear::linear_kernel<", "fp8_linear::Params", BEFORE, ahead=("weight", "scale")
    ),
    "fp8_linear, tiles": Kernel(r"fp8_linear::tile_kernel<", "fp8_linear::Params", BEFORE, ahead=("weight", "scale")),
    "fp8_linear, units": Kernel(r"fp8_linear::units_kernel<", "fp8_linear::Params", BEFORE, ahead=("weight",)),
    "fp8_linear, a draft's norms": Kernel(
        r"fp8_linear::.*draft_norms_kernel",
        "fp8_linear::DraftNormParams",
        BEHIND,
        ahead=("hidden_norm", "embedded_norm"),
    ),
    "fp8_linear, a draft's sum": Kernel(r"fp8_linear::.*draft_sum_kernel<", "fp8_linear::DraftSumParams", BEFORE),
    "fp8_linear, the latent's norm": Kernel(
        r"fp8_linear::.*\bnorm_kernel", "fp8_linear::NormParams", BEHIND, ahead=("weight",)
    ),
    "fp8_linear, splits added": Kernel(r"fp8_linear::merge_kernel<", "fp8_linear::Params", BEFORE),
    "index_select, scores": Kernel(SCORES[0], "index_select::ScoreParams", BEHIND),
    "index_select, lists": Kernel(SCORES[1], "index_select::ListParams", BEHIND),
    "index_select, merge": Kernel(
        r"index_select::merge_kernel",
        "index_select::MergeParams",
        BEHIND,
        older=("split.lengths",),
        first=SCORES,
    ),
    "index_select, slots": Kernel(r"index_select::slots_kernel<", "index_select::SlotParams", BEHIND),
    "mhc, few rows": Kernel(r"mhc::fused_kernel<", "mhc::Params", BEHIND, ahead=("fn", "scale", "base", "norm_weight")),
    "mhc, few rows, with an addition": Kernel(
        r"mhc::adding_kernel",
        "mhc::AddingParams",
        BEHIND,
        ahead=tuple(f"boundary.{name}" for name in _MHC[0]),
    ),
    "mhc, few rows, with a sum": Kernel(
        r"mhc::summing_kernel<",
        "mhc::SummingParams",
        BEHIND,
        ahead=tuple(f"boundary.{name}" for name in _MHC[0]),
    ),
    "mhc, mixes": Kernel(r"mhc::mix_kernel<", "mhc::Params", BEHIND, ahead=("fn",)),
    "mhc, finish": Kernel(r"mhc::finish_kernel<", "mhc::Params", BEHIND, ahead=("scale", "base", "norm_weight")),
    "mhc, post alone": Kernel(r"mhc::post_kernel", "mhc::Params", BEHIND),
    "mhc, many rows": Kernel(r"mhc::many_kernel", "mhc::Params", NEVER, cooperative=True),
    "mxfp4_moe, gate/up": Kernel(GATE_UP, "mxfp4_moe::Params", BEHIND),
    "mxfp4_moe, down": Kernel(
        r"mxfp4_moe::experts_kernel<.*Config<\d+, \d+, \d+, false, ",
        "mxfp4_moe::Params",
        BEFORE,
        ahead=("expert_map", *W2),
        older=("topk_ids",),
        first=(GATE_UP,),
    ),
    "mxfp4_moe, down and sum": Kernel(
        r"mxfp4_moe::down_sum_kernel<",
        "mxfp4_moe::Params",
        BEHIND,
        ahead=("expert_map", *W2),
        older=("topk_ids",),
        first=(GATE_UP,),
    ),
    "mxfp4_moe, sum": Kernel(
        r"mxfp4_moe::combine_kernel",
        "mxfp4_moe::Params",
        BEHIND,
        ahead=("expert_map",),
        older=("topk_ids", "topk_weights"),
        first=(GATE_UP,),
    ),
    "mxfp4_moe, shared expert added": Kernel(r"mxfp4_moe::add_shared_kernel", "mxfp4_moe::SharedParams", BEFORE),
    "mxfp4_moe, prepared": Kernel(r"mxfp4_moe::prepare_kernel", "mxfp4_moe::PrepareParams", BEHIND),
    "mxfp4_moe, block-scaled": Kernel(r"mxfp4_moe::scaled_kernel<", "mxfp4_moe::ScaledParams", BEHIND),
    "mxfp4_moe, quantized": Kernel(r"mxfp4_moe::quantize_kernel", "mxfp4_moe::QuantizeParams", BEHIND),
    "mxfp4_moe, sorted": Kernel(SORTED, "mxfp4_moe::SortedParams", BEHIND),
    "mxfp4_moe, sorted, sum": Kernel(r"mxfp4_moe::sorted_sum_kernel<", "mxfp4_moe::SumParams", BEHIND),
    "mxfp4_moe, tiles": Kernel(r"mxfp4_moe::(count|cut|place)_kernel", "mxfp4_moe::TilesParams", BEFORE),
    "router_topk": Kernel(r"router_topk::router_topk_kernel<", "router_topk::Params", BEHIND),
    "router_topk, argmax of long rows": Kernel(
        r"router_topk::.*argmax_(part|row)_kernel", "router_topk::ArgmaxParams", BEHIND
    ),
    "sparse_decode": Kernel(
        r"sparse_decode::(pairs::sparse_decode_(pairs|wide)|sparse_decode)_kernel\b", "sparse_decode::Params", BEHIND
    ),
    "sparse_prefill": Kernel(
        r"sparse_decode::prefill::sparse_prefill(_stacked)?_kernel<", "sparse_decode::Params", BEHIND
    ),
    "wo_a": Kernel(r"wo_a::expand_kernel", "wo_a::Params", BEFORE, ahead=("weight", "scale")),
}


def docs_table() -> str:
    """The same as the docs have it."""
    rows = ["| kernel | reads before its wait | lets its successors start |", "| --- | --- | --- |"]
    for name, kernel in KERNELS.items():
        if kernel.cooperative:
            reads = "launched without programmatic launch: no wait, none needed"
        else:
            parts = ((kernel.ahead, ""), (kernel.older, " (older than the call's first kernel)"))
            parts += ((kernel.hints, " (a hint, read again behind the wait)"),)
            named = [", ".join(f"`{pointer}`" for pointer in pointers) + why for pointers, why in parts if pointers]
            reads = "; ".join(named) or "nothing"
        trigger = "at its end" if kernel.trigger == NEVER else kernel.trigger
        rows.append(f"| {name} | {reads} | {trigger} |")
    return "\n".join(rows)
