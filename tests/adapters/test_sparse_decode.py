"""The adapters of sparse decode on argument sets as SGLang makes them; the reference is in the operator's place."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.ops.shared.kv_page_layout import KvPageLayout
from deepseek_v4_sm120.reference import kv_pages as pages_of
from deepseek_v4_sm120.reference import sparse_decode as reference
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as adapter
from deepseek_v4_sm120.specs import bounds

LAYOUT = KvPageLayout(
    nope_dim=448,
    rope_dim=64,
    head_dim=512,
    data_bytes=576,
    scale_bytes=8,
    token_bytes=584,
    tile_dim=64,
    page_align=576,
)
SCALE = 512**-0.5


@dataclass(frozen=True)
class Recorded:
    """Shapes of one call of the engine. Widths are multiples of 64, as the backend asserts."""

    name: str
    rows: int
    heads: int  # of q as it is handed over
    real_heads: int
    cache_dtype: torch.dtype
    extra_page_size: int | None = None
    extra_width: int = 0


RECORDED = [
    Recorded("0.5.17 TP1 decode, ratio 0", 1, 64, 64, torch.float8_e4m3fn),
    Recorded("0.5.17 TP1 decode, C4", 3, 64, 64, torch.float8_e4m3fn, 64, 512),
    Recorded("0.5.17 TP1 decode, C128", 2, 64, 64, torch.float8_e4m3fn, 2, 64),
    Recorded("0.5.17 TP4 decode, padded to 64 heads", 2, 64, 16, torch.float8_e4m3fn, 64, 512),
    Recorded("0.5.20 TP8 decode, the rank's heads", 2, 8, 8, torch.float8_e4m3fn, 64, 512),
    Recorded("0.5.12 TP1 extend, C128", 9, 64, 64, torch.uint8, 2, 64),
]


def padded_pool(pages, page_size, dtype, generator):
    """The view that the backend makes: [pages, P, 1, 584] sliced from a buffer [pages, padded page bytes]."""
    buffer = torch.zeros(pages, pages_of.page_bytes(page_size), dtype=torch.uint8)
    view = buffer[:, : page_size * 584].view(pages, page_size, 1, 584)
    tokens = torch.randn(pages * page_size, 512, generator=generator)
    pages_of.write_rows(view, torch.arange(pages * page_size), tokens)
    return view.view(dtype)


def engine_call(recorded):
    """Keyword arguments of flash_mla_with_kvcache_sm120 as the backend passes them."""
    generator = torch.Generator().manual_seed(recorded.rows * 1000 + recorded.heads)
    rows, heads = recorded.rows, recorded.heads
    q = torch.full((rows, 1, heads, 512), float("nan"), dtype=torch.bfloat16)  # padding is uninitialised memory
    q[:, :, : recorded.real_heads] = torch.randn(rows, 1, recorded.real_heads, 512, generator=generator)
    length = torch.randint(1, 129, (rows,), dtype=torch.int32, generator=generator)
    indices = torch.randint(0, 3 * 256, (rows, 1, 128), dtype=torch.int32, generator=generator)
    beyond = torch.arange(128) >= length[:, None, None]
    call = {
        "q": q,
        "k_cache": padded_pool(3, 256, recorded.cache_dtype, generator),
        "head_dim_v": 512,
        "softmax_scale": SCALE,
        "indices": indices.masked_fill(beyond, -1),
        "topk_length": length,
        "attn_sink": torch.randn(heads, generator=generator),
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "extra_topk_length": None,
    }
    if recorded.extra_page_size:
        extra_pages = 512 // recorded.extra_page_size
        width = recorded.extra_width
        call["extra_k_cache"] = padded_pool(extra_pages, recorded.extra_page_size, recorded.cache_dtype, generator)
        extra = torch.randint(0, 512, (rows, 1, width), dtype=torch.int32, generator=generator)
        extra[0] = -1  # a context too short for one compressed entry: length clamped to 1, index -1
        call["extra_indices_in_kvcache"] = extra
        call["extra_topk_length"] = torch.randint(1, width + 1, (rows,), dtype=torch.int32, generator=generator)
        call["extra_topk_length"][0] = 1
    return call


def flash_mla_call(call):
    """The same call as the backend makes it through FlashMLA's function: more keywords, no data in them."""
    more = {"block_table": None, "cache_seqlens": None, "tile_scheduler_metadata": object(), "is_fp8_kvcache": True}
    return call | more


@pytest.fixture
def served(monkeypatch):
    """Open gate, reference in the operator's place; yields the operator's calls."""
    calls = []

    def op(q, kv_pages, indices, *, out=None, return_lse=False, prefill=None, **named):
        calls.append({"q": q, "kv_pages": kv_pages, "indices": indices, "out": out, **named})
        result, lse = reference.sparse_decode(q, kv_pages, indices, dtype=torch.float32, **named)
        result = result.to(torch.bfloat16)
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if return_lse else result

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: True)
    monkeypatch.setattr(adapter, "kv_page_layout", lambda: LAYOUT)
    monkeypatch.setattr(adapter.op, "sparse_decode", op)
    return calls


@pytest.fixture
def closed(monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: False)
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: False)
    monkeypatch.setattr(adapter.op, "sparse_decode", None)  # must not be called


@pytest.fixture
def original():
    """A stock function that remembers its calls and returns something recognisable."""

    def flash_mla(*args, **kwargs):
        """stock"""
        flash_mla.calls.append((args, kwargs))
        return flash_mla.result

    flash_mla.calls, flash_mla.result = [], (object(), object())
    return flash_mla


def mode(monkeypatch, **values):
    monkeypatch.setattr(adapter, "settings", lambda: settings.Settings(**values))


def truth(call, heads):
    sink = call["attn_sink"][:heads]
    return reference.sparse_decode(
        call["q"][:, :, :heads],
        call["k_cache"],
        call["indices"],
        topk_length=call["topk_length"],
        attn_sink=sink,
        extra_kv_pages=call["extra_k_cache"],
        extra_indices=call["extra_indices_in_kvcache"],
        extra_topk_length=call["extra_topk_length"],
    )


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.name)
def test_sm120_serves_what_the_engine_sends(recorded, served, original):
    call = engine_call(recorded)
    result = adapter.replace_sm120(original)(**call)
    assert isinstance(result, tuple) and len(served) == 1 and not original.calls
    out = result[0]
    assert out.shape == call["q"].shape and out.dtype == torch.bfloat16
    expected, _ = truth(call, recorded.real_heads)
    torch.testing.assert_close(out[:, :, : recorded.real_heads].double(), expected, atol=2e-2, rtol=2**-7)
    assert served[0]["kv_pages"] is call["k_cache"], "the pool must be handed on as it is"
    assert served[0]["kv_pages"].stride(0) == 149760


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r.name)
def test_flash_mla_returns_out_and_lse(recorded, served, original):
    call = engine_call(recorded)
    out, lse = adapter.replace_flash_mla(original)(**flash_mla_call(call))
    assert not original.calls
    expected, expected_lse = truth(call, recorded.real_heads)
    assert lse.shape == (recorded.rows, recorded.heads, 1)
    torch.testing.assert_close(lse[:, : recorded.real_heads].double(), expected_lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out[:, :, : recorded.real_heads].double(), expected, atol=2e-2, rtol=2**-7)


FLASH_MLA = (adapter.replace_flash_mla, adapter.FLASH_MLA.names)
SGL_KERNEL = (adapter.replace_sgl_kernel, adapter.SGL_KERNEL.names)


@pytest.mark.parametrize(("replace", "names"), [FLASH_MLA, SGL_KERNEL], ids=["flash_mla", "sgl_kernel"])
def test_by_position_is_by_keyword(replace, names, served, original):
    call = flash_mla_call(engine_call(RECORDED[1]))
    defaults = {"num_splits": None, "causal": False, "descale_q": None, "descale_k": None}
    by_position = [(defaults | call)[name] for name in names]
    function = replace(original)
    rest = dict(zip(names[5:], by_position[5:], strict=True))
    whole = [function(**call), function(*by_position), function(*by_position[:5], **rest)]
    assert len(served) == 3 and not original.calls
    for out, lse in whole[1:]:
        assert torch.equal(out, whole[0][0]) and torch.equal(lse, whole[0][1])


def test_function_keeps_its_name_and_original(served, original):
    for replace in (adapter.replace_sm120, adapter.replace_flash_mla, adapter.replace_sgl_kernel):
        function = replace(original)
        assert function.__wrapped__ is original and function.__name__ == "flash_mla" and function.__doc__ == "stock"


@pytest.mark.parametrize("replace", [adapter.replace_sm120, adapter.replace_flash_mla, adapter.replace_sgl_kernel])
def test_closed_gate_is_the_original(replace, closed, original):
    call = engine_call(RECORDED[0]) | {"a_keyword_of_tomorrow": 1}
    assert replace(original)(**call) is original.result
    ((args, kwargs),) = original.calls
    assert args == () and kwargs.keys() == call.keys() and all(kwargs[k] is call[k] for k in call)


def other_calls():
    """Calls through the same names that are not ours, by what is different."""
    v4 = flash_mla_call(engine_call(RECORDED[1]))
    q = v4["q"]
    return {
        "dense, no indices": v4 | {"indices": None},
        "not FP8": v4 | {"is_fp8_kvcache": False},
        "causal": v4 | {"causal": True},
        "fp16 query": v4 | {"q": q.half()},
        "V3.2 head of 576": v4 | {"q": torch.zeros(3, 1, 64, 576, dtype=torch.bfloat16)},
        "V3.2 pages of 656 bytes": v4 | {"k_cache": torch.zeros(3, 64, 1, 656, dtype=torch.uint8)},
        "several query tokens": v4 | {"q": torch.zeros(3, 2, 64, 512, dtype=torch.bfloat16)},
        "int64 indices": v4 | {"indices": v4["indices"].long()},
        "value head of 256": v4 | {"head_dim_v": 256},
        "more heads than the kernel takes": v4 | {"q": torch.zeros(3, 1, 192, 512, dtype=torch.bfloat16)},
        "extra cache of another layout": v4 | {"extra_k_cache": torch.zeros(3, 64, 1, 528, dtype=torch.uint8)},
        "extra indices without a cache": v4 | {"extra_k_cache": None},
        "an extra cache without indices": v4 | {"extra_indices_in_kvcache": None},
        "a cache of heads": v4 | {"k_cache": torch.zeros(3, 64, 2, 584, dtype=torch.uint8)},
        "a flat cache": v4 | {"k_cache": torch.zeros(3, 64, 584, dtype=torch.uint8)},
        "a wide cache": v4 | {"k_cache": torch.zeros(3, 64, 1, 584, dtype=torch.int16)},
        "indices of all tokens": v4 | {"indices": v4["indices"][:, 0]},
        "a flat query": v4 | {"q": q[:, 0]},
    }


@pytest.mark.parametrize("different", other_calls())
def test_what_is_not_ours_goes_to_the_original(different, served, original):
    call = other_calls()[different]
    assert adapter.replace_sgl_kernel(original)(**call) is original.result
    assert len(original.calls) == 1 and not served


@pytest.mark.parametrize("name", ["descale_q", "descale_k"])
def test_descaled_values_go_to_the_original(name, served, original):
    call = flash_mla_call(engine_call(RECORDED[1])) | {name: torch.ones(3)}
    assert adapter.replace_sgl_kernel(original)(**call) is original.result
    assert not served


@pytest.mark.parametrize(
    ("said", "is_ours"),
    [({}, True), ({"use_legacy": True}, True), ({"use_legacy": False}, False), ({"kv_format": "V41"}, False)],
)
def test_other_formats_of_the_interface_go_to_the_original(said, is_ours, served, original):
    call = flash_mla_call(engine_call(RECORDED[1])) | said
    adapter.replace_flash_mla_interface(original)(**call)
    assert (len(served), len(original.calls)) == (is_ours, not is_ours)


def test_unknown_keyword_raises_with_both_lists(served, original):
    call = engine_call(RECORDED[0])
    with pytest.raises(TypeError, match=r"\['window'\].*knows \['q', 'k_cache'"):
        adapter.replace_sm120(original)(**call, window=128)
    with pytest.raises(TypeError, match=r"\['descale_q'\].*'tile_scheduler_metadata'"):
        adapter.replace_flash_mla(original)(**flash_mla_call(call), descale_q=None)
    with pytest.raises(TypeError, match="19 positional"):
        adapter.replace_sgl_kernel(original)(*[call["q"]] * 19)
    with pytest.raises(TypeError, match=r"\['q'\] given by position and by keyword"):
        adapter.replace_flash_mla(original)(call["q"], **flash_mla_call(call))
    with pytest.raises(TypeError, match=r"missing arguments \['head_dim_v'\]"):
        adapter.replace_flash_mla(original)(call["q"], call["k_cache"])
    assert not served and not original.calls


def test_padded_heads_are_not_computed_inside_the_backend(served, original):
    recorded = RECORDED[3]
    call = engine_call(recorded)
    attention = adapter.replace_sm120(original)

    class Backend:
        def forward(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=True, attn_sink=None, **_):
            return attention(**call)[0].squeeze(1)

    forward = adapter.replace_backend_forward(Backend.forward)
    layer = SimpleNamespace(tp_q_head_num=recorded.real_heads)
    out = forward(Backend(), q=None, k=None, v=None, layer=layer, forward_batch=None, compress_ratio=4)
    assert out.shape == (recorded.rows, 64, 512), "the model slices a result of the padded width"
    (made,) = served
    assert made["q"].shape[2] == made["attn_sink"].shape[0] == 16 and made["out"].shape[2] == 16
    assert made["q"].data_ptr() == call["q"].data_ptr(), "a view, not a copy"
    expected, _ = truth(call, 16)
    torch.testing.assert_close(out[:, :16].double(), expected[:, 0], atol=2e-2, rtol=2**-7)

    attention(**call)
    assert served[1]["q"].shape[2] == 64, "outside of the backend's forward the real heads are not known"


def test_backend_forward_forgets_the_heads_after_an_error(original):
    def forward(self, q, k, v, layer):
        raise RuntimeError("stock")

    with pytest.raises(RuntimeError, match="stock"):
        adapter.replace_backend_forward(forward)(None, None, None, None, SimpleNamespace(tp_q_head_num=8))
    assert adapter._backend.layer is None


def test_kernel_num_heads(served, monkeypatch):
    attention = SimpleNamespace(n_local_heads=16, head_dim=512, attn_sink=torch.zeros(64))

    def stock(self, num_tokens):
        return 64

    assert adapter.replace_kernel_num_heads(stock)(attention, 4) == 16
    for other in ({"is_dsv41": True}, {"head_dim": 576}, {"n_local_heads": 192}):
        assert adapter.replace_kernel_num_heads(stock)(SimpleNamespace(**(vars(attention) | other)), 4) == 64
    mode(monkeypatch, force="ops")  # another chip's kernels run there and need the padding
    assert adapter.replace_kernel_num_heads(stock)(attention, 4) == 64


def test_kernel_num_heads_with_closed_gate(closed):
    attention = SimpleNamespace(n_local_heads=16, head_dim=512, attn_sink=torch.zeros(64))
    assert adapter.replace_kernel_num_heads(lambda self, num_tokens: 64)(attention, 4) == 64


def test_sched_meta_is_empty_where_we_serve(served, original, monkeypatch):
    get_mla_metadata = adapter.replace_sched_meta(original)
    assert get_mla_metadata() == (None, None) and get_mla_metadata(torch.zeros(1), 64) == (None, None)
    assert not original.calls
    mode(monkeypatch, force="ops")
    assert get_mla_metadata(5) is original.result and original.calls == [((5,), {})]


def test_sched_meta_with_closed_gate(closed, original):
    assert adapter.replace_sched_meta(original)() is original.result


def test_shadow_runs_both_and_keeps_the_originals_result(served, monkeypatch):
    from deepseek_v4_sm120.sglang_patches import shadow

    recorded = RECORDED[3]
    call = engine_call(recorded)
    mode(monkeypatch, shadow="1")
    monkeypatch.setattr(shadow, "settings", adapter.settings)
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    shadow.reset()
    stock_out = torch.full((2, 1, 64, 512), float("nan"), dtype=torch.bfloat16)  # padded heads stay NaN, as their q is
    stock_out[:, :, :16] = truth(call, 16)[0].to(torch.bfloat16)

    def stock(**kwargs):
        assert kwargs.keys() == call.keys()
        return stock_out, None

    def forward(self, q, k, v, layer):
        return adapter_function(**call)

    adapter_function = adapter.replace_sm120(stock)
    backend_forward = adapter.replace_backend_forward(forward)
    result = backend_forward(None, None, None, None, SimpleNamespace(tp_q_head_num=16))
    assert result[0] is stock_out
    (record,) = shadow.report()
    assert record["calls"] == 1 and record["bad_calls"] == 0 and record["nonfinite_original"] == 0
    assert 0 < record["relative_l2_max"] < bounds.SPARSE_DECODE.shadow
    assert record["shape"] == {
        "rows": 2, "heads": 16, "width": 128, "page_size": 256, "extra_width": 512, "extra_page_size": 64
    }  # fmt: skip
    shadow.reset()


def in_e4m3(values, scale):
    return (values / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale


def flashinfers(call, heads):
    """What FlashInfer's decode kernel for SM120 computes: queries in E4M3 with a power of two for 64 dimensions; of 64
    candidates at a time the weights times their exponents in E4M3, by the greatest of a head and 64 dimensions."""
    q = call["q"][:, 0, :heads].double()
    tiles = q[..., :448].unflatten(-1, (7, 64))
    powers = torch.exp2((tiles.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    q = torch.cat([in_e4m3(tiles, powers).flatten(-2), q[..., 448:]], -1)
    parts = []
    for pages, indices, length in (("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices_in_kvcache",
                                                                           "extra_topk_length")):  # fmt: skip
        pages, indices = call[pages], call[indices]
        keys, valid = reference._gather(pages, indices, call[length], torch.float64)
        slots = indices[:, 0, : keys.shape[1]].clamp_min(0).long()
        exponents = pages_of._sections(pages)[1][slots // pages.shape[1], slots % pages.shape[1]][..., :7]
        parts += zip(*(t.split(64, 1) for t in (keys, valid, torch.exp2(exponents - 127.0))), strict=True)
    scores = [(torch.einsum("rhd,rnd->rhn", q, k) * SCALE).masked_fill(~v[:, None], -torch.inf) for k, v, _ in parts]
    greatest = torch.cat(scores, -1).amax(-1, keepdim=True)
    total = torch.exp(call["attn_sink"][:heads, None] - greatest)
    out = 0
    for score, (keys, _, powers) in zip(scores, parts, strict=True):
        weights = torch.exp(score - greatest)
        total = total + weights.sum(-1, keepdim=True)
        scaled = weights[..., None] * powers[:, None]  # [rows, heads, candidates, tiles]
        kept = in_e4m3(scaled, scaled.amax(2, keepdim=True).clamp_min(1e-10) / 448) / powers[:, None]
        nope = torch.einsum("rhnt,rntd->rhtd", kept, keys[..., :448].unflatten(-1, (7, 64))).flatten(-2)
        out = out + torch.cat([nope, torch.einsum("rhn,rnd->rhd", weights, keys[..., 448:])], -1)
    return (out / total)[:, None].bfloat16()


@pytest.mark.parametrize("kernels, is_bad", [("flashinfer", False), ("triton", True), (None, True)])
def test_shadow_allows_what_the_originals_kernels_round(served, monkeypatch, kernels, is_bad):
    """FlashInfer's own error is in every call; beside the others it would be a fault of somebody's."""
    from deepseek_v4_sm120.sglang_patches import shadow

    mode(monkeypatch, shadow="1")
    monkeypatch.setattr(shadow, "settings", adapter.settings)
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    if kernels:
        monkeypatch.setattr(sys.modules[__name__], "_sm120_default_backend", kernels, raising=False)
    shadow.reset()
    call = engine_call(RECORDED[1])

    def stock(**kwargs):
        return flashinfers(call, 64), None

    adapter.replace_sm120(stock)(**call)
    (record,) = shadow.report()
    assert record["bad_calls"] == is_bad and 0.02 < record["relative_l2_max"] < 0.04
    shadow.reset()
