"""Whether a server's passes gain by halves, by its first ones: in which order they go which way, what is timed, and
what all ranks make of it."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.sglang_patches.adapters import halves_trial as trial
from deepseek_v4_sm120.sglang_patches.adapters import prompts_in_halves as adapter
from tests.adapters.dealt_streams_model import _this
from tests.adapters.test_prompts_in_halves import PAGE, POOL, ROWS, Backend, One, batch_of, in_halves, why

ASKED = adapter.least_rows


@pytest.fixture(autouse=True)
def state(monkeypatch):
    return in_halves(monkeypatch, ROWS, PAGE)


class Clock:
    """Events of a device on which each half-pass and each pass take as long as they are said to."""

    def __init__(self, took):
        self.took, self.now, self.synchronized, self.known = took, 0.0, 0, 0.0

    def event(self):
        clock, at = self, self.now

        class Event:
            def __init__(self):
                self.at = at

            def synchronize(self):
                clock.synchronized += 1
                clock.known = max(clock.known, self.at)

            def elapsed_time(self, end):
                assert end.at <= clock.known, "nobody has waited for it"
                return end.at - self.at

        return Event()


class Tried(One):
    """A rank whose CPUs hear of another that took `other` ms for a row, whole and in halves."""

    cpu_group = "cpus"


def tried_passes(monkeypatch, took, other, count):
    """The ways of so many passes of 100 rows. took: ms of this rank's, whole and in halves."""
    clock, ways, exchanged = Clock(took), [], []

    def agree(each, op, group):
        assert group == "cpus" and op == torch.distributed.ReduceOp.MAX
        exchanged.append(each.tolist())
        each.copy_(torch.maximum(each, torch.tensor(other, dtype=each.dtype)))

    monkeypatch.setattr(torch.distributed, "all_reduce", agree)
    monkeypatch.setattr(adapter, "least_rows", lambda: 0)
    monkeypatch.setattr(adapter, "_trials", trial.Trials())
    monkeypatch.setattr(trial, "event", clock.event)
    _this.coordinator = Tried()
    backend = Backend(POOL)

    class Passed:
        def forward(self, input_ids, positions, batch, input_embeds, pp_proxy_tensors=None):
            clock.now += took[0] if len(input_ids) == 100 else took[1] / 2
            clock.now += 1000 * (len(ways) < len(trial.ORDER) * trial.WARM)  # what is compiled at first
            seen.append(len(input_ids))
            return input_ids

    forward = adapter.replace_model_forward(Passed.forward)
    init = adapter.replace_init_forward_metadata(lambda self, batch: None)
    for _ in range(count):
        batch, seen = batch_of([100], [0], POOL), []
        init(backend, batch)
        assert len(forward(Passed(), batch.input_ids, batch.positions, batch, None)) == 100
        ways.append(trial.WHOLE if seen == [100] else trial.HALVES)
    return ways, exchanged, clock


@pytest.mark.parametrize(
    ("took", "other", "chosen"),
    [
        ((10.0, 7.0), (0.0, 0.0), trial.HALVES),
        ((10.0, 12.0), (0.0, 0.0), trial.WHOLE),
        ((10.0, 9.8), (0.0, 0.0), trial.WHOLE),  # not worth it
        ((10.0, 7.0), (0.1, 0.11), trial.WHOLE),  # another rank's host is slower
    ],
)
def test_the_faster_way_stays(monkeypatch, took, other, chosen):
    ways, exchanged, clock = tried_passes(monkeypatch, took, other, 20)
    order = list(trial.ORDER) * (trial.WARM + trial.COUNTED)
    assert ways == order + [chosen] * (20 - len(order))
    assert len(exchanged) == 1 and exchanged[0] == pytest.approx([took[0] / 100, took[1] / 100])
    assert clock.synchronized == 2, "the host waits once for each way"
    ratio = max(took[1] / 100, other[1]) / max(took[0] / 100, other[0])
    assert adapter._trials.decided() == {"64": chosen} and not adapter._trials.of(100)._times
    assert adapter._left == {"by its time, or to find that out": ways.count(trial.WHOLE)}
    assert adapter._seen["passes"] == ways.count(trial.HALVES)
    assert adapter._describe().endswith(f"; {chosen} from 64 rows on: {ratio:.2f} of the whole's time in halves")


def test_sizes_have_trials_of_their_own():
    trials = trial.Trials()
    assert trials.of(4096) is trials.of(8191) is not trials.of(8192)
    assert (trials.of(4096).rows, trials.of(8192).rows, trials.told()) == (4096, 8192, [])
    assert trials.decided() == {}
    trials = trial.Trials()
    trials.of(2048)
    for rows in (8192, 4096):
        trials.of(rows).decided, trials.of(rows).told = trial.WHOLE, f"of {rows}"
    assert list(trials.decided().items()) == [("4096", trial.WHOLE), ("8192", trial.WHOLE)]
    assert trials.told() == ["of 4096", "of 8192"]


def test_the_first_twelve_passes_are_a_trials():
    """As docs/operating.md has it: four that nothing is made of, and both ways in turns that a longer prefix evens."""
    assert (len(trial.ORDER) * trial.WARM, len(trial.ORDER) * (trial.WARM + trial.COUNTED)) == (4, 12)
    assert trial.ORDER == (trial.WHOLE, trial.HALVES, trial.HALVES, trial.WHOLE)


def test_an_event_has_a_time_and_is_on_the_stream(monkeypatch):
    made = []

    class Event:
        def __init__(self, enable_timing=False):
            made.append(("timed", enable_timing))

        def record(self):
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert trial.event() is made[1] and made == [("timed", True), made[1]]


@pytest.mark.parametrize(("ended", "chosen"), [(None, trial.WHOLE), (trial.WHOLE,) * 2, (trial.HALVES,) * 2])
def test_of_passes_that_never_ended_no_time_is_told(monkeypatch, ended, chosen):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda each, **_: None)
    one, clock = trial.Trial(64), Clock((0, 0))
    if ended:
        one.add(ended, 64, clock.event(), clock.event())
    for _ in range(len(trial.ORDER) * (trial.WARM + trial.COUNTED)):
        one.next_way(None)
    assert one.next_way(None) == one.decided == chosen
    assert one.told == f"{chosen} from 64 rows on: no pass came to its end"


# ---- what is asked for


def test_what_is_asked_for_is_the_engines(monkeypatch):
    monkeypatch.setattr(patching, "value", {"prompts_in_halves": 2048}.__getitem__)
    assert ASKED() == 2048


@pytest.mark.parametrize(("asked", "usual", "found"), [(50, 60, ["in halves"]), (51, 1, []), (0, 51, [])])
def test_halves_have_as_many_rows_as_are_asked_for_or_as_is_usual(monkeypatch, asked, usual, found):
    monkeypatch.setattr(adapter, "least_rows", lambda: asked)
    monkeypatch.setattr(adapter, "ROWS", usual)
    assert list(why()) == found
    assert f" passes of {2 * (asked or usual)} rows and more in halves" in adapter._describe()
