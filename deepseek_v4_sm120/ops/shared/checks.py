"""What operators ask of their arguments, before they allocate or launch anything. A `Call` for each call.

An error says operator, argument, what it must be, and what came; what is wrong decides its type, for every operator:

    mhc: fn.shape must be [24, 16384], got [4, 16384]                             ValueError, by RAISES["shape"]
"""

from __future__ import annotations

from typing import NoReturn

import torch

RAISES = {
    "dtype": TypeError,
    "shape": ValueError,
    "stride": ValueError,
    "alignment": ValueError,
    "overlap": ValueError,
    "value": ValueError,
    "device": RuntimeError,
    "launch": RuntimeError,  # by the extension
}

BF16, FP32, E4M3, COMPLEX = (torch.bfloat16,), (torch.float32,), (torch.float8_e4m3fn,), (torch.complex64,)
INT32, INT64, UINT8 = (torch.int32,), (torch.int64,), (torch.uint8,)
POSITIONS = (torch.int32, torch.int64)
CONTIGUOUS, ANY = 0, None  # strides; else a number: the last is 1, the others are multiples of it
VECTOR = 16  # bytes of a load: what addresses are multiples of
ROTATED = 64  # values of a head that the rotation turns, its last; csrc/fp8_linear/config.h has it too, a test compares


class Call:
    """A call of `op`, whose tensors must all be on the device of its argument `first`, `tensor`."""

    __slots__ = ("op", "first", "device")

    def __init__(self, op: str, first: str, tensor):
        self.op, self.first = op, first
        self.given(first, tensor)
        self.device = tensor.device

    def refuse(self, kind: str, argument: str, expected: str, got) -> NoReturn:
        raise RAISES[kind](f"{self.op}: {argument} must {expected}, got {got}")

    def given(self, name: str, tensor) -> None:
        """For what is looked at before `tensor` is asked."""
        if not isinstance(tensor, torch.Tensor):
            self.refuse("dtype", name, "be a tensor", "None" if tensor is None else type(tensor).__name__)

    def tensor(self, name: str, tensor, dtypes, shape, stride=CONTIGUOUS, align=0) -> torch.Size:
        """Its shape, if nothing is wrong; else `wrong` has the word.

        shape   sizes, and names of those that are free; or "rows, inputs", where all are
        stride  CONTIGUOUS, ANY or a number; strides of dims of size 1, and of empty tensors, are not looked at
        align   bytes that its address must be a multiple of; 0: any
        """
        if getattr(tensor, "dtype", None) not in dtypes:
            kind = "dtype"
        elif (found := tensor.shape) != shape and not _has_shape(found, shape):
            kind = "shape"
        elif (
            stride is not ANY
            and (not tensor.is_contiguous() or stride and found[-1] % stride)
            and not _has_strides(found, tensor.stride(), stride)
        ):
            kind = "stride"
        elif align and tensor.data_ptr() % align:
            kind = "alignment"
        elif tensor.device != self.device:
            kind = "device"
        else:
            return found
        return self.wrong(kind, name, tensor, dtypes, shape, stride, align)

    def wrong(self, kind: str, name: str, tensor, dtypes, shape, stride, align) -> NoReturn:
        if kind == "dtype":
            self.given(name, tensor)
            self.refuse(kind, f"{name}.dtype", f"be {' or '.join(map(str, dtypes))}", tensor.dtype)
        if kind == "shape":
            expected = shape if isinstance(shape, str) else ", ".join(map(str, shape))
            self.refuse(kind, f"{name}.shape", f"be [{expected}]", list(tensor.shape))
        if kind == "stride":
            multiples = ["any" if stride == 1 else f"a multiple of {stride}"] * (tensor.dim() - 1)
            expected = f"have strides [{', '.join([*multiples, '1'])}]" if stride else "be contiguous"
            self.refuse(kind, name, expected, f"strides {list(tensor.stride())}")
        if kind == "alignment":
            past, article = tensor.data_ptr() % align, "an" if align == 8 else "a"
            self.refuse(kind, name, f"start on {article} {align}-byte boundary", f"an address {past} bytes past one")
        self.refuse(kind, f"{name}.device", f"be {self.first}'s, {self.device}", tensor.device)

    def pages(self, name: str, pages, dtypes, page_size, entry_bytes: int) -> None:
        """A paged cache [pages, page_size, 1, bytes of an entry]; page_size None: any.

        The first stride leads from page to page, the others do not describe the memory.
        """
        self.given(name, pages)
        shape = pages.shape
        if pages.dtype not in dtypes or len(shape) != 4 or pages.data_ptr() % VECTOR or pages.device != self.device:
            self.tensor(name, pages, dtypes, "pages, page_size, 1, bytes", ANY, VECTOR)  # in words
        count, size, one, width = shape
        if width != entry_bytes or one != 1 or count < 1 or (size < 1 if page_size is None else size != page_size):
            expected = f"be [pages, {page_size or 'page_size'}, 1, {entry_bytes}], none 0"
            self.refuse("shape", f"{name}.shape", expected, list(pages.shape))
        stride = pages.stride(0)
        if count > 1 and (stride < size * entry_bytes or stride % VECTOR):
            expected = f"be a multiple of {VECTOR} and at least {size * entry_bytes} (page bytes)"
            self.refuse("stride", f"{name}.stride(0)", expected, stride)

    def written(self, read_name: str, read, *named) -> None:
        """(name, tensor) pairs that the call writes: no element twice, no byte of another, nor of what is `read`.

        Strides and addresses tell: a stride must be beyond what the smaller ones span, and the ranges from the first
        byte to the last must be apart. Tensors that interleave share nothing and are refused as well.
        """
        first = read.data_ptr()
        ranges = [(read_name, first, first + _reach(read)[0])]
        for name, tensor in named:
            if tensor is None:
                continue
            reach, repeats = _reach(tensor)
            if repeats:
                got = f"strides {list(tensor.stride())}"
                self.refuse("overlap", name, "not overlap itself, each stride beyond the smaller ones' span", got)
            first = tensor.data_ptr()
            end = first + reach
            for other, other_first, other_end in ranges:
                if first < other_end and other_first < end:
                    got = f"[{first:#x}, {end:#x}) and [{other_first:#x}, {other_end:#x})"
                    self.refuse("overlap", name, f"not overlap {other}, address ranges apart", got)
            ranges.append((name, first, end))

    def together(self, names: str, *values) -> bool:
        """Whether all are given; some without the others are refused."""
        absent = 0
        for value in values:
            if value is None:
                absent += 1
        if 0 < absent < len(values):
            got = ", ".join("None" if value is None else "a value" for value in values)
            self.refuse("value", names, "be given together", got)
        return not absent

    def multiple(self, name: str, size: int, multiple: int) -> None:
        if size % multiple or size < 1:
            self.refuse("shape", name, f"be a positive multiple of {multiple}", size)

    def one_of(self, name: str, value, allowed) -> None:
        if value not in allowed:
            self.refuse("value", name, f"be one of {', '.join(map(str, allowed))}", repr(value))

    def on_cuda(self) -> None:
        """The last check: the others hold on the CPU, too."""
        if self.device.type != "cuda":
            self.refuse("device", f"{self.first}.device", "be a CUDA device", self.device)


class Question(Call):
    """For a predicate: where something is wrong, `tensor` returns None instead of an error."""

    def wrong(self, *_) -> None:
        return None


def _has_shape(found, expected) -> bool:
    """expected: sizes, and names of those that are free; or "rows, inputs", where all are."""
    if expected.__class__ is str:
        return len(found) == expected.count(",") + 1
    for size, wanted in zip(found, expected):  # noqa: B905, lengths are compared last
        if size != wanted and wanted.__class__ is not str:
            return False
    return len(found) == len(expected)


def _has_strides(sizes, strides, multiple: int) -> bool:
    if not multiple:
        return False
    if multiple > 1:
        for size, stride in zip(sizes, strides[:-1]):  # noqa: B905, the last must be 1
            if stride % multiple and size > 1:
                return False
    return strides[-1] == 1 or sizes[-1] <= 1


def _reach(tensor) -> tuple[int, bool]:
    """Bytes from its first to its last, and whether by its strides elements may be the same."""
    if tensor.is_contiguous():
        return tensor.nbytes, False
    span, repeats = 0, False
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):  # noqa: B905, torch has as many of both
        if size > 1:
            repeats |= stride <= span
            span += stride * (size - 1)
    return (span + 1) * tensor.element_size(), repeats
