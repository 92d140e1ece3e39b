"""Checks of index_select's arguments: every message says argument, expected, got."""

from __future__ import annotations

import torch

from deepseek_v4_sm120 import extension

FP8_ENTRY_BYTES = 132
FP4_ENTRY_BYTES = 68
MAX_WIDTH = 1 << 24
_ALIGN_BYTES = 16
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def check_queries(op: str, q, k_pages, weights, q_scales) -> tuple[int, bool]:
    """(rows, whether this is FP4) of queries, keys and weights that fit each other."""
    binary = extension.load()
    heads, dim = binary.INDEX_HEADS, binary.INDEX_DIM
    fp4 = q_scales is not None
    q_dim = dim // 2 if fp4 else dim
    expected = (torch.int8, torch.uint8) if fp4 else (torch.float8_e4m3fn,)
    if q.dtype not in expected:
        how = "with" if fp4 else "without"
        raise TypeError(f"{op}: q.dtype must be {' or '.join(map(str, expected))} {how} q_scales, got {q.dtype}")
    if q.ndim != 4 or tuple(q.shape[1:]) != (1, heads, q_dim):
        raise ValueError(f"{op}: q.shape must be [rows, 1, {heads}, {q_dim}], got {list(q.shape)}")
    rows = q.shape[0]
    if q.stride(3) != 1 or q.stride(2) % _ALIGN_BYTES or (rows > 1 and q.stride(0) % _ALIGN_BYTES):
        got = (q.stride(0), q.stride(2), q.stride(3))
        raise ValueError(f"{op}: q.stride(3) must be 1, stride(0) and stride(2) multiples of 16, got {got}")
    _check_alignment(op, "q", q)
    _check_pages(op, k_pages, FP4_ENTRY_BYTES if fp4 else FP8_ENTRY_BYTES, binary.INDEX_PAGE, q.device)
    _check_matrix(op, "weights", weights, torch.float32, rows, heads, q.device)
    if fp4:
        if q_scales.dtype != torch.int32:
            raise TypeError(f"{op}: q_scales.dtype must be torch.int32, got {q_scales.dtype}")
        if tuple(q_scales.shape) != (rows, 1, heads) or q_scales.stride(2) != 1:
            got = f"{list(q_scales.shape)} with strides {q_scales.stride()}"
            raise ValueError(f"{op}: q_scales must be [{rows}, 1, {heads}], last dim contiguous, got {got}")
        _check_device(op, "q_scales", q_scales, q.device)
    return rows, fp4


def _check_pages(op, k_pages, entry_bytes, page, device) -> None:
    if k_pages.dtype not in _BYTE_DTYPES:
        raise TypeError(f"{op}: k_pages.dtype must be one byte wide, {_BYTE_DTYPES}, got {k_pages.dtype}")
    shape = k_pages.shape
    if k_pages.ndim != 4 or shape[0] < 1 or tuple(shape[1:]) != (page, 1, entry_bytes):
        raise ValueError(f"{op}: k_pages.shape must be [pages, {page}, 1, {entry_bytes}], got {list(shape)}")
    if shape[0] > 1 and (k_pages.stride(0) < page * entry_bytes or k_pages.stride(0) % _ALIGN_BYTES):
        raise ValueError(
            f"{op}: k_pages.stride(0) must be a multiple of {_ALIGN_BYTES} and at least {page * entry_bytes} "
            f"(page bytes), got {k_pages.stride(0)}"
        )
    _check_alignment(op, "k_pages", k_pages)
    _check_device(op, "k_pages", k_pages, device)


def check_table(op: str, page_table, rows: int, device) -> int:
    """The greatest number of entries of a row."""
    if page_table.dtype != torch.int32:
        raise TypeError(f"{op}: page_table.dtype must be torch.int32, got {page_table.dtype}")
    if page_table.ndim != 2 or page_table.shape[0] != rows or page_table.shape[1] < 1:
        raise ValueError(f"{op}: page_table.shape must be [{rows}, at least 1], got {list(page_table.shape)}")
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise ValueError(f"{op}: page_table.stride(1) must be 1, got {page_table.stride(1)}")
    _check_device(op, "page_table", page_table, device)
    return page_table.shape[1] * extension.load().INDEX_PAGE


def check_int32_rows(op: str, name: str, tensor, rows: int, device) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{op}: {name}.dtype must be torch.int32, got {tensor.dtype}")
    if tuple(tensor.shape) != (rows,) or (rows > 1 and tensor.stride(0) != 1):
        got = f"{list(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{op}: {name} must be [{rows}], contiguous, got {got}")
    _check_device(op, name, tensor, device)


def check_k(op: str, k: int) -> None:
    most = extension.load().INDEX_MAX_K
    if not isinstance(k, int) or not 1 <= k <= most:
        raise ValueError(f"{op}: k must be an int in 1..{most}, got {k!r}")


def check_logits(op: str, scores) -> tuple[int, int]:
    if scores.dtype != torch.float32:
        raise TypeError(f"{op}: scores.dtype must be torch.float32, got {scores.dtype}")
    if scores.ndim != 2 or not 1 <= scores.shape[1] <= MAX_WIDTH:
        raise ValueError(f"{op}: scores.shape must be [rows, 1..{MAX_WIDTH}], got {list(scores.shape)}")
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise ValueError(f"{op}: scores.stride(1) must be 1, got {scores.stride(1)}")
    return scores.shape[0], scores.shape[1]


def check_out(op: str, name: str, tensor, dtype, rows: int, columns: int, device) -> None:
    if tensor is not None:
        _check_matrix(op, name, tensor, dtype, rows, columns, device)
        if rows > 1 and tensor.stride(0) < columns:
            raise ValueError(f"{op}: {name} must not overlap itself, got stride(0) {tensor.stride(0)}")


def _check_matrix(op, name, tensor, dtype, rows, columns, device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name}.dtype must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != (rows, columns):
        raise ValueError(f"{op}: {name}.shape must be [{rows}, {columns}], got {list(tensor.shape)}")
    if columns > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{op}: {name}.stride(1) must be 1, got {tensor.stride(1)}")
    _check_device(op, name, tensor, device)


def _check_alignment(op, name, tensor) -> None:
    if tensor.data_ptr() % _ALIGN_BYTES:
        got = f"an address {tensor.data_ptr() % _ALIGN_BYTES} bytes past one"
        raise ValueError(f"{op}: {name} must start on a {_ALIGN_BYTES}-byte boundary, got {got}")


def _check_device(op, name, tensor, device) -> None:
    if tensor.device != device:
        raise RuntimeError(f"{op}: {name}.device must be {device}, got {tensor.device}")
