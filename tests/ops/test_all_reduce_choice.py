"""Which way the probe takes by the times of both, and how it takes these, without a card."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce_probe as probe
from deepseek_v4_sm120.ops import all_reduce_probe_child as child


@pytest.mark.parametrize(
    "peer, host, taken",
    [
        ((2.8, 5.0, 8.4), (8.6, 8.6, 34.7), "peer"),
        ((5.92, 8.73, 8.15), (4.63, 8.5, 40.13), "peer"),  # as seen: both disturbed by engines that started
        ((9.4, 14.0, 61.0), (6.3, 9.8, 40.0), "host"),
        ((6.0, 12.0, 70.0), (8.0, 13.0, 40.0), "host"),
        ((6.0, 12.0, 50.0), (8.0, 13.0, 40.0), "peer"),
        ((106.0, 113.0, 169.0), (10.0, 17.0, 73.0), "host"),
    ],
)
def test_the_way_that_is_faster_over_all_sizes(peer, host, taken):
    us = {"peer": dict(zip(probe.ROWS, peer, strict=True)), "host": dict(zip(probe.ROWS, host, strict=True))}
    assert probe.fastest(us) == taken and probe.fastest(dict(reversed(us.items()))) == taken
    assert probe.fastest({"host": us["host"]}) == "host" and probe.fastest({}) is None


class Card:
    """A clock in microseconds: a replay takes `us` a call, on an idle card five times as long, and the first of a turn
    until the other ranks have come, too."""

    def __init__(self, us, idle, wait):
        self.now, self.us, self.idle, self.wait, self.late, self.turns = 0.0, us, idle, wait, 0.0, 0

    def gather(self, _):
        self.late, self.turns = self.wait, self.turns + 1

    def replay(self):
        slow = 5 if self.idle > 0 else 1
        self.idle -= 1
        self.now += self.late + slow * self.us * child.CHAIN
        self.late = 0.0

    def cuda(self):
        card = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = card.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

            def synchronize(self):
                pass

        graph = SimpleNamespace(replay=self.replay)
        return SimpleNamespace(
            synchronize=lambda: None, CUDAGraph=lambda: graph, graph=contextlib.nullcontext, Event=Event
        )


@pytest.mark.parametrize("pick", [min, sorted])
def test_neither_waits_for_others_nor_idle_clocks_are_in_a_time(monkeypatch, pick):
    card = Card(4.5, idle=child.UNTIMED, wait=30_000.0)
    monkeypatch.setattr(child, "torch", SimpleNamespace(cuda=card.cuda()))
    calls = itertools.count()

    def call(x):
        next(calls)
        return x + 1

    found = child.microseconds(call, torch.zeros(1), card.gather, pick=pick)
    times = found if pick is sorted else [found]
    assert times == pytest.approx([4.5] * (1 if pick is min else child.TURNS * (child.REPLAYS - 1)))
    assert next(calls) == 1 + child.CHAIN and card.turns == 1 + child.TURNS
