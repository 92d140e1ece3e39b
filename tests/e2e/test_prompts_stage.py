"""What the stages `prompts` make of latencies, traces and logs."""

import pytest

from tests.e2e import collect, prompts_stage


def kernel(name, ts, dur=1.0):
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur}


def test_a_pass_lasts_until_the_next_begins_and_waits_where_no_kernel_runs():
    """Kernels that overlap, on two streams, are not counted twice; what is no kernel is not counted."""
    one = (("layer", 0.0, 10.0), ("beside", 5.0, 10.0), ("layer", 20.0, 5.0))
    events = [kernel(name, start + ts, dur) for start in (150.0, 100.0) for name, ts, dur in one]
    events += [kernel("once", 99.0), {"cat": "gpu_memcpy", "name": "copy", "ts": 0.0, "dur": 9.0}]
    first, second = prompts_stage.of_passes(events, 2)
    tables = [one.pop("kernels") for one in (first, second)]
    assert tables == [
        [["layer", 2, 15.0], ["beside", 1, 10.0], ["once", 1, 1.0]],
        [["layer", 2, 15.0], ["beside", 1, 10.0]],
    ]
    assert first == {"ms": pytest.approx(0.051), "idle_ms": pytest.approx(0.030), "launches": 4}
    assert second == {"ms": pytest.approx(0.025), "idle_ms": pytest.approx(0.005), "launches": 3}


def test_a_trace_without_passes_fails():
    with pytest.raises(RuntimeError, match="no kernel runs equally often in 4 passes"):
        prompts_stage.of_passes([kernel(name, ts) for ts, name in enumerate("aab")], 4)
    with pytest.raises(RuntimeError, match="no kernels"):
        prompts_stage.of_passes([], 1)


def test_requests_end_with_their_pass():
    def answers(*latencies):
        return [{"meta_info": {"e2e_latency": latency}} for latency in latencies]

    several = answers(0.31, *[0.1] * 7, 0.11, *[0.29] * 7, 0.3)
    assert prompts_stage.passes_of(several, 1024) == pytest.approx([110.0, 190.0, 10.0])
    assert prompts_stage.passes_of(answers(0.2, 0.1), 128) == pytest.approx([200.0])
    assert prompts_stage.passes_of([{"meta_info": {}}], 128) == []


def test_passes_by_graph_are_those_of_prefill():
    log = [
        "[2026-11-23 04:00:00] Prefill batch, #new-seq: 1, #new-token: 1024, cuda graph: True, input throughput 1.0",
        "[2026-11-23 04:00:01] Decode batch, #running-req: 1, cuda graph: True, gen throughput (token/s): 1.0",
        "[2026-11-23 04:00:02] Prefill batch, #new-seq: 1, #new-token: 9, cuda graph: False, input throughput 1.0",
    ]
    assert prompts_stage.prefills(log) == {"true": 1, "false": 1}


def test_what_the_graphs_hold_is_the_cards_that_has_most():
    log = [
        "[2026-11-23 06:58:42 TP1] Capture target prefill CUDA graph end. elapsed=10.9 s, mem usage=3.36 GB, avail.",
        "[2026-11-23 06:58:42 TP0] Capture target prefill CUDA graph end. elapsed=10.9 s, mem usage=3.31 GB, avail.",
        "[2026-11-23 06:58:45 TP0] Capture target decode CUDA graph end. elapsed=4.5 s, mem usage=14.73 GB, avail.",
    ]
    assert prompts_stage.graphs_gib(log) == 3.36 and prompts_stage.graphs_gib(log[2:]) is None


@pytest.mark.parametrize(
    ("prefills", "met"), [({"true": 2, "false": 1}, True), ({"true": 0, "false": 3}, False), (None, False)]
)
def test_graphs_that_did_not_act_are_a_missed_bar_in_any_stage(prefills, met):
    case = {
        "exit": 0,
        "patched": False,
        "command": f"DSV4_SM120_SET=reproducible=on,{prompts_stage.PLANNED} engine_case.py",
    }
    case |= {} if prefills is None else {"prefills": prefills}
    rows = {row["metric"]: row for row in collect.case_rows("text43_eagle314_graphs", case)}
    assert rows["engines without a prefill pass in graphs"]["met"] is met
    plain = collect.case_rows("text43_plain", case | {"command": "engine_case.py"})
    assert not any("graphs" in row["metric"] for row in plain)
