"""What Triton compiles of our kernels: while a server starts, and afterwards, when requests wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Compiles:
    """Kernels of this package that Triton compiled, or took from its folder of compiled ones.

    heard   called after each, outside of a start with (kernel, seconds), within one with (None, None)
    late    (kernel, seconds) of those that were compiled outside of one
    """

    heard: Callable[[str | None, float | None], None]
    compiled: int = 0
    from_folder: int = 0
    seconds: float = 0.0
    late: list[tuple[str, float]] = field(default_factory=list)
    _is_start: bool = False
    _listens: bool = False

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """What is compiled within belongs to the start. From the first one on all is heard."""
        self._listen()
        self._is_start = True
        try:
            yield
        finally:
            self._is_start = False

    def _listen(self) -> None:
        """Beside whoever listens to Triton already."""
        if self._listens:
            return
        from triton import knobs

        self._listens, before = True, knobs.compilation.listener

        def listen(**told) -> None:
            if before is not None:
                before(**told)
            module = getattr(getattr(told["src"], "fn", None), "__module__", None) or ""
            if module.startswith(f"{__package__}."):
                self._add(told["metadata"]["name"], told["times"].total / 1e6, told["cache_hit"])

        knobs.compilation.listener = listen

    def _add(self, kernel: str, seconds: float, from_folder: bool) -> None:
        late = not self._is_start and not from_folder
        self.compiled, self.from_folder = self.compiled + (not from_folder), self.from_folder + from_folder
        self.seconds += seconds
        self.late += [(kernel, seconds)] if late else []
        self.heard(*((kernel, seconds) if late else (None, None)))

    def describe(self) -> str:
        text = f"{self.compiled} kernels compiled by Triton, {self.from_folder} from its folder, {self.seconds:.1f} s"
        names = ", ".join(dict.fromkeys(kernel for kernel, _ in self.late))
        return text + (f"; {len(self.late)} WHILE SERVING: {names}" if self.late else "; none while serving")

    def as_dict(self) -> dict:
        return {name: getattr(self, name) for name in ("compiled", "from_folder", "seconds", "late")}
