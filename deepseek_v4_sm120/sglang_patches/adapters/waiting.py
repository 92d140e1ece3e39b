"""Calls of SGLang's that are put off to a kernel of ours which does their work on its way.

A `Waiting` is such a call: what it is of, and `run`, SGLang's own way of doing it. There are two kinds.

    its result was asked for   it stands for that result and is handed on, until an operator of ours takes it. It is no
                               tensor: nothing else can read it by mistake, and nothing has to be checked
    it writes to a tensor      SGLang holds the tensor and goes on. The call is `put_off` in a `Scope`, the forward of
                               SGLang's around both, and whoever reads the tensor for us has to `take` it. What is left
                               when the forward ends raises, with the way out

A scope is a thread's. SGLang's side streams run parts of one forward in one thread, and who takes a call has waited for
the stream of its tensor, as for SGLang's own. A forward inside of another (a draft's) begins with nothing waiting, and
the outer one's is back behind it, after an error too. All is decided on the host by shapes and kinds, so a captured
graph holds what was decided. Several calls may wait at once, as with batches that take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


def way_out(operator: str, what: str) -> str:
    """The text of an error about what SGLang does with `operator`'s."""
    return f"{operator}: {what}: start with DSV4_SM120_SET={operator}=off"


class Waiting:
    """A call that was put off. operator: whose it is; untaken, mistaken: what is wrong where the forward ends before
    it was taken, and where another is looked for while it waits (empty: nothing)."""

    operator = untaken = mistaken = ""

    def is_of(self, *what) -> bool:
        """Whether it is the one that the taker means."""
        raise NotImplementedError

    def run(self):
        """What SGLang would have done."""
        raise NotImplementedError


class Scope(threading.local):
    """A forward of SGLang's in which calls may wait. layer: whose it is, None outside and where nothing may wait;
    known: what else `enter` was told."""

    def __init__(self):
        self.layer, self.known = None, {}
        self._waiting: list[Waiting] = []

    @contextmanager
    def enter(self, layer, **known) -> Iterator[None]:
        """For the duration of a forward. Raises RuntimeError where a call still waits at its end."""
        outer = self.layer, self.known, self._waiting
        self.layer, self.known, self._waiting = layer, known, []
        try:
            yield
            for waiting in self._waiting:
                raise RuntimeError(way_out(waiting.operator, waiting.untaken))
        finally:
            self.layer, self.known, self._waiting = outer

    def waiting(self, kind: type[Waiting]) -> list[Waiting]:
        return [waiting for waiting in self._waiting if isinstance(waiting, kind)]

    def put_off(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def take(self, kind: type[Waiting], *what) -> Waiting | None:
        """The call of this kind that is of `what`, for the taker to do; None where there is none.

        Raises RuntimeError where only others of the kind wait, and the kind says that this is wrong.
        """
        waiting = self.waiting(kind)
        found = next((w for w in waiting if w.is_of(*what)), None)
        if found is not None:
            self._waiting.remove(found)
        elif kind.mistaken and waiting:
            raise RuntimeError(way_out(kind.operator, kind.mistaken))
        return found
