"""The FP8 KV page as the binary sees it. Defines no number: csrc/kv_page_layout.h is the source, `_C` exports it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from deepseek_v4_sm120.ops.shared import extension


@dataclass(frozen=True)
class KvPageLayout:
    """Sizes of one page; the picture is in csrc/kv_page_layout.h."""

    nope_dim: int  # E4M3 values of a token
    rope_dim: int  # bf16 values of a token
    head_dim: int  # both: K and V are the same row
    data_bytes: int  # of a token
    scale_bytes: int  # of a token, pad byte included
    token_bytes: int  # data and scales: the last dimension of the tensor that SGLang hands around
    tile_dim: int  # E4M3 values that share one UE8M0 exponent
    page_align: int  # page strides are multiples of this many bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes from one page of `page_size` tokens to the next, as SGLang allocates them."""
        return extension.load().kv_page_bytes(page_size)


@functools.cache
def kv_page_layout() -> KvPageLayout:
    """The layout that the loaded extension was compiled with."""
    binary = extension.load()
    return KvPageLayout(
        nope_dim=binary.KV_NOPE_DIM,
        rope_dim=binary.KV_ROPE_DIM,
        head_dim=binary.KV_HEAD_DIM,
        data_bytes=binary.KV_DATA_BYTES,
        scale_bytes=binary.KV_SCALE_BYTES,
        token_bytes=binary.KV_TOKEN_BYTES,
        tile_dim=binary.KV_TILE,
        page_align=binary.KV_PAGE_ALIGN,
    )
