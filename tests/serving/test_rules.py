"""The parts of the comparison that need no server: refusal rules, clocks, statistics, cells, patch reports."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.serving import cells, identity, machine, measures, report, server_process
from bench.serving.cells import Cell
from bench.serving.endpoint import Endpoint
from bench.serving.identity import Identity
from bench.serving.measures import Change, Metric, Spread
from bench.serving.server_errors import ServerError
from deepseek_v4_sm120.patching import lifetime

FASTER, LOWER = Metric("rate", "tok/s", True), Metric("wait", "ms", False)


def side(**values) -> Identity:
    known = {"version": "0.5.17", "model": "m", "flags": {"tp_size": 2}, "environment": {}, "patch": {}}
    return Identity("x", "http://h", **{**known, **values})


@pytest.mark.parametrize(
    ("changed", "change"),
    [
        ({"version": "0.5.20"}, "version"),
        ({"model": "other"}, "model"),
        ({"flags": {"tp_size": 4}}, "flag:tp_size"),
        ({"flags": {"tp_size": 2, "new_flag": None}}, "flag:new_flag"),
        ({"environment": {"NCCL_ALGO": "Ring"}}, "env:NCCL_ALGO"),
        ({"environment": {"PYTHONPATH": "build"}}, "patch"),
        ({"patch": {"sparse_decode": "APPLIED"}}, "patch"),
    ],
)
def test_one_difference_is_allowed_by_its_name_only(changed, change):
    a, b = side(), side(**changed)
    (reason,) = identity.reasons_to_refuse(a, b, ["nothing"])
    assert f"--change {change}" in reason or change == "patch"
    assert identity.reasons_to_refuse(a, b, [change]) == []
    wrong = "env:OTHER"
    assert len(identity.reasons_to_refuse(a, b, [wrong])) == 2  # the difference, and that the named one is not there


def test_an_argument_that_one_release_alone_has_is_of_the_release_and_a_changed_value_is_not():
    a, b = side(), side(version="0.5.20", flags={"tp_size": 2, "launch_order": None})
    assert identity.reasons_to_refuse(a, b, ["version"]) == []
    (reason,) = identity.reasons_to_refuse(a, side(version="0.5.20", flags={"tp_size": 4}), ["version"])
    assert "tp_size differs: A 2, B 4" in reason


def test_equal_sides_pass_as_an_a_a_run_and_fail_as_a_comparison():
    assert identity.reasons_to_refuse(side(), side(), ["nothing"]) == []
    assert identity.reasons_to_refuse(side(), side(), ["patch"]) == [
        "the intended change patch is not there: A and B are the same in it"
    ]
    assert identity.reasons_to_refuse(side(patch=None), side(patch=None), ["patch"]) == []  # told as unknown instead


def test_a_change_that_is_not_there_is_said_also_where_the_patch_is_not_known():
    (reason,) = identity.reasons_to_refuse(side(patch=None), side(patch=None), ["flag:tp_size"])
    assert reason == "the intended change flag:tp_size is not there: A and B are the same in it"


@pytest.mark.parametrize(
    ("value", "found"),
    [(1, 1), (1 << 39, 1 << 39), (1 << 40, None), (0, None), (-1, None), (True, None), ("9", None), (9.0, None)],
)
def test_a_number_of_tokens_that_a_server_told(value, found):
    assert identity._whole(value) == found and identity._whole(value) is not True


@pytest.mark.parametrize("info", [ServerError("lost"), [], {"version": "0.5.17", "tp_size": 2, "context_length": 4096}])
@pytest.mark.parametrize("is_local", [True, False])
def test_what_a_server_does_not_say_is_not_known(info, is_local):
    def server_info():
        if isinstance(info, Exception):
            raise info
        return info

    told = {"url": "http://h", "host": "h", "is_local": lambda: is_local, "models": lambda: ["m"]}
    found = identity.identify("A", SimpleNamespace(**told, server_info=server_info))
    unknown = " ".join(found.unknown)
    is_known = isinstance(info, dict)
    assert ("flags and version" in unknown) != is_known and ("devices, clocks" in unknown) != is_local
    assert "environment (" in unknown and "patch status" in unknown and found.patch_status == "not known"
    assert (found.name, found.url, found.model, found.host) == ("A", "http://h", "m", "this host" if is_local else "h")
    assert (found.version, found.max_request_tokens) == (("0.5.17", 4096) if is_known else (None, None))
    assert side(patch={}).patch_status == "stock" and side(patch={"b": "X", "a": "Y"}).patch_status == "a Y, b X"


def test_two_hosts_are_never_compared():
    (reason,) = identity.reasons_to_refuse(side(), side(host="10.0.0.2"), ["nothing"])
    assert "not on one host" in reason


def test_which_addresses_are_local():
    assert Endpoint("http://127.0.0.1:1").is_local() and Endpoint("localhost:1").is_local()
    assert not Endpoint("http://192.0.2.1:1").is_local() and not Endpoint("http://no.such.host.invalid:1").is_local()


def test_an_environment_that_is_known_of_one_side_only_is_no_proof_of_a_difference():
    assert identity.reasons_to_refuse(side(environment=None), side(environment={"A": "1"}), ["nothing"]) == []


@pytest.mark.parametrize("change", ["speed", "flag", "environment:X", ""])
def test_unknown_kinds_of_change(change):
    with pytest.raises(ValueError, match="--change must be"):
        identity.check_changes([change])


def clocks(**values) -> dict:
    return {"sm_mhz": 2400.0, "mem_mhz": 14001.0, "throttled": False, **values}


def test_clocks():
    assert identity.clock_reasons(None, None) == []
    assert identity.clock_reasons(clocks(), clocks(sm_mhz=2430.0)) == []
    assert "sm_mhz differs by more than 3%" in identity.clock_reasons(clocks(), clocks(sm_mhz=2200.0))[0]
    assert "side B was throttled" in identity.clock_reasons(clocks(), clocks(throttled=True))[0]
    assert "clocks were seen on side A only" in identity.clock_reasons(clocks(), None)[0]


def sample(sm="2400", busy="90", throttle="0x0000000000000000", **more) -> dict[str, str]:
    return {
        "clocks.sm": sm,
        "clocks.mem": "14001",
        "temperature.gpu": "60",
        "power.draw": "300.5",
        "utilization.gpu": busy,
        "clocks_throttle_reasons.active": throttle,
        **more,
    }


def test_only_busy_samples_count():
    found = machine.summarise_clocks([sample("210", "0"), sample("2400"), sample("2420"), sample("2410")])
    assert (found["sm_mhz"], found["busy_samples"], found["throttled"]) == (2410, 3, False)
    assert machine.summarise_clocks([sample(busy="0")]) is None and machine.summarise_clocks([]) is None


@pytest.mark.parametrize(
    ("reason", "throttled"), [("0x4", False), ("0x1", False), ("0x8", True), ("0x20", True), ("[N/A]", False)]
)
def test_a_power_cap_is_ordinary_heat_is_not(reason, throttled):
    assert machine.summarise_clocks([sample(throttle=reason)])["throttled"] is throttled


def test_values_that_a_card_does_not_have():
    found = machine.summarise_clocks([sample(**{"power.draw": "[N/A]"})])
    assert found["power_w"] is None and found["sm_mhz"] == 2400


def test_the_machine_is_described_without_any_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine.describe(tmp_path)
    assert found["gpus"] == [] and found["topology"] is None and found["commit"] is None
    assert machine.gpu_names(found) == "no GPU seen by nvidia-smi"


def test_the_gpus_as_nvidia_smi_tells_them(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\nfor i in 0 1; do echo "$i, NVIDIA X, 580.1, 98, 600.00, 2430, 14001, 5, 16, 97887"; done\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = machine.describe(tmp_path)
    assert machine.gpu_names(found) == "2 x NVIDIA X"
    assert found["gpus"][1]["driver_version"] == "580.1" and found["gpus"][1]["pcie.link.width.max"] == "16"


def test_which_machine_it_is_is_in_no_result(monkeypatch, tmp_path):
    """Results are posted."""
    monkeypatch.setattr(machine.platform, "node", lambda: "a-name-of-somebodys")
    monkeypatch.setattr(machine, "output_of", lambda command, *_: " ".join(command))
    told = json.dumps(machine.describe(tmp_path))
    assert not any(word in told for word in ("a-name-of-somebodys", "uuid", "serial"))


def test_the_clocks_are_watched_while_a_side_is_measured(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\nwhile :; do echo "0, 2400, 14001, 60, 300.5, 95, 0x0000000000000004"; sleep 0.05; done\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    watch = machine.ClockWatch(0.05)
    with watch.watching():
        time.sleep(0.3)
    count = len(watch.samples)
    assert count >= 2 and machine.summarise_clocks(watch.samples)["sm_mhz"] == 2400
    time.sleep(0.15)
    assert len(watch.samples) == count


def test_percentiles_by_hand():
    assert measures.percentile([1, 2, 3, 4], 50) == 2.5
    assert measures.percentile([5], 99) == 5
    assert measures.percentile(list(range(101)), 99) == 99
    with pytest.raises(ValueError, match="no values"):
        measures.percentile([], 50)


@pytest.mark.parametrize(
    ("metric", "a", "b", "verdict"),
    [
        (FASTER, [1, 2, 3], [4, 5, 6], "better"),
        (FASTER, [4, 5, 6], [1, 2, 3], "worse"),
        (LOWER, [1, 2, 3], [4, 5, 6], "worse"),
        (LOWER, [4, 5, 6], [1, 2, 3], "better"),
        (FASTER, [1, 2, 4], [4, 5, 6], "within noise"),
        (FASTER, [4, 5, 6], [1, 2, 4], "within noise"),
        (FASTER, [100, 100.1, 100.2], [100.5, 100.6, 100.7], "within 1%"),
        (FASTER, [1, 2], [4, 5], "too few rounds"),
        (FASTER, [1, 2, 3], [9], "too few rounds"),
    ],
)
def test_a_verdict_needs_ranges_that_do_not_touch(metric, a, b, verdict):
    assert Change.of(metric, Spread.of(a), Spread.of(b)).verdict == verdict


def test_time_is_better_the_less_and_all_else_the_more():
    for name, metric in measures.METRICS.items():
        assert metric.name == name and metric.words and metric.higher_is_better is (not name.endswith("_ms"))
        assert name.endswith(metric.unit.replace("/", "_")) or metric.unit == "tokens", name
    assert {name for names in measures.HEADLINES.values() for name in names} <= measures.METRICS.keys()
    assert measures.PERCENTILES == (50, 90, 99)


def output(start=0.0, ttft=1.0, gaps=(0.1, 0.1), **more) -> dict:
    times = {"start_time": start, "ttft": ttft, "itl": list(gaps), "latency": ttft + sum(gaps)}
    return {"success": True, "error": "", "output_len": len(gaps) + 1, "cached_tokens": 0, **times, **more}


def test_figures_of_concurrent_streams_by_hand():
    cell = Cell("c", "concurrent", 100, 3, streams=2, requests=2)
    values, pools = measures.figures(cell, [output(), output(start=0.5, gaps=(0.2, 0.2))])
    assert values["total_tok_s"] == pytest.approx(6 / 1.9)
    assert values["stream_tok_s"] == pytest.approx((10 + 5) / 2)
    assert values["ttft_ms"] == 1000 and values["itl_max_ms"] == pytest.approx(200)
    assert len(pools["itl"]) == 4


def test_figures_of_prefill_and_speculation_by_hand():
    values, _ = measures.figures(Cell("p", "prefill", 8000, 1), [output(ttft=2.0, gaps=())])
    assert values == {"ttft_ms": 2000, "prefill_tok_s": 4000}
    values, _ = measures.figures(Cell("s", "single", 10, 3), [output(spec_accept_length=2.5)])
    assert values["acceptance_length"] == 2.5 and values["verifier_steps_s"] == pytest.approx(4)
    for said in ("3", [2], -3, float("nan"), True, None, 0):  # no acceptance, whatever the server calls it
        values, _ = measures.figures(Cell("s", "single", 10, 3), [output(spec_accept_length=said)])
        assert "acceptance_length" not in values and values["stream_tok_s"] == pytest.approx(10), said


def test_the_gaps_that_a_long_prompt_is_felt_in():
    cell = Cell("i", "intrusion", 10, 5, streams=1, requests=2, long_tokens=99, delay_s=1)
    stream = output(ttft=1.0, gaps=(0.1, 0.1, 3.0, 0.1))  # tokens at 1.1, 1.2, 4.2, 4.3
    late = output(start=2.0, ttft=2.1, gaps=())  # its prefill is from 2.0 to 4.1
    values, pools = measures.figures(cell, [stream, late])
    assert pools["during"] == [pytest.approx(3000)] and pools["otherwise"] == [pytest.approx(100)] * 3
    assert values["itl_max_ms"] == pytest.approx(3000) and values["ttft_ms"] == pytest.approx(2100)
    with pytest.raises(ValueError, match="no stream was still decoding"):
        measures.figures(cell, [stream, output(start=9.0, ttft=1.0, gaps=())])
    with pytest.raises(ValueError, match="the long prompt came before 1 of 1 streams had a token"):
        measures.figures(cell, [stream, output(start=0.9, ttft=1.0, gaps=())])


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            {"success": False, "error": "Traceback\nServerDisconnectedError"},
            "1 of 1 requests failed: ServerDisconnected",
        ),
        ({"ttft": 0.0}, "gave no token"),
        ({"output_len": 2}, "shorter than the 3 tokens asked for"),
        ({"output_len": 12}, "counted longer than the 3 tokens asked for: [12]; rates would be too high"),
        ({"cached_tokens": 64}, "partly in the prefix cache (up to 64 tokens)"),
    ],
)
def test_outputs_that_are_no_measurement(more, problem):
    cell = Cell("s", "single", 100, 3)
    assert measures.problems(cell, [output()], True) == []
    assert problem in measures.problems(cell, [output(**more)], True)[0]


@pytest.mark.parametrize(
    ("length", "cached", "is_unique"),
    [(100, 16, True), (100, 17, False), (10000, 200, True), (10000, 201, False), (10000, None, True)],
)
def test_a_unique_prompt_may_share_its_first_tokens(length, cached, is_unique):
    cell = Cell("s", "single", length, 3)
    assert (measures.problems(cell, [output(cached_tokens=cached)], True) == []) is is_unique


def test_the_long_prompt_of_an_intrusion_is_asked_for_one_token():
    cell = Cell("i", "intrusion", 10, 3, streams=1, requests=2, long_tokens=10000, delay_s=1)
    late = output(gaps=(), cached_tokens=200)
    assert measures.problems(cell, [output(), late], True) == []
    assert "1 answers are shorter" in measures.problems(cell, [output(gaps=()), late], True)[0]
    assert "1 unique prompts" in measures.problems(cell, [output(), late | {"cached_tokens": 201}], True)[0]
    lost = output(success=False, error="x")
    assert len(measures.problems(cell, [lost, lost], True)) == 1  # of answers that never came nothing is too short


def test_a_rate_needs_two_tokens_and_time():
    assert measures.decode_rate(output(gaps=())) is None
    assert measures.decode_rate(output(gaps=(0.0,))) is None
    assert measures.decode_rate(output(gaps=(0.5,))) == pytest.approx(2.0)


def test_the_share_of_prompts_that_came_from_the_cache():
    told = [output(cached_tokens=cached) for cached in (90, 0, 50)]
    assert measures.cached_share(told, 100) == 0.5
    assert measures.cached_share([*told, output(cached_tokens=None)], 100) == 0.25
    del told[1]["cached_tokens"]
    assert measures.cached_share(told, 100) is None


def test_streams_that_begin_late_are_timed_from_the_first():
    cell = Cell("c", "concurrent", 100, 3, streams=2, requests=2)
    values, _ = measures.figures(cell, [output(start=5.0), output(start=6.0)], fill=output(ttft=3.0))
    assert values["total_tok_s"] == pytest.approx(6 / 2.2) and values["fill_ttft_ms"] == 3000
    assert values["itl_p50_ms"] == pytest.approx(100)


def test_a_natural_end_may_be_early_and_a_depth_prompt_may_be_cached():
    assert measures.problems(Cell("s", "single", 100, 3), [output(output_len=2)], False) == []
    assert measures.problems(Cell("d", "depth", 100, 3), [output(cached_tokens=99)], True) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "other"}, "kind must be one of"),
        ({"streams": 0}, "must be at least 1"),
        ({"kind": "intrusion"}, "needs long_tokens and delay_s"),
    ],
)
def test_cells_that_make_no_sense(values, message):
    with pytest.raises(ValueError, match=message):
        Cell(**{"name": "x", "kind": "single", "prompt_tokens": 1, "output_tokens": 1, **values})


@pytest.mark.parametrize("matrix", cells.MATRICES)
def test_every_matrix_asks_every_question(matrix):
    found = cells.MATRICES[matrix]()
    assert {cell.kind for cell in found} == set(cells.KINDS)
    assert len({cell.name for cell in found}) == len(found)


def test_patch_states_from_the_reports_of_several_processes(tmp_path):
    states = ["NOT APPLICABLE", "READY", "APPLIED", "READY"]
    for number, state in enumerate(states):
        content = {"settings": {"force": None}, "patches": [{"patch": "sparse_decode", "state": state}]}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    assert identity.patch_states(tmp_path) == ({"sparse_decode": "APPLIED"}, [])
    (tmp_path / "none").mkdir()
    assert identity.patch_states(tmp_path / "none") == ({}, [])  # stock
    patched = {"pid": os.getpid(), "patches": [{"patch": "mhc", "state": "APPLIED"}], "process": lifetime.of_this()}
    for began, states in ((patched["process"]["began"], {"mhc": "APPLIED"}), (1, {})):
        (tmp_path / "none/1.json").write_text(json.dumps(patched | {"process": {**patched["process"], "began": began}}))
        assert identity.patch_states(tmp_path / "none") == (states, []), "the server before this one was patched"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is no report"),
        ('{"patches": 3}', "is no report"),
        ('{"patches": [{"patch": "x"}]}', "is no report"),
        ('{"settings": []}', "is no report"),
        (None, "is a directory"),
    ],
)
def test_a_report_that_cannot_be_read_is_not_known_and_never_stock(tmp_path, content, words):
    (tmp_path / "1.json").mkdir() if content is None else (tmp_path / "1.json").write_text(content)
    states, (why,) = identity.patch_states(tmp_path)
    assert states is None and words.lower() in why.lower()
    for folder in (tmp_path / "nowhere", None):
        states, (why,) = identity.patch_states(folder)
        assert states is None and "no folder" in why


def test_values_of_a_difference_are_told_but_not_those_of_keys():
    assert identity.values_of("tp_size", {"tp_size": 2}, {}) == "A 2, B None"
    assert identity.values_of("X_TOKEN", {"X_TOKEN": "CaNaRy"}, {"X_TOKEN": "b"}) == "A '***', B '***'"


def test_a_full_disk_does_not_stop_a_server_that_talks(tmp_path, capsys):
    command = f"head -c 300000 /dev/zero | tr '\\0' '\\n'; touch {tmp_path}/done; exit 3"
    server = server_process.ServerProcess("x", command, "http://127.0.0.1:9", Path("/dev/full"))
    server.start()
    try:
        assert server.process.wait(30) == 3
    finally:
        server.stop()
    assert (tmp_path / "done").exists() and capsys.readouterr().err.count("ends early: No space left") == 1


def test_the_command_of_a_process_is_shown_without_its_keys():
    words = ["--api-key", "Ca Na Ry", "-H", "X-Api-Key: Ca Na Ry"]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words]) as process:
        try:
            limit, found = time.monotonic() + 20, ""
            while "--api-key" not in found and time.monotonic() < limit:  # for a moment a process has no command
                found = server_process.command_of(process.pid)
        finally:
            process.kill()
    assert found.endswith("--api-key '***' -H 'X-Api-Key: ***'")


def test_a_pipe_in_a_cell_does_not_break_the_table():
    table = report.markdown_table(("a", "b"), iter([("x|y", "z")]))
    assert table.splitlines()[-1] == "| x\\|y | z |"


def test_a_text_of_several_lines_does_not_break_the_table():
    table = report.markdown_table(("a", "b"), iter([("x\n\n# a heading\n| better |", "z")]))
    assert table.splitlines()[2:] == ["| x # a heading \\| better \\| | z |"]


def test_the_identity_is_plain_data():
    assert json.loads(json.dumps(dataclasses.asdict(side())))["model"] == "m"
