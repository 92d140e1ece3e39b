"""Words by which the blocks of a call find each other: zero before a call and, by the kernel's own doing, after it."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.ops.shared import extension

_WORD_BYTES = 4
_STEP_WORDS = 32  # 128 bytes: nothing of two owners in one cache line


class ZeroedWords:
    """An operator's words on one device.

    Calls that may run at the same time must not share words. Calls on one stream run in order: eager ones share a
    buffer of their stream, captured ones one of their capture and stream. So no two graphs share words, however many
    calls they have, nor two branches of a graph; only instances of one and the same capture do, which share all else
    as well.

    A capture's words come from a store that is made with the first eager call and given out once: there is no telling
    when a graph is destroyed. Once it is used up, and before it is made, words are allocated like a graph's other
    tensors, in its own memory, and zeroed by one more node of that graph.

    device         "cuda:0"
    stream_words   the most that an eager call takes
    store_bytes    of the captures' store
    """

    def __init__(self, device: str, stream_words: int, store_bytes: int):
        self._device = device
        self._stream_words, self._store_words = stream_words, store_bytes // _WORD_BYTES
        self._by_stream = {}
        self._store = None
        self._given = 0  # words of the store
        self._captured = {}  # (capture, stream) -> words, of the latest capture: an older one does not ask again

    def take(self, stream: int, words: int) -> torch.Tensor:
        """At least `words` zeroed int32; hold the tensor until the launch is queued."""
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._take_captured(stream, words)
        buffer = self._by_stream.get(stream)
        return self._add_stream(stream) if buffer is None else buffer

    def _take_captured(self, stream: int, words: int) -> torch.Tensor:
        key = (extension.load().capture_id(stream), stream)
        taken = self._captured.get(key)
        if taken is None or taken.numel() < words:
            taken = self._new(words)
            latest = {known: held for known, held in self._captured.items() if known[0] == key[0]}
            self._captured = {**latest, key: taken}
        return taken

    def _new(self, words: int) -> torch.Tensor:
        start, self._given = self._given, self._given + -(-words // _STEP_WORDS) * _STEP_WORDS
        if self._store is not None and self._given <= self._store_words:
            return self._store[start : start + words]
        self._given = start
        return torch.zeros(words, dtype=torch.int32, device=self._device)

    def _add_stream(self, stream: int) -> torch.Tensor:
        if self._store is None:
            self._store = torch.zeros(self._store_words, dtype=torch.int32, device=self._device)
            torch.cuda.current_stream(self._device).synchronize()  # once per device: later graphs run on any stream
        self._by_stream[stream] = torch.zeros(self._stream_words, dtype=torch.int32, device=self._device)
        return self._by_stream[stream]
