"""The cases of sparse_decode, their bars, and the peers' times that are quoted and not run."""

from __future__ import annotations

from dataclasses import dataclass

QUOTED_FROM = (
    "H200, November 2026: FlashInfer 0.7.2's SM120 kernel carried over to Hopper, +copy with SGLang's page split"
)


@dataclass(frozen=True)
class Kind:
    """The second cache: what a row reads of it, and how wide the index tensor was captured."""

    page_size: int = 0
    length: int = 0
    width: int = 0


WINDOW = Kind()
C4 = Kind(page_size=64, length=512, width=512)
C128_512K = Kind(page_size=2, length=4096, width=4096)
C128_1K = Kind(page_size=2, length=8, width=64)
C128_1K_OF_1M = Kind(page_size=2, length=8, width=8192)
C128_8K = Kind(page_size=2, length=64, width=64)
C128_8K_OF_1M = Kind(page_size=2, length=64, width=8192)


@dataclass(frozen=True)
class Case:
    """One call shape. `bars`: issue -> microseconds."""

    family: str
    rows: int
    heads: int
    kind: Kind
    bars: tuple[tuple[int, float], ...] = ()
    quoted: tuple[tuple[str, str], ...] = ()  # implementation -> microseconds, as text (ranges)
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}, {self.rows} x {self.heads} heads"


def _table() -> list[Case]:
    """(family, kind, rows, heads -> bar, then heads -> quoted FlashInfer, FlashInfer + copy, Triton, FlashMLA)."""
    cases: list[Case] = []

    def add(family, kind, rows, bars, flashinfer, copied, triton, flashmla, second_issue=None, quick=()):
        for heads, bar in bars.items():
            more = () if second_issue is None or heads not in second_issue else ((2, second_issue[heads]),)
            quoted = {"FlashInfer": flashinfer[heads], "FlashInfer + copy": copied[heads], "Triton": triton[heads]}
            if heads == 64:
                quoted["FlashMLA"] = flashmla
            quoted = tuple(quoted.items())
            cases.append(Case(family, rows, heads, kind, ((3, float(bar)), *more), quoted, quick=heads in quick))

    def every(value, heads=(8, 16, 32, 64)):
        return dict.fromkeys(heads, value)

    add("window", WINDOW, 1, every(6), every("14-16"), every("19-21"), every("59"), "10.5", quick=(64,))
    copied = every("21-23")
    add("C4", C4, 1, every(7), every("15.3-17.1"), copied, every("278-285"), "12.4", every(16.0), quick=(8, 16, 64))
    flashinfer, copied, triton = {64: "25", 16: "18.6"}, {64: "32", 16: "26"}, {64: "530", 16: "299"}
    add("C4", C4, 4, {64: 9, 16: 8}, flashinfer, copied, triton, "14.3")
    flashinfer = {64: "44-71", 32: "34-43", 16: "24", 8: "22"}
    copied, triton = {64: "78", 32: "51", 16: "33", 8: "31"}, {64: "1889", 32: "987", 16: "533", 8: "303"}
    add("C4", C4, 16, {64: 18, 32: 13, 16: 11, 8: 10}, flashinfer, copied, triton, "18.7", quick=(64,))
    flashinfer = {64: "119", 32: "66-116", 16: "45-73", 8: "41-66"}
    copied, triton = {64: "133", 32: "129", 16: "85", 8: "80"}, {64: "7442", 32: "3762", 16: "1920", 8: "1005"}
    add("C4", C4, 64, {64: 42, 32: 27, 16: 21, 8: 19}, flashinfer, copied, triton, "45.5", {64: 120.0}, quick=(64, 8))
    flashinfer, copied = {64: "29-36", 32: "23", 8: "21"}, {64: "43", 32: "31", 8: "29"}
    triton = {64: "1709", 32: "1709", 8: "1709"}
    add("C128 at 512K", C128_512K, 1, {64: 12, 32: 11, 8: 10}, flashinfer, copied, triton, "26.4", quick=(64,))
    flashinfer, copied = {64: "190-420", 16: "60-107"}, {64: "427", 16: "115"}
    add("C128 at 512K", C128_512K, 16, {64: 52, 16: 30}, flashinfer, copied, {64: "13228", 16: "3371"}, "53.4")
    flashinfer, copied = {64: "709", 16: "192-421"}, {64: "723", 16: "430"}
    triton = {64: "53398", 16: "13438"}
    add("C128 at 512K", C128_512K, 64, {64: 150, 16: 75}, flashinfer, copied, triton, "141", quick=(64,))
    return cases


CASES = _table()

# Cost follows the lengths: a short request in tensors of a 1M context against the same in tensors of its own width.
WIDTH_PAIRS = tuple(
    (Case(f"C128 at {name}", rows, heads, own), Case(f"C128 at {name}, captured for 1M", rows, heads, wide))
    for name, own, wide in (("1K", C128_1K, C128_1K_OF_1M), ("8K", C128_8K, C128_8K_OF_1M))
    for rows, heads in ((1, 16), (16, 16), (16, 64), (64, 64))
)
WIDTH_RATIO_BAR = 1.15

# Rows of one request in verification share almost all candidates; they must cost no more than separate requests.
VERIFY_ROWS = (2, 4, 6, 8)
VERIFY_CASES = tuple(Case("C4", rows, heads, C4) for heads in (16, 64) for rows in VERIFY_ROWS) + tuple(
    Case("C128 at 512K", rows, 64, C128_512K) for rows in (4, 8)
)
VERIFY_RATIO_BAR = 1.02  # 1, and what two runs of the same case differ by

# C128's candidates from lengths and page table, against their list.
PAGE_TABLE_CASES = tuple(Case("C128 at 512K", rows, 64, C128_512K) for rows in (1, 16, 64)) + (
    Case("C128 at 8K, captured for 1M", 16, 64, C128_8K_OF_1M),
)
