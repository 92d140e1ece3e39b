"""The matrix: what is measured, as plain data. A cell is run on both sides with the same prompts."""

from __future__ import annotations

from dataclasses import dataclass

DEPTHS = (8192, 32768, 65536, 131072, 262144, 524288)
PREFILL_LENGTHS = (1024, 8192, 32768, 65536, 131072)
CONCURRENCIES = (1, 4, 8, 16, 32)
DEPTH_SUFFIX = 96  # tokens after the shared prefix, different in every request
KINDS = {
    "single": "one stream, short prompt",
    "concurrent": "several streams, short prompts",
    "depth": "decode after a long prefix, which is filled once and reused",
    "prefill": "time to the first token of a unique prompt",
    "intrusion": "a long prompt arrives while others decode",
}


@dataclass(frozen=True)
class Cell:
    """One measurement.

    prompt_tokens  length of each prompt; for `depth` the shared prefix, for `intrusion` the streams' prompts
    output_tokens  asked of each request
    streams        requests in flight at once
    requests       requests in all
    long_tokens    intrusion: length of the prompt that arrives late
    delay_s        intrusion: when it arrives, after every stream has its first token
    """

    name: str
    kind: str
    prompt_tokens: int
    output_tokens: int
    streams: int = 1
    requests: int = 1
    long_tokens: int = 0
    delay_s: float = 0.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"cell {self.name}: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if min(self.prompt_tokens, self.output_tokens, self.streams, self.requests) < 1:
            raise ValueError(f"cell {self.name}: lengths and counts must be at least 1, got {self}")
        if self.kind == "intrusion" and not (self.long_tokens > 0 and self.delay_s > 0):
            raise ValueError(f"cell {self.name}: an intrusion needs long_tokens and delay_s, got {self}")

    @property
    def context_tokens(self) -> int:
        """The longest context that the cell reaches."""
        longest = max(self.prompt_tokens + (DEPTH_SUFFIX if self.kind == "depth" else 0), self.long_tokens)
        return longest + self.output_tokens


def single(prompt: int = 512, output: int = 256, requests: int = 3) -> list[Cell]:
    return [Cell("single", "single", prompt, output, requests=requests)]


def concurrent(streams: tuple[int, ...] = CONCURRENCIES, prompt: int = 512, output: int = 256) -> list[Cell]:
    """Two requests a stream, so that the ends of some overlap the starts of others, as in use."""
    return [Cell(f"concurrency {n}", "concurrent", prompt, output, streams=n, requests=2 * n) for n in streams]


def depth(depths: tuple[int, ...] = DEPTHS, output: int = 128, requests: int = 3) -> list[Cell]:
    return [Cell(f"depth {label(n)}", "depth", n, output, requests=requests) for n in depths]


def prefill(lengths: tuple[int, ...] = PREFILL_LENGTHS, requests: int = 3) -> list[Cell]:
    return [Cell(f"prefill {label(n)}", "prefill", n, 1, requests=requests) for n in lengths]


def intrusion(
    streams: int = 8, long_tokens: int = 65536, output: int = 4096, delay_s: float = 2.0, prompt: int = 512
) -> list[Cell]:
    name = f"intrusion {label(long_tokens)} into {streams}"
    return [Cell(name, "intrusion", prompt, output, streams, streams + 1, long_tokens, delay_s)]


def label(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def full() -> list[Cell]:
    """Everything that docs/measured.md shows; hours on a slow server."""
    return single() + concurrent() + depth() + prefill() + intrusion()


def quick() -> list[Cell]:
    """The same questions with fewer points: minutes."""
    return [
        *single(output=128, requests=2),
        *concurrent((1, 8, 32), output=128),
        *depth((8192, 32768, 131072), output=64, requests=2),
        *prefill((1024, 8192, 32768), requests=2),
        *intrusion(long_tokens=16384, output=1024, delay_s=0.5),
    ]


def smoke() -> list[Cell]:
    """One small cell of each kind: seconds, to see that everything is connected. Its figures are no measurement."""
    return [
        *single(64, 16, 2),
        *concurrent((2, 4), 64, 16),
        *depth((512,), 16, 2),
        *prefill((256,), 2),
        *intrusion(2, 512, 96, 0.3, 32),
    ]


MATRICES = {"full": full, "quick": quick, "smoke": smoke}


def select(matrix: str, only: str | None, context_tokens: int | None) -> tuple[list[Cell], list[str]]:
    """The cells of a matrix whose name contains one of `only`'s comma-separated words, and why others are left out."""
    found, left_out = [], []
    words = [word.strip() for word in (only or "").split(",") if word.strip()]
    for cell in MATRICES[matrix]():
        if words and not any(word in cell.name for word in words):
            continue
        if context_tokens and cell.context_tokens > context_tokens:
            left_out.append(
                f"{cell.name}: needs {cell.context_tokens} tokens of context, the servers have {context_tokens}"
            )
            continue
        found.append(cell)
    names = [cell.name for cell in MATRICES[matrix]()]
    if unknown := [word for word in words if not any(word in name for name in names)]:
        raise ValueError(f"--only: no cell of the matrix {matrix!r} has {unknown} in its name: {', '.join(names)}")
    if not found:
        raise ValueError(f"no cell of the matrix {matrix!r} is left (only={only!r}, context {context_tokens} tokens)")
    return found, left_out
