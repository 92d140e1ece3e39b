"""The 584-byte FP8 KV page in plain torch: write rows as SGLang's cache writer does, read them back exactly.

The numbers below are this module's own reading of the format, on purpose: kv_page_layout.py and the kernels share one
source (csrc/kv_page_layout.h), and one source is not one witness. tests/test_kv_page_layout.py compares the two, a
hand-made page, and a page written by SGLang itself.

    page of P tokens   offset            bytes
    data    token i    i * 576           448 E4M3 values ("nope"), then 64 bf16 values, little-endian (rotary part)
    scales  token i    P * 576 + i * 8   7 UE8M0 exponents, one per 64 E4M3 values, then 1 pad byte that nobody writes
    tail               P * 584           pad up to a multiple of 576, never written

value = e4m3 * 2^(exponent - 127); exponent 0 reads as the value 0 and 255 as NaN.
"""

from __future__ import annotations

import torch

NOPE_DIM = 448
ROPE_DIM = 64
HEAD_DIM = 512
TILE_DIM = 64
NUM_TILES = 7
DATA_BYTES = 576
SCALE_BYTES = 8
TOKEN_BYTES = 584
PAGE_ALIGN = 576

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
NAN_EXPONENT = 255


def page_bytes(page_size: int) -> int:
    """Bytes from one page to the next: P tokens of 584 bytes, rounded up to a multiple of 576."""
    return -(-page_size * TOKEN_BYTES // PAGE_ALIGN) * PAGE_ALIGN


def new_pages(
    num_pages: int, page_size: int, *, fill: int = 0, stride: int | None = None, device="cpu"
) -> torch.Tensor:
    """A pool as SGLang hands it out: uint8 [pages, P, 1, 584], stride(0) the padded page, every byte `fill`."""
    stride = page_bytes(page_size) if stride is None else stride
    if stride < page_size * TOKEN_BYTES:
        raise ValueError(f"new_pages: stride must be at least {page_size * TOKEN_BYTES} bytes, got {stride}")
    storage = torch.full((num_pages * stride,), fill, dtype=torch.uint8, device=device)
    return storage.as_strided((num_pages, page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))


def _sections(kv_pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(data [pages, P, 576], scales [pages, P, 8]): byte views of a pool's two sections."""
    raw = kv_pages.view(torch.uint8)
    pages, page_size = raw.shape[:2]
    offset, stride = raw.storage_offset(), raw.stride(0)
    data = raw.as_strided((pages, page_size, DATA_BYTES), (stride, DATA_BYTES, 1), offset)
    scales_offset = offset + page_size * DATA_BYTES
    scales = raw.as_strided((pages, page_size, SCALE_BYTES), (stride, SCALE_BYTES, 1), scales_offset)
    return data, scales


def quantize_nope(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 448] floats -> (E4M3 bytes [n, 448], UE8M0 exponents [n, 7]), both uint8.

    Per 64-wide tile: a = max|x|, scale = 2^ceil(log2(max(a, 1e-4) / 448)) from the float's bits (exponent + 1 if any
    mantissa bit is set), value = x / scale, rounded to the nearest even E4M3 and saturating.
    """
    tiles = values.float().reshape(-1, NUM_TILES, TILE_DIM)
    amax = tiles.abs().amax(dim=-1).clamp(min=AMAX_FLOOR)
    bits = (amax / torch.full_like(amax, E4M3_MAX)).view(torch.int32)  # a tensor divisor: CUDA multiplies by 1/scalar
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    scale = (exponent << 23).view(torch.float32)
    codes = (tiles / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).reshape(-1, NOPE_DIM), exponent.to(torch.uint8)


def write_rows(kv_pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Store rows [n, 512] (bf16 or float32) in token slots [n]; pad bytes and the tail keep what they held."""
    data, scales = _sections(kv_pages)
    page, entry = slots.long() // kv_pages.shape[1], slots.long() % kv_pages.shape[1]
    codes, exponents = quantize_nope(rows[:, :NOPE_DIM])
    rope = rows[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    data[page, entry] = torch.cat([codes, rope], dim=1)
    scales[:, :, :NUM_TILES][page, entry] = exponents


def read_rows(kv_pages: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows [n, 512] of token slots [n], dequantised; exact in float64 and float32."""
    data, scales = _sections(kv_pages)
    page, entry = slots.long() // kv_pages.shape[1], slots.long() % kv_pages.shape[1]
    raw, exponents = data[page, entry], scales[page, entry][:, :NUM_TILES]
    tiles = raw[:, :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
    scale = (exponents.int() << 23).view(torch.float32).to(dtype)  # the exponent field itself: exact, and 0 for byte 0
    scale = torch.where(exponents == NAN_EXPONENT, torch.full_like(scale, float("nan")), scale)
    nope = tiles.reshape(-1, NUM_TILES, TILE_DIM) * scale[..., None]
    rope = raw[:, NOPE_DIM:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat([nope.reshape(-1, NOPE_DIM), rope], dim=1)


def pack_rows(rows: torch.Tensor, page_size: int, *, fill: int = 0) -> torch.Tensor:
    """A new pool that holds rows [n, 512] in slots 0..n-1."""
    pages = new_pages(-(-rows.shape[0] // page_size), page_size, fill=fill, device=rows.device)
    write_rows(pages, torch.arange(rows.shape[0], device=rows.device), rows)
    return pages
