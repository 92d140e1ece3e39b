"""sparse_decode for `calibrate`: the shapes of the planned TP, context and streams; who else computes it here."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from deepseek_v4_sm120.calibrate.provider import (
    OURS,
    STOCK,
    Provider,
    first_installed,
    is_installed,
    our_problem,
    unpatched,
)
from deepseek_v4_sm120.plan.memory import KV_TOKEN_BYTES
from deepseek_v4_sm120.plan.models import FLASH

# SGLang's SM120 function, newest home first (sglang_patches.py has the versions)
STOCK_MODULES = ("sglang.kernels.ops.attention.flash_mla_sm120", "sglang.srt.layers.attention.flash_mla_sm120")
STOCK_NAME = "flash_mla_with_kvcache_sm120"
TRITON_MODULE, TRITON_NAME = "sglang.kernels.ops.attention.flash_mla_sm120_triton", "flash_mla_sparse_decode_triton"
FLASHMLA_MODULES = ("sgl_kernel.flash_mla", "flash_mla")
# stock rounds Q and P to FP8 by default, a few percent of relative error; beyond this it is broken, not coarse
LOOSE_ERROR = 0.08
SWA_PAGE, POOL_BYTES = 256, 768 << 20
PREFILL_ROWS, CHECKED_PREFILL_ROWS = 2048, 520  # a chunk; as many rows as make the operator take its other kernel


@dataclass(frozen=True)
class Case:
    """One call shape: rows, a rank's heads, the second cache's page size, valid entries and captured width."""

    kind: str
    rows: int
    heads: int
    page_size: int = 0
    length: int = 0
    width: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.rows} x {self.heads} heads"

    @property
    def bytes_per_call(self) -> int:
        candidates = self.rows * (FLASH.window + self.length)
        return candidates * KV_TOKEN_BYTES + 2 * self.rows * self.heads * FLASH.head_dim * 2


def cases(*, tp: int, context: int, concurrency: int, quick: bool) -> list[Case]:
    """What a decode step of this plan calls."""
    heads = FLASH.heads // tp
    c4 = min(FLASH.index_topk, context // 4)
    c128 = max(1, context // 128)
    width = math.ceil(c128 / 64) * 64
    rows = sorted({1, concurrency} if quick else {1, concurrency, 2 * concurrency, 64})
    found = []
    for count in rows:
        found.append(Case("window", count, heads))
        found.append(Case("C4", count, heads, 64, c4, FLASH.index_topk))
        found.append(Case(f"C128 at {context // 1024}K", count, heads, 2, c128, width))
    if not quick:
        found.append(Case("C4", PREFILL_ROWS, heads, 64, c4, FLASH.index_topk))
    return found


def _is_prefill(case: Case) -> bool:
    return case.rows == PREFILL_ROWS


def max_error(provider: str, case: Case) -> float:
    """Relative L2 error beyond which an implementation counts as wrong."""
    from deepseek_v4_sm120.reference.accuracy import MAX_RELATIVE_ERROR

    return MAX_RELATIVE_ERROR if provider == OURS else LOOSE_ERROR


def providers() -> tuple[Provider, ...]:
    return (
        Provider(OURS, our_problem, _ours),
        Provider(f"{OURS}, decode kernel", our_problem, functools.partial(_ours, prefill=False), _is_prefill),
        Provider(f"{OURS}, prefill kernel", our_problem, functools.partial(_ours, prefill=True), _is_prefill),
        Provider(STOCK, _stock_problem, _stock, packages=("sglang",)),
        Provider("triton", _triton_problem, _triton, _is_small, ("sglang",)),
        Provider("flashmla", _flashmla_problem, _flashmla, lambda case: case.heads == 64),
        Provider("torch", lambda: None, _torch, lambda case: case.rows * (FLASH.window + case.length) <= 8 * 640),
    )


def _is_small(case: Case) -> bool:
    return case.rows * (FLASH.window + case.length) <= 16 * 640


# ---- inputs


def correctness_inputs(case: Case) -> list:
    """A few calls with masked entries, short and zero lengths, NaN in every byte that must not be read."""
    from deepseek_v4_sm120.reference.sparse_decode_inputs import CacheShape, Shape, make_inputs

    rows = CHECKED_PREFILL_ROWS if _is_prefill(case) else min(case.rows, 8)
    window = CacheShape(SWA_PAGE, FLASH.window, lengths=(FLASH.window, 5, 77), masked=0.02)
    extra = None
    if case.page_size:
        lengths = (case.length, max(1, case.length // 3), 1)
        extra = CacheShape(case.page_size, case.width, lengths=lengths, ascending=case.page_size == 2)
    return [
        make_inputs(Shape(rows, case.heads, window, extra), seed=seed, device="cuda")
        for seed in range(1 if _is_prefill(case) else 2)
    ]


class TimingInputs:
    """Calls whose rows lie all over large pools, so that each finds cold caches."""

    def __init__(self):
        import torch

        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.pools: dict[int, object] = {}

    def pool(self, page_size: int):
        """[pages, page_size, 1, 584] of random rows that repeat a template."""
        if page_size not in self.pools:
            from deepseek_v4_sm120.reference import kv_pages
            from deepseek_v4_sm120.reference.sparse_decode_inputs import rms_rows

            template = kv_pages.pack_rows(rms_rows(1 << 14, self.generator), page_size)
            pages, stride = template.shape[0], template.stride(0)
            copies = max(1, POOL_BYTES // (pages * stride))
            flat = template.as_strided((1, pages * stride), (pages * stride, 1)).repeat(copies, 1)
            shape = (copies * pages, page_size, 1, kv_pages.TOKEN_BYTES)
            self.pools[page_size] = flat.as_strided(shape, (stride, kv_pages.TOKEN_BYTES, kv_pages.TOKEN_BYTES, 1))
        return self.pools[page_size]

    def calls(self, case: Case, count: int) -> list:
        import torch

        from deepseek_v4_sm120.reference.sparse_decode_inputs import Inputs

        def random(slots: int, width: int) -> torch.Tensor:
            shape = (count, case.rows, 1, width)
            return torch.randint(0, slots, shape, generator=self.generator, device="cuda", dtype=torch.int32)

        q = torch.randn(
            (count, case.rows, 1, case.heads, FLASH.head_dim), generator=self.generator, device="cuda"
        ).bfloat16()
        swa = self.pool(SWA_PAGE)
        indices = random(swa.shape[0] * SWA_PAGE, FLASH.window)
        lengths = torch.full((case.rows,), FLASH.window, dtype=torch.int32, device="cuda")
        sink = torch.randn((case.heads,), generator=self.generator, device="cuda")
        found = [Inputs(q[i], swa, indices[i], lengths, sink) for i in range(count)]
        if case.page_size:
            extra = self.pool(case.page_size)
            chosen = random(extra.shape[0] * case.page_size, case.width)
            chosen[..., case.length :] = -1
            extra_lengths = torch.full((case.rows,), case.length, dtype=torch.int32, device="cuda")
            for i, inputs in enumerate(found):
                inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length = extra, chosen[i], extra_lengths
        return found


ERROR = "relative error against float64"


def error(provider: str, result, inputs) -> float:
    from deepseek_v4_sm120.reference.accuracy import relative_error
    from deepseek_v4_sm120.reference.sparse_decode import sparse_decode

    return relative_error(result, sparse_decode(**inputs.arguments())[0])


# ---- providers


def _ours(prefill: bool | None = None):
    """The operator as it is called, or with one of its two kernels."""
    from deepseek_v4_sm120.ops.sparse_decode import sparse_decode

    return lambda inputs: sparse_decode(**inputs.arguments(), prefill=prefill)


def _stock_problem() -> str | None:
    return None if first_installed(STOCK_MODULES) else "SGLang 0.5.13 or newer is not installed"


def _keywords(inputs) -> dict:
    import torch

    extra = inputs.extra_kv_pages
    return {
        "q": inputs.q,
        "k_cache": inputs.kv_pages.view(torch.float8_e4m3fn),
        "head_dim_v": inputs.q.shape[-1],
        "softmax_scale": inputs.q.shape[-1] ** -0.5,
        "indices": inputs.indices,
        "topk_length": inputs.topk_length,
        "attn_sink": inputs.attn_sink,
        "extra_k_cache": None if extra is None else extra.view(torch.float8_e4m3fn),
        "extra_indices_in_kvcache": inputs.extra_indices,
        "extra_topk_length": inputs.extra_topk_length,
    }


def _stock():
    function = unpatched(first_installed(STOCK_MODULES), STOCK_NAME)
    return lambda inputs: function(**_keywords(inputs))[0]


def _triton_problem() -> str | None:
    return None if is_installed(TRITON_MODULE) else "SGLang 0.5.16 or newer is not installed"


def _triton():
    decode = unpatched(TRITON_MODULE, TRITON_NAME)

    def call(inputs):
        dim = inputs.q.shape[-1]
        extra = (inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length)
        first = (inputs.q, inputs.kv_pages, inputs.indices, inputs.topk_length, inputs.attn_sink)
        return decode(*first, dim, dim**-0.5, *extra)[0].view_as(inputs.q)

    return call


def _flashmla_problem() -> str | None:
    import torch

    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return "has no kernel for this GPU"
    return None if first_installed(FLASHMLA_MODULES) else "neither sgl_kernel nor flash_mla is installed"


def _flashmla():
    """With a tile schedule for each set of lengths: FlashMLA's first call with a new one fills it in. The engine makes
    one a step, so it is not timed."""
    module = first_installed(FLASHMLA_MODULES)
    function, metadata = unpatched(module, "flash_mla_with_kvcache"), unpatched(module, "get_mla_metadata")
    fixed = {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True}
    schedule = {"lengths": (None, None)}

    def call(inputs):
        lengths = (inputs.topk_length, inputs.extra_topk_length)
        if any(new is not old for new, old in zip(lengths, schedule["lengths"], strict=True)):
            schedule.update(lengths=lengths, made=metadata()[0])
        return function(**_keywords(inputs), **fixed, tile_scheduler_metadata=schedule["made"])[0]

    return call


def _torch():
    """Plain float32 torch: gather, dequantise, two matrix products."""
    import torch

    from deepseek_v4_sm120.reference import kv_pages
    from deepseek_v4_sm120.reference.sparse_decode import valid_candidates

    def gathered(pages, indices, lengths):
        slots = pages.shape[0] * pages.shape[1]
        valid = valid_candidates(indices, slots, lengths)
        chosen = indices[:, 0, :].clamp(0, slots - 1)
        keys = kv_pages.read_rows(pages, chosen.flatten(), torch.float32).view(*chosen.shape, -1)
        return keys.masked_fill(~valid[..., None], 0.0), valid

    def call(inputs):
        parts = [gathered(inputs.kv_pages, inputs.indices, inputs.topk_length)]
        if inputs.extra_kv_pages is not None:
            parts.append(gathered(inputs.extra_kv_pages, inputs.extra_indices, inputs.extra_topk_length))
        keys, valid = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
        scale = inputs.q.shape[-1] ** -0.5 if inputs.softmax_scale is None else inputs.softmax_scale
        scores = torch.einsum("rhd,rkd->rhk", inputs.q[:, 0].float(), keys) * scale
        scores = scores.masked_fill(~valid[:, None], float("-inf"))
        sink = inputs.attn_sink[None, :, None].expand(scores.shape[0], -1, 1)
        weights = torch.cat([scores, sink], dim=2).softmax(dim=2)[..., :-1]
        return torch.einsum("rhk,rkd->rhd", weights, keys)[:, None].to(inputs.q.dtype)

    return call
