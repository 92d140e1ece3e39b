"""Words by which the blocks of a call find each other: zero before a call and, by the kernel's own doing, after it."""

from __future__ import annotations

import torch

_WORD_BYTES = 4
_STEP_WORDS = 32  # 128 bytes: no two calls in one cache line


class ZeroedWords:
    """An operator's words on one device.

    Calls that may run at the same time must not share words. Eager calls of one stream run in order and share a buffer
    made on that stream. A captured call can be replayed on any stream, so each takes the next words of a ring; two
    captured calls share words only when the ring went round between them. A first call that is already being captured
    zeroes words of its own, with one more node in that graph.

    stream_words   the most that an eager call takes
    ring_bytes     of the captured calls' ring
    """

    def __init__(self, index: int, stream_words: int, ring_bytes: int):
        self._device, self._index = f"cuda:{index}", index
        self._stream_words, self._ring_words = stream_words, ring_bytes // _WORD_BYTES
        self._by_stream = {}
        self._ring = None
        self._next = 0

    def take(self, stream: int, words: int) -> torch.Tensor:
        """At least `words` zeroed int32; hold the tensor until the launch is queued."""
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._take_captured(words)
        buffer = self._by_stream.get(stream)
        return self._add_stream(stream) if buffer is None else buffer

    def _take_captured(self, words: int) -> torch.Tensor:
        if self._ring is None:
            return torch.zeros(words, dtype=torch.int32, device=self._device)
        start = self._next if self._next + words <= self._ring_words else 0
        self._next = start + -(-words // _STEP_WORDS) * _STEP_WORDS
        return self._ring[start : start + words]

    def _add_stream(self, stream: int) -> torch.Tensor:
        if self._ring is None:
            self._ring = torch.zeros(self._ring_words, dtype=torch.int32, device=self._device)
            torch.cuda.current_stream(self._index).synchronize()  # once per device: later graphs run on any stream
        self._by_stream[stream] = torch.zeros(self._stream_words, dtype=torch.int32, device=self._device)
        return self._by_stream[stream]
