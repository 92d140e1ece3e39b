"""bench/timeline.py on steps whose waiting is known."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "bench")]

import timeline  # noqa: E402
from timeline import JOIN, LAUNCH, PROGRAMMATIC, Kernel  # noqa: E402

from tests.e2e import engine_case  # noqa: E402


def path_of(*kernels: tuple) -> list[tuple]:
    """(name, stream, begin, end) ... -> (name, what it waits for, how, gap, adds) of the path."""
    step = [Kernel("end", 7, -5, -1), *sorted((Kernel(*one) for one in kernels), key=lambda one: (one.begin, one.end))]
    return [(one.kernel.name, one.waits_for, one.how, one.gap, one.adds) for one in timeline.critical_path(step)]


def test_the_engines_script_reads_the_same_events():
    """It has their kinds of its own: with a checkout on its path SGLang would find our package where none is asked."""
    assert (engine_case.CARDS, engine_case.HOSTS) == (timeline.KINDS, timeline.CALLS)


def test_a_chain_has_its_gaps():
    assert path_of(("a", 7, 0, 4), ("b", 7, 6, 9), ("c", 7, 9, 10)) == [
        ("a", "end", LAUNCH, 1, 4),
        ("b", "a", LAUNCH, 2, 3),
        ("c", "b", LAUNCH, 0, 1),
    ]


def test_a_kernel_that_began_early_adds_what_it_takes_beyond_its_predecessor():
    assert path_of(("a", 7, 0, 4), ("b", 7, 1, 9))[1] == ("b", "a", PROGRAMMATIC, 0, 5)


def test_a_join_waits_for_the_later_stream_and_the_other_is_off_the_path():
    kernels = ("a", 7, 0, 2), ("short", 7, 2, 3), ("long", 8, 2.5, 7), ("b", 7, 8, 9)
    assert path_of(*kernels) == [
        ("a", "end", LAUNCH, 1, 2),
        ("long", "a", JOIN, 0.5, 4.5),
        ("b", "long", JOIN, 1, 1),
    ]
    step = [Kernel("end", 7, -5, -1), *(Kernel(*one) for one in kernels)]
    (beside,) = timeline.off_path([step], [timeline.critical_path(step)])
    assert beside == {"kernel": "short", "a_step": 1, "busy_us": 1}


def test_what_runs_beside_on_another_stream_is_no_predecessor():
    """It began first and ends within: only on the same stream that is a programmatic launch."""
    assert path_of(("a", 7, 0, 2), ("beside", 8, 1, 5), ("b", 7, 3, 6))[-1] == ("b", "a", LAUNCH, 1, 3)


def test_a_kernel_that_outlives_its_successor_is_not_waited_for():
    """Its successor had ended before: whatever that waited for, it was not this one's end."""
    assert path_of(("a", 7, 0, 1), ("late", 7, 2, 9), ("b", 7, 3, 5), ("c", 7, 9, 10))[-2:] == [
        ("late", "a", LAUNCH, 1, 7),
        ("c", "late", LAUNCH, 0, 1),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_gaps_and_additions_are_the_step(seed):
    source = random.Random(seed)
    step, now = [Kernel("end", 7, -3, source.uniform(-2, 2))], 0.0
    for number in range(60):
        now += source.uniform(0, 3)
        step.append(Kernel(f"k{number}", source.choice((7, 7, 7, 8, 9)), now, now + source.uniform(0.1, 8)))
    path = timeline.critical_path(step)
    assert path[-1].kernel.end == max(one.end for one in step)
    length = path[-1].kernel.end - step[0].end
    assert timeline.length_of(path) == pytest.approx(length)
    assert all(one.gap >= 0 and one.adds >= 0 for one in path)
    rows = timeline.table([path, path])
    assert sum(row["gap_us"] + row["adds_us"] for row in rows) == pytest.approx(length)


@pytest.mark.parametrize("seed", range(30))
def test_times_that_are_rounded_to_us_end_too(seed):
    """Kernels that took none at one instant, on any stream: neither waits for the other and back, for ever."""
    source = random.Random(seed)
    step = [Kernel("end", 7, -1.0, 0.0)]
    for number in range(60):
        begin = float(source.randrange(40))
        step.append(Kernel(f"k{number}", source.choice((7, 8)), begin, begin + source.choice((0, 0, 1, 2))))
    step[1:] = sorted(step[1:], key=lambda one: (one.begin, one.end))
    path = timeline.critical_path(step)
    assert len(path) <= len(step) and timeline.length_of(path) == pytest.approx(max(one.end for one in step))


def trace_of(steps: int, sums: float, offset: float = 0.0) -> dict:
    """A step: layer 3 us, the sum, 1 us to the argmax of 2 us."""
    events, now = [{"cat": "cpu_op", "name": "host", "ts": 0, "dur": 1, "tid": 1}], offset
    for _ in range(steps):
        for name, gap, us in (("layer<float>(int)", 1, 3), ("ncclDevKernel_AllReduce", 0, sums), ("ArgMaxOps", 1, 2)):
            now += gap
            events.append({"cat": "kernel", "name": f"void ns::{name}", "ts": now, "dur": us, "tid": 7})
            now += us
    return {"traceEvents": events}


def written(folder: Path, name: str, trace: dict) -> str:
    path = folder / name
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def test_the_command_tells_exchange_from_skew(tmp_path, capsys):
    traces = [written(tmp_path, "0.json.gz", trace_of(12, 10)), written(tmp_path, "1.json", trace_of(11, 4, 1e6))]
    assert timeline.main([*traces, "--clock", "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["steps"] == 6 and found["step_us"]["median"] == pytest.approx(1 + 3 + 10 + 1 + 2)
    assert found["sums"] == {"sums_a_step": 1, "exchange_us": pytest.approx(4), "skew_us": [pytest.approx(6), 0]}
    assert found["path"][0]["kernel"] == "ncclDevKernel_AllReduce" and found["path"][0]["waits_for"] == "layer<float>"
    assert found["gaps_us"] == pytest.approx(2)
    told = capsys.readouterr().out
    assert "1 sums between cards a step: 4.0 us the exchange itself" in told and "rank 0 6.0, rank 1 0.0" in told
    assert "ArgMaxOps  <- ncclDevKernel_AllReduce" in told


def with_host(trace: dict, late: float) -> dict:
    """Each step is launched by one call of 4 us, which ends so long behind the end of the step before. On another
    stream a kernel beside the layer, whose call was late as well: nobody waited for that. One call launches nothing."""
    events, kernels = trace["traceEvents"], [one for one in trace["traceEvents"] if one["cat"] == "kernel"]
    before = 0.0
    for number, first in enumerate(range(0, len(kernels), 3)):
        layer, sums, argmax = kernels[first : first + 3]
        shift = number * late + late
        for one in (layer, sums, argmax):
            one["ts"] += shift
            one["args"] = {"correlation": number}
        call = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": before + late - 4, "dur": 4, "tid": 3}
        events.append(call | {"args": {"correlation": number}})
        events.append({"cat": "cuda_driver", "name": "cuEventQuery", "ts": layer["ts"], "dur": 0.5, "tid": 3})
        beside = {"cat": "kernel", "name": "beside", "ts": layer["ts"] + 2, "dur": 1, "tid": 8}
        events.append(beside | {"args": {"correlation": -1 - number}})
        events.append(
            call | {"name": "cudaLaunchKernel", "ts": layer["ts"], "dur": 1, "args": {"correlation": -1 - number}}
        )
        before = argmax["ts"] + argmax["dur"]
    return trace


def test_what_the_card_waits_for_the_host(tmp_path, capsys):
    """1 us lies in front of each layer, whoever is late."""
    for late, waits in ((0.0, 0.0), (3.0, 3.0)):
        trace = written(tmp_path, "host.json", with_host(trace_of(12, 10), late))
        assert timeline.main([trace, "--out", str(tmp_path / "out.json")]) == 0
        found = json.loads((tmp_path / "out.json").read_text())["host"]
        calls = {row["call"]: (row["a_step"], row["us"]) for row in found["calls"]}
        assert calls["cuEventQuery"] == (1, 0.5) and calls["cudaLaunchKernel"] == (1, 1)
        assert calls["cudaGraphLaunch"] == (1, pytest.approx(4))
        assert found["late_us"] == {"median": pytest.approx(waits), "greatest": pytest.approx(waits)}
        told = capsys.readouterr().out
        assert f"the card waits for the host {waits:.1f} us a step" in told and "cudaGraphLaunch" in told


def test_what_counts_as_waiting_for_the_host():
    """A kernel may begin before its call ends; another stream may still be busy; a number of nobody's is no call's."""
    calls = [Kernel("call", 1, end - 1, end, number) for end, number in ((5, 1), (9, 3), (18, 4), (24, None))]
    step = [
        Kernel("end", 7, -5, 0),
        Kernel("began before its call's end", 7, 1, 10, 1),
        Kernel("beside, of a call before the trace", 8, 2, 3, 2),
        Kernel("launched while the first stream was busy", 8, 12, 13, 3),
        Kernel("late", 7, 20, 21, 4),
        Kernel("of no number", 7, 25, 26),
    ]
    assert timeline.host([step], calls)["late_us"] == {"median": 1 + 5, "greatest": 1 + 5}


def test_the_host_is_the_first_ranks(tmp_path):
    traces = [
        written(tmp_path, "0.json", with_host(trace_of(12, 1), 3.0)),
        written(tmp_path, "1.json", trace_of(12, 1)),
    ]
    for order, has_it in ((traces, True), (traces[::-1], False)):
        assert timeline.main([*order, "--out", str(tmp_path / "out.json")]) == 0
        assert (json.loads((tmp_path / "out.json").read_text())["host"] is not None) is has_it


def test_without_the_hosts_calls_nothing_is_said_of_it(tmp_path, capsys):
    trace = written(tmp_path, "0.json", trace_of(12, 1))
    assert timeline.main([trace, "--out", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["host"] is None
    assert "host" not in capsys.readouterr().out


def test_what_cannot_be_told_is_said(tmp_path, capsys):
    empty = written(tmp_path, "empty.json", {"traceEvents": []})
    assert timeline.main([empty]) == 2 and "no kernel" in capsys.readouterr().err
    few = written(tmp_path, "few.json", trace_of(4, 1))
    assert timeline.main([few]) == 2 and "no whole step behind the first 5: 4 kernels" in capsys.readouterr().err
    uneven = trace_of(12, 1)
    uneven["traceEvents"] = [one for one in uneven["traceEvents"] if "nccl" not in one["name"]]
    pair = [written(tmp_path, "whole.json", trace_of(12, 1)), written(tmp_path, "uneven.json", uneven)]
    assert timeline.main(pair) == 2 and "same number of sums" in capsys.readouterr().err
    assert timeline.main([str(tmp_path / "none.json")]) == 2 and "none.json" in capsys.readouterr().err


WHOLE = gzip.compress(json.dumps(trace_of(12, 1)).encode())
STRANGE = {  # a file's name and content -> what is said of it, behind its path
    "half.json.gz": (WHOLE[: len(WHOLE) // 2], "Compressed file ended before"),
    "damaged.json.gz": (WHOLE[:60] + bytes(8) + WHOLE[68:], "Error -3 while decompressing"),
    "not_packed.json": (WHOLE, "'utf-8' codec can't decode"),
    "another.json": (b'"text"', "it is no trace of torch's profiler: no list of traceEvents"),
    "null.json": (
        b'[{"cat": "kernel", "name": "a", "ts": 1, "dur": null}]',
        "it is no trace of torch's profiler: Type",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_file_that_is_none_is_one_sentence_with_its_name(name, tmp_path, capsys):
    content, words = STRANGE[name]
    (tmp_path / name).write_bytes(content)
    assert timeline.main([written(tmp_path, "good.json", trace_of(12, 1)), str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith(f"timeline: {tmp_path / name}: {words}")


def test_a_bare_list_of_events_is_a_trace(tmp_path, capsys):
    assert timeline.main([written(tmp_path, "list.json", trace_of(12, 1)["traceEvents"])]) == 0
    assert capsys.readouterr().out.startswith("6 steps of ")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--end=(", "'(' is no regular expression: missing )"),
        ("--sum=[", "'[' is no regular expression"),
        ("--skip=-3", "'-3' is no whole number from 0 on"),
        ("--rows=0", "'0' is no whole number from 1 on"),
    ],
)
def test_an_option_that_is_none_is_wrong_usage(option, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        timeline.main([written(tmp_path, "0.json", trace_of(12, 1)), option])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_figures_that_cannot_be_written_are_told_and_shown(tmp_path, capsys):
    trace = written(tmp_path, "0.json", trace_of(12, 1))
    assert timeline.main([trace, "--out", str(tmp_path / "no/out.json")]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("6 steps of ") and "timeline: --out " in told.err and "No such file" in told.err


def test_what_counts_as_an_exchange():
    """By the names that a trace has."""
    ours = (
        "all_reduce::one_shot_kernel<2, false>",
        "all_reduce::gather_kernel<2, true>",
        "mhc::summing_kernel<false, 2>",
    )
    theirs = (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "ncclDevKernel_AllGather_RING_LL",
        "cross_device_reduce_1stage",
    )
    others = ("mxfp4_moe::down_sum_kernel<4>", "mhc::fused_kernel<false, false>", "at::native::reduce_kernel<512, 1>")
    found = [name for name in (*ours, *theirs, *others) if re.search(timeline.SUM, f"void dsv4::{name}")]
    assert found == [*ours, *theirs]
