"""Who shares exchange words with whom: captures, streams, eager calls. CPU tensors; torch's capture state is faked."""

from __future__ import annotations

import types

import pytest
import torch

from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.ops.shared.zeroed_words import ZeroedWords

STREAM, SIDE = 77, 78
ISSUE_CALLS, ISSUE_WORDS = 86, 12 * 128 * 32  # a step's boundaries of 12 rows: went once round a ring of 16 MiB


class Words(ZeroedWords):
    """The real class on the CPU, asked as if in a capture."""

    def __init__(self, monkeypatch, store_bytes: int = 16 << 20):
        super().__init__("cpu", stream_words=1024, store_bytes=store_bytes)
        self.capture = None  # None: eager
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.capture is not None, raising=False)
        monkeypatch.setattr(extension, "load", lambda: types.SimpleNamespace(capture_id=lambda stream: self.capture))
        idle = types.SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)

    def of(self, capture, words: int = 100, stream: int = STREAM) -> torch.Tensor:
        self.capture = capture
        return self.take(stream, words)


@pytest.fixture
def words(monkeypatch) -> Words:
    made = Words(monkeypatch)
    made.of(None)
    return made


def span(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + 4 * max(tensor.numel(), 1))


def apart(*tensors: torch.Tensor) -> bool:
    spans = sorted((span(t).start, span(t).stop) for t in tensors)
    return all(one[1] <= two[0] for one, two in zip(spans, spans[1:], strict=False))


def test_two_graphs_never_share_words_however_many_calls_they_have(words):
    """The issue's case: with a ring, a step's last calls had the words of its first, and of any other graph's."""
    graphs = [[words.of(graph, ISSUE_WORDS) for _ in range(ISSUE_CALLS)] for graph in (1, 2, 3)]
    for calls in graphs:
        assert len({call.data_ptr() for call in calls}) == 1
    assert apart(*(calls[0] for calls in graphs))


def test_branches_of_a_graph_have_words_of_their_own(words):
    one, other = words.of(1), words.of(1, stream=SIDE)
    assert apart(one, other)
    assert words.of(1).data_ptr() == one.data_ptr() and words.of(1, stream=SIDE).data_ptr() == other.data_ptr()


def test_a_larger_call_of_a_graph_gets_enough(words):
    small, large = words.of(1, 10), words.of(1, 5000)
    assert small.numel() >= 10 and large.numel() >= 5000 and apart(small, large)
    assert words.of(1, 10).data_ptr() == large.data_ptr()


def test_eager_calls_and_captures_are_apart(words):
    eager, other = words.of(None), words.of(None, stream=SIDE)
    assert apart(eager, other, words.of(1), words.of(2))
    assert words.of(None).data_ptr() == eager.data_ptr()


def test_words_start_on_cache_lines_of_their_own(words):
    taken = [words.of(graph, 33) for graph in range(1, 5)]
    assert len({call.data_ptr() // 128 for call in taken}) == 4 and all(b.data_ptr() % 64 == 0 for b in taken)
    lines = [set(range(span(call).start // 128, (span(call).stop - 1) // 128 + 1)) for call in taken]
    start = words._store.data_ptr() % 128  # the CPU's allocator starts elsewhere than CUDA's
    assert start or not set.intersection(*lines)


def test_when_the_store_is_used_up_a_graph_zeroes_words_of_its_own(monkeypatch):
    words = Words(monkeypatch, store_bytes=4096)
    words.of(None)
    held = [words.of(graph, 500) for graph in range(1, 5)]
    inside = [span(words._store).start <= call.data_ptr() < span(words._store).stop for call in held]
    assert inside == [True, True, False, False] and apart(*held)
    assert not any(bool(call.any()) for call in held)
    assert words.of(9, 1).numel() == 1, "what the store cannot hold takes nothing of it"


def test_only_the_latest_captures_own_words_are_kept(monkeypatch):
    """They are of their graph's memory: kept for ever, each graph captured again would leave some behind."""
    words = Words(monkeypatch)
    for graph in range(1, 50):
        words.of(graph), words.of(graph, stream=SIDE)
    assert {capture for capture, _ in words._captured} == {49} and len(words._captured) == 2
    assert words._store is None


def test_captures_side_by_side_keep_apart(words):
    """Two threads that capture at a time: whoever comes back gets the same words or new ones, never the other's."""
    first, second = words.of(1, stream=STREAM), words.of(2, stream=SIDE)
    again, other = words.of(1, stream=STREAM), words.of(2, stream=SIDE)
    assert apart(first, second) and apart(again, second) and apart(again, other) and apart(first, other)
