"""The three names of FlashMLA's interface that SGLang 0.5.12 uses for DeepSeek-V4."""


class FlashMLASchedMeta:
    """Tile schedule of FlashMLA; ours needs none."""


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
):
    raise RuntimeError(
        "flash_mla: the package is not installed, and deepseek_v4_sm120 does not serve this call "
        f"(q {tuple(q.shape)} {q.dtype} on {q.device}, k_cache {tuple(k_cache.shape)} {k_cache.dtype}, "
        f"is_fp8_kvcache={is_fp8_kvcache}, indices given: {indices is not None})"
    )
