"""doctor's machine checks over faked nvidia-smi answers, /sys, /proc and environments."""

import argparse
import json
import os
import struct
import subprocess
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.commands.doctor import facts, gpu_checks, host_checks, nvidia_smi, pci, probe, software_checks
from deepseek_v4_sm120.commands.doctor.command import examine, run, show
from deepseek_v4_sm120.commands.doctor.finding import FAIL, NOT_RUN, OK, WARN
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.patching.steering import NOT_BY_DEFAULT, Steering
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.defaults import DEFAULTS

H200 = (Path(__file__).resolve().parents[1] / "data/nvidia_smi_h200.xml").read_text()  # a driver's true answer
ADAPTER = "sglang_patches/adapters/all_reduce.py"
BUILD = {"problem": None, "version": "0.1.0", "git_commit": "c0ffee", "cuda_version": "13.0", "archs": ["120a", "90a"]}
CARD = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
SHORT = {"width": "<current_link_width>16x", "limit": "<current_power_limit>600"}
TOPOLOGY = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \t{kind}\t0-15\nGPU1\t{kind}\t X \t0-15\n\nLegend:\n"


def rtx(count=2, **changes):
    """nvidia-smi's answer on a machine of RTX PRO 6000 cards, made from the H200's by its own words."""
    head, gpu = H200.split(' <gpu id="00000000:00:06.0">')
    gpu, tail = gpu.split(" </gpu>")
    gpu = gpu.replace("NVIDIA H200", CARD).replace("700.00 W", "600.00 W").replace("143771 MiB", "97887 MiB")
    for old, new in changes.items():
        old = SHORT.get(old, old)
        assert old in gpu, old
        gpu = gpu.replace(old, old.rpartition(">")[0] + ">" + new if ">" in old else new)
    bodies = [f' <gpu id="x">{gpu.replace("00000000:00:06.0", f"00000000:0{i + 1}:00.0")} </gpu>' for i in range(count)]
    return head + "".join(bodies) + tail


def smi(xml, *, capability="12.0", kind="PIX"):
    def run(command):
        if command[0] != "nvidia-smi":
            return None
        if command[1] == "topo":
            return TOPOLOGY.format(kind=kind)
        return xml if "-x" in command else f"{capability}\n" * xml.count("<gpu id")

    return run


def gathered(tmp_path, xml=None, environ=None, **how):
    for folder in ("sys", "proc/self", "dev/shm"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    run = smi(xml, **how) if xml else lambda command: None
    status = {"build": BUILD, "patches": [], "processes": [], "defaults": [], "profile": None}
    with mock.patch.object(facts, "_status", lambda: (status, None)):  # ours takes a tenth of a second
        found = facts.gather(tmp_path, {"HOME": "/root", **(environ or {})}, run)
    found.limits = {"RLIMIT_MEMLOCK": -1, "RLIMIT_NOFILE": 65535}
    return found


def states(findings):
    return {f.check: f.state for f in findings}


def finding(findings, check):
    (found,) = [f for f in findings if f.check == check]
    return found


def test_a_drivers_true_answer_is_read():
    found = nvidia_smi.read(smi(H200, capability="9.0"))
    (gpu,) = found.gpus
    assert (gpu.name, gpu.bus_id, gpu.capability) == ("NVIDIA H200", "0000:00:06.0", (9, 0))
    assert (gpu.memory_total, gpu.memory_used, gpu.clock_max) == (143771, 0, 1980)
    assert (gpu.link_generation, gpu.link_width) == ((5, 5), (16, 16))
    assert (gpu.power_limit, gpu.power_default, gpu.slowdowns) == (700.0, 700.0, ())
    assert (found.driver, found.cuda) == ("580.159.04", "13.0")


def test_no_gpu_is_one_line_and_no_failure(tmp_path):
    found = gathered(tmp_path)
    (only,) = gpu_checks.checks(found)
    assert (only.check, only.state) == ("GPU", NOT_RUN)
    assert FAIL not in states(examine(found)).values()


@pytest.mark.parametrize("answer", ["not xml", "<nvidia_smi_log/>"])
def test_strange_answers_are_told(answer):
    assert nvidia_smi.read(lambda command: answer).problem


def test_a_good_machine_has_nothing_to_complain_about(tmp_path):
    found = gathered(tmp_path, rtx())
    found.probe = {
        "links": {"0": [5, 16], "1": [5, 16]},
        "peers": [{"from": i, "to": 1 - i, "reported": True, "moved": True, "gbs": 49.0} for i in (0, 1)],
    }
    assert set(states(gpu_checks.checks(found)).values()) <= {OK, NOT_RUN}


@pytest.mark.parametrize(
    ("change", "check", "state", "words"),
    [
        ({"width": "8x"}, "PCIe link of GPU 0", WARN, "x8"),
        ({"limit": "300"}, "power of GPU 0", WARN, "limit 300 W"),
        ({"thermal": "Active"}, "power of GPU 0", WARN, "hw_thermal_slowdown"),
        ({"<used>0 MiB": "9000 MiB"}, "memory of GPU 0", WARN, "9000 of 97887 MiB"),
        ({"580.159.04": "570.1"}, "driver", FAIL, "570.1"),
    ],
)
def test_what_is_wrong_with_a_card(tmp_path, change, check, state, words):
    (old, new), *_ = change.items()
    if old == "580.159.04":
        xml = rtx().replace(old, new)
    elif "thermal" in old:
        tag = "clocks_event_reason_hw_thermal_slowdown"
        xml = rtx().replace(f"<{tag}>Not Active", f"<{tag}>Active")
    else:
        xml = rtx(**change)
    found = finding(gpu_checks.checks(gathered(tmp_path, xml)), check)
    assert found.state == state and words in found.found and found.cost and found.fix


@pytest.mark.parametrize(
    ("used", "is_serving", "state", "words"),
    [
        (1024, False, OK, "1024 of"),
        (1025, False, WARN, "1025 of"),
        (97887 - 616 - 1024, True, OK, "96247 of"),  # 616 are the driver's own
        (97887 - 616 - 1023, True, WARN, "1023 MiB free beside a running server"),
        (97887 - 10, False, WARN, "97877 of"),
    ],
)
def test_memory_at_rest_and_beside_a_server(tmp_path, used, is_serving, state, words):
    found = gathered(tmp_path, rtx(**{"<used>0 MiB": f"{used} MiB"}))
    found.status["processes"] = [{}] * is_serving
    memory = finding(gpu_checks.checks(found), "memory of GPU 1")
    assert memory.state == state and words in memory.found and ("beside" in memory.found) <= is_serving


@pytest.mark.parametrize(
    ("driver", "cuda", "state"),
    [
        ("579.99", "13.0", FAIL),
        ("580.0", "13.2", OK),
        ("575.50", "12.9", FAIL),
        ("575.51.03", "12.9", OK),
        ("580.0", None, NOT_RUN),
        ("999.0", "14.0", NOT_RUN),  # a CUDA that nobody has told us of
    ],
)
def test_the_oldest_driver_that_loads_a_build(tmp_path, driver, cuda, state):
    found = gathered(tmp_path, rtx().replace("580.159.04", driver))
    found.status["build"] = BUILD | {"cuda_version": cuda}
    assert finding(gpu_checks.checks(found), "driver").state == state


def test_a_link_that_does_not_wake_up(tmp_path):
    found = gathered(tmp_path, rtx())
    found.probe = {"links": {"0": [3, 16], "1": [5, 16]}, "peers": []}
    checks = list(gpu_checks.checks(found))
    assert finding(checks, "PCIe link of GPU 0").cost.startswith("25% of the link")
    assert finding(checks, "PCIe link of GPU 1").state == OK


@pytest.mark.parametrize(
    ("pair", "state", "words"),
    [
        ({"reported": True, "moved": False, "gbs": 0.1}, FAIL, "data does not arrive"),
        ({"reported": False, "moved": False, "gbs": 9.0}, FAIL, "through host memory does not arrive"),
        ({"reported": False, "moved": True, "gbs": 9.0}, WARN, "not possible"),
        ({"reported": True, "moved": True, "gbs": 9.0}, WARN, "9.0 GB/s"),
        ({"reported": True, "moved": True, "gbs": 20.0}, OK, "20.0 GB/s"),
        ({"reported": True, "moved": True, "gbs": 45.0}, OK, "45.0 GB/s"),
    ],
)
def test_peers_that_lie_are_slow_or_absent(tmp_path, pair, state, words):
    found = gathered(tmp_path, rtx())
    found.probe = {"links": {}, "peers": [{"from": 0, "to": 1, **pair}]}
    peers = finding(gpu_checks.checks(found), "peer copies")
    assert peers.state == state and words in peers.found
    assert ("DSV4_SM120_SET=all_reduce=host" in peers.fix) == (state == FAIL and pair["reported"])


def test_copies_that_never_end_are_suspected_not_hidden(tmp_path):
    found = gathered(tmp_path, rtx())
    found.probe, found.probe_problem = {"links": {}, "peers": []}, "the copies did not end within 60 s"
    assert "did not end" in finding(gpu_checks.checks(found), "peer copies").found


def verdict(transport, text="2 cards sum by way of x: 5.0 us (1 row); to do: ACS off"):
    return {"transport": transport, "text": text, "remedy": "ACS off"}


@pytest.mark.parametrize(("transport", "state"), [("peer", OK), ("host", WARN), (None, WARN)])
def test_by_which_way_the_cards_sum(tmp_path, transport, state):
    found = gathered(tmp_path, rtx())
    found.probe = {"links": {}, "peers": [], "sums": verdict(transport)}
    sums = finding(gpu_checks.checks(found), "sums between the cards")
    assert sums.state == state and sums.found == "2 cards sum by way of x: 5.0 us (1 row)"
    assert state == OK or sums.fix == "ACS off" and "87 times a step" in sums.cost


def test_what_a_running_server_found_is_told_first(tmp_path):
    found = gathered(tmp_path, rtx())
    found.probe = {"sums": verdict("peer")}
    found.status["processes"] = [{"patches": []}, {"patches": [], "found": {"all_reduce": verdict(None, "served")}}]
    assert finding(gpu_checks.checks(found), "sums between the cards").found == "served"


def test_of_several_processes_the_slowest_sums_are_told(tmp_path):
    found = gathered(tmp_path, rtx())
    ways = ("peer", None, "host")
    found.status["processes"] = [{"patches": [], "found": {"all_reduce": verdict(way, str(way))}} for way in ways]
    told = finding(gpu_checks.checks(found), "sums between the cards")
    assert (told.state, told.found) == (WARN, "None")


@pytest.mark.parametrize(
    ("told", "words"),
    [({"sums_up_to_rows": 64}, "served; up to 64 rows inside of mhc's boundaries"), ({}, "served"), (3, "served")],
)
def test_sums_inside_of_boundaries_are_told(tmp_path, told, words):
    found = gathered(tmp_path, rtx())
    found.status["processes"] = [{"found": {"all_reduce": verdict("peer", "served"), "mhc": told}}]
    assert finding(gpu_checks.checks(found), "sums between the cards").found == words


@pytest.mark.parametrize(
    "strange",
    [None, [], "x", {}, {"all_reduce": 3}, {"all_reduce": {"transport": "nvlink", "text": "t", "remedy": "r"}}],
)
def test_a_strange_report_says_nothing_of_the_sums(tmp_path, strange):
    found = gathered(tmp_path, rtx())
    found.status["processes"] = [{"patches": [], "found": strange}]
    assert finding(gpu_checks.checks(found), "sums between the cards").state == NOT_RUN


COPIES, SUMS = '{"links": {}, "peers": [1]}', '{"sums": {"text": "t"}}'


def test_the_probe_says_its_parts_one_by_one(monkeypatch):
    done = subprocess.CompletedProcess([], 0, f"noise\n{COPIES}\n{SUMS}\n", "")
    monkeypatch.setattr(probe.subprocess, "run", lambda *_, **__: done)
    assert probe.run("python", 60.0) == ({"links": {}, "peers": [1], "sums": {"text": "t"}}, None)


@pytest.mark.parametrize(("said", "peers"), [(COPIES.encode(), [1]), (None, [])])
def test_what_the_probe_said_before_it_hung_counts(said, peers, monkeypatch):
    def hangs(words, **_):
        raise subprocess.TimeoutExpired(words, 60.0, output=said)

    monkeypatch.setattr(probe.subprocess, "run", hangs)
    found, why = probe.run("python", 60.0)
    assert found == {"links": {}, "peers": peers, "sums": None} and "did not end within 60 s" in why


@pytest.mark.parametrize(("kind", "state"), [("PIX", OK), ("PHB", WARN), ("SYS", WARN)])
def test_topology(tmp_path, kind, state):
    assert finding(gpu_checks.checks(gathered(tmp_path, rtx(), kind=kind)), "topology").state == state


def test_other_architectures_and_mixed_machines(tmp_path):
    assert finding(gpu_checks.checks(gathered(tmp_path, H200, capability="9.0")), "GPU").state == WARN
    mixed = rtx().replace(CARD, "NVIDIA RTX 5090", 1)
    assert "several kinds" in finding(gpu_checks.checks(gathered(tmp_path, mixed)), "GPU").found


def config_space(control):
    """4 KiB of PCI registers with an ACS capability behind another one."""
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
    struct.pack_into("<IHH", data, 0x140, pci.ACS_CAPABILITY | 1 << 16, 0x5F, control)
    return bytes(data)


@pytest.mark.parametrize(
    ("config", "state"), [(config_space(0x1D), WARN), (config_space(0x00), OK), (config_space(0)[:64], NOT_RUN)]
)
def test_access_control_of_the_bridges(tmp_path, config, state):
    bridge = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (bridge / name).mkdir(parents=True)
        (devices / name).symlink_to(bridge / name)
    (bridge / "config").write_bytes(config)
    (devices / "0000:00:01.0").symlink_to(bridge)
    (tmp_path / "sys/kernel/iommu_groups/7").mkdir(parents=True)
    found = finding(gpu_checks.checks(gathered(tmp_path, rtx())), "ACS and IOMMU")
    assert found.state == state and "IOMMU on (1 groups)" in found.found


def test_a_driver_too_old_and_a_build_without_the_cards_code(tmp_path):
    found = gathered(tmp_path, rtx(), capability="12.1")
    told = finding(gpu_checks.checks(found), "driver")
    assert "not for sm_121" in told.found and told.fix.endswith("--archs 120f")
    found.status["build"] = BUILD | {"archs": ["120f", "90a"]}
    assert finding(gpu_checks.checks(found), "driver").state == OK


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING=1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments"),
    ],
)
def test_variables_that_cost_speed_or_answers(tmp_path, environ, words):
    found = [f for f in host_checks.checks(gathered(tmp_path, rtx(), environ)) if f.state in (WARN, FAIL)]
    assert words in " ".join(f.found for f in found)


def test_variables_of_a_running_server_are_read_where_one_may(tmp_path):
    (tmp_path / "proc/77").mkdir(parents=True)
    (tmp_path / "proc/77/environ").write_bytes(b"NCCL_SHM_DISABLE=1\0HOME=/\0")
    found = gathered(tmp_path, rtx())
    found.server_environ = {77: facts._environ_of(tmp_path, 77)}
    assert finding(host_checks.checks(found), "variables of server process 77").state == WARN
    assert facts._environ_of(tmp_path, 78) is None


@pytest.mark.parametrize("quick", [False, True])
def test_what_takes_long_is_announced(tmp_path, monkeypatch, capsys, quick):
    def told_before(python, seconds, with_sums):
        assert "copies between cards and host, 150 s at most" in capsys.readouterr().err and not quick
        return None, "not here"

    monkeypatch.setattr(probe, "run", told_before)
    found = gathered(tmp_path, rtx())
    monkeypatch.setattr(facts, "gather", lambda root, environ, **_: found)
    run(argparse.Namespace(url=None, api_key=None, quick=quick, json=True, out=None, log=None, profile=None))
    assert capsys.readouterr().err == ""


def test_small_shared_memory_and_limits(tmp_path):
    found = gathered(tmp_path, rtx())
    found.shm_bytes, found.limits = 64 << 20, {"RLIMIT_MEMLOCK": 8 << 20, "RLIMIT_NOFILE": 1024}
    checks = list(host_checks.checks(found))
    assert finding(checks, "/dev/shm").state == FAIL and "--ipc=host" in finding(checks, "/dev/shm").fix
    assert finding(checks, "ulimits").found == "locked memory 8192 KiB, 1024 open files"


def test_sitecustomize_of_others(tmp_path):
    found = gathered(tmp_path)
    ours = str(Path(found.package, "sitecustomize.py"))
    for files, state in (([ours, "/x"], OK), (["/x/sitecustomize.py", ours], FAIL), ([], WARN)):
        found.sitecustomize = files
        assert finding(software_checks.checks(found), "sitecustomize").state == state
    found.is_isolated = True
    assert "-I, -E or -S" in finding(software_checks.checks(found), "sitecustomize").found


def test_versions_against_sglangs_own_pins(tmp_path):
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23", "torch": "2.14.1+cu130", "flashinfer-python": "0.6.18"}
    found.pins = {"torch": "2.14.1", "flashinfer-python": "0.7.2"}
    (versions,) = [f for f in software_checks.checks(found) if f.check == "versions"]
    assert versions.state == WARN and versions.found == "flashinfer-python 0.6.18 (SGLang 0.5.23 pins 0.7.2)"
    found.versions["flashinfer-python"] = "0.7.2"
    assert finding(software_checks.checks(found), "versions").state == OK
    found.versions["torch"] = None
    assert "torch is missing" in finding(software_checks.checks(found), "versions").found
    ours, nothing = [{"patch": "sparse_decode", "state": "READY", "reason": "", "review": "reviewed"}], {}
    for sglang, patches, settings, environ, state in (
        *((sglang, [], nothing, nothing, FAIL) for sglang in ("0.5.15", "0.5.15.post1")),
        ("0.5.15.post1", ours, nothing, nothing, OK),
        ("0.5.15", ours, {"shadow": "1"}, nothing, FAIL),
        ("0.5.15", [], nothing, {software_checks.ATTENTION_VARIABLE: "triton"}, OK),
        ("0.5.16", [], nothing, nothing, OK),
    ):
        found.versions |= {"torch": "2.14.1", "sglang": sglang}
        found.status |= {"patches": patches, "settings": settings}
        found.environ = environ
        assert finding(software_checks.checks(found), "versions").state == state, (sglang, settings, environ)
    found.versions["sglang"], triton = "0.5.15", {software_checks.ATTENTION_VARIABLE: "triton"}
    for here, servers, state in (
        (nothing, [triton], OK),
        (triton, [nothing], FAIL),  # what is said to this command is not said to the server
        (nothing, [triton, nothing], FAIL),
    ):
        found.environ, found.server_environ = here, dict(enumerate(servers))
        assert finding(software_checks.checks(found), "versions").state == state, (here, servers)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.6.12", "wait for ever"),
        ("0.6.14", "count too few"),
        ("0.6.18.post1", "count too few"),
        ("0.7.1", None),
        ("0.7.2", None),
        (None, None),
    ],
)
def test_a_flashinfer_whose_top_k_hangs_or_races(tmp_path, version, words):
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23", "flashinfer-python": version}
    told = [f for f in software_checks.checks(found) if f.check == "sampling"]
    assert [(f.state, words in f.cost) for f in told] == ([(WARN, True)] if words else [])


def test_two_sglangs_are_told_and_neithers_pins_are_advised(tmp_path):
    found = gathered(tmp_path)
    found.versions, found.pins = {"sglang": "0.5.23", "torch": "2.11.0"}, {"torch": "2.14.1"}
    found.status |= {"sglang": "0.5.17", "host_folder": "/workspace/python/sglang"}
    (versions,) = [f for f in software_checks.checks(found) if f.check == "versions"]
    assert versions.state == WARN and "finds the code of 0.5.17, in /workspace/python/sglang" in versions.found
    assert "pip has installed 0.5.23" in versions.found and "torch" not in versions.found + versions.fix
    assert "take /workspace/python off Python's path" in versions.fix
    for same in ("0.5.23", "0.5.23+cu130", None):
        found.status["sglang"] = same
        assert "torch 2.11.0 (SGLang 0.5.23 pins 2.14.1)" in finding(software_checks.checks(found), "versions").found


def test_what_all_patches_lack_is_said_once(tmp_path):
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23"}
    row = {"state": "BROKEN", "reason": "no module: build it", "review": ""}
    found.status["patches"] = [row | {"patch": name} for name in ("mhc", "mhc", "wo_a")]
    assert finding(software_checks.checks(found), "patches").found == "mhc, wo_a: no module: build it"


def test_no_patches_are_none_that_fit(tmp_path):
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23"}
    assert finding(software_checks.checks(found), "patches").state == NOT_RUN


@pytest.mark.parametrize(
    ("shadow", "words"),
    [
        ([{"patch": "mhc", "bad_calls": 3, "nonfinite_ours": 0}, {"patch": "mhc", "bad_calls": 1}], "4 calls of mhc"),
        ([{"patch": "wo_a", "bad_calls": 0, "nonfinite_ours": 7}], "1 calls of wo_a"),
        ([{"patch": "wo_a", "bad_calls": 0, "nonfinite_ours": 0, "nonfinite_original": 7}], None),
        ([{"patch": "wo_a", "bad_calls": "3"}, 3, None], None),
        ({"patch": "mhc"}, None),
        (None, None),
    ],
)
def test_what_shadow_mode_has_found_in_a_server_is_told(tmp_path, shadow, words):
    found = gathered(tmp_path)
    found.status["processes"] = [{"pid": 5, "patches": [], "shadow": shadow}]
    told = finding(software_checks.checks(found), "process 5")
    assert told.state == (FAIL if words else OK) and (not words or words in told.found)


def test_memory_that_is_not_told_is_not_well(tmp_path):
    xml = rtx(**{"<total>97887 MiB": "N/A", "<used>0 MiB": "N/A"})
    assert finding(gpu_checks.checks(gathered(tmp_path, xml)), "memory of GPU 0").state == NOT_RUN


def test_patches_settings_processes_and_the_build(tmp_path):
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23"}
    row = {"patch": "sparse_decode", "state": "BROKEN", "reason": "no such key", "review": ""}
    default = {"default": "theirs", "state": "OFF", "reason": NOT_BY_DEFAULT, "would_set": "X=1", "why": "slow"}
    ours = default | {"default": "draft_head", "would_set": ""}  # sets nothing of SGLang's
    process = {"pid": 5, "patches": [row | {"state": "APPLIED"}], "devices_served": {"0": False}}
    found.status |= {"patches": [row], "defaults": [default, ours], "processes": [process]}
    found.status["build"] = BUILD | {"problem": "no compiled module"}
    found.status["unknown_choices"] = "DSV4_SM120_SET names x"
    checks = list(software_checks.checks(found))
    assert {"patches": FAIL, "compiled module": FAIL, "process 5": WARN, "DSV4_SM120_SET": FAIL}.items() <= states(
        checks
    ).items()
    assert "switched off" not in states(checks)
    found.status["patches"] = [row | {"state": "OFF", "patch": "mhc", "reason": "DSV4_SM120_SET=mhc=off"}]
    assert finding(software_checks.checks(found), "switched off").found == "mhc by DSV4_SM120_SET=mhc=off"
    for name in ("theirs", "draft_head"):
        told = finding(checks, f"default {name}")
        assert (told.state, told.fix) == (NOT_RUN, f"to try it: DSV4_SM120_SET={name}=on")


def test_nothing_of_an_untouched_machine_is_to_be_removed_from_variables(tmp_path):
    """Every default that is off of itself, in each release: to try, not to undo."""
    for release in ("0.5.14", "0.5.17", "0.5.23"):
        rows = Steering(DEFAULTS, Settings(), lambda versions, r=release: SpecifierSet(versions).contains(r)).as_rows()
        found = gathered(tmp_path)
        found.status["defaults"] = rows
        told = [f for f in software_checks.checks(found) if f.check.startswith("default ")]
        assert len(told) >= 3 and {f.state for f in told} == {NOT_RUN}


def test_what_is_wrong_around_us_is_told(tmp_path):
    found = gathered(tmp_path)
    found.status |= {"surroundings": ["the variable DSV4_SM120_PROFIL is none of ours"], "report_problem": "/x: full"}
    found.status["strange_reports"] = ["/x/1.json: is not JSON"]
    told = [
        (f.check, f.state, f.found) for f in software_checks.checks(found) if f.check in ("our variables", "reports")
    ]
    assert told == [
        ("our variables", WARN, "the variable DSV4_SM120_PROFIL is none of ours"),
        ("reports", WARN, "DSV4_SM120_REPORT: /x: full"),
        ("reports", WARN, "DSV4_SM120_REPORT: /x/1.json: is not JSON"),
    ]


def test_caches_of_another_user_are_told(tmp_path, monkeypatch):
    """As with docker run --user, where HOME is root's."""
    closed = "/root/.triton/cache"

    def listdir(path):
        if str(path).endswith(closed):
            raise PermissionError(13, "Permission denied")
        return os_listdir(path)

    os_listdir = os.listdir
    monkeypatch.setattr(facts.os, "listdir", listdir)
    told = finding(software_checks.checks(gathered(tmp_path)), "kernel caches")
    assert told.state == FAIL and told.found == f"not this user's: {closed}"


@pytest.mark.parametrize("is_there", [False, True])
def test_caches_that_cannot_be_written_are_told(tmp_path, monkeypatch, is_there):
    """As with docker run --user, where HOME is / for who has no name, and a new volume is root's."""
    (tmp_path / ("root/.triton/cache" if is_there else "root")).mkdir(parents=True)
    closed = tmp_path / ("root/.triton/cache" if is_there else "root")
    os_access = os.access
    monkeypatch.setattr(facts.os, "access", lambda path, mode: Path(path) != closed and os_access(path, mode))
    told = finding(software_checks.checks(gathered(tmp_path)), "kernel caches")
    assert told.state == FAIL and "/root/.triton/cache" in told.found and "HOME=" in told.fix
    assert ("/root/.cache/flashinfer" in told.found) is not is_there


@pytest.mark.parametrize(
    ("asked", "left_out", "note", "state", "words"),
    [
        ("OFF", (), "", None, ""),
        ("ON", (), "", OK, "every operator"),
        ("USER'S OWN", (), "", OK, "every operator"),
        ("ON", ("mhc", "reproducible_head"), "", FAIL, "SGLang's own are mhc, reproducible_head"),
        ("ON", (), "all_reduce: no way. NOT REPRODUCIBLE: NCCL's order", FAIL, "no way"),
    ],
)
def test_what_a_reproducible_server_lacks(tmp_path, asked, left_out, note, state, words):
    found = gathered(tmp_path)
    row = {"reason": "x", "review": "", "state": "READY"}
    patches = [row | {"patch": name} for name in software_checks.REPRODUCIBLE if name not in left_out]
    patches += [row | {"patch": name, "state": "OFF"} for name in left_out]
    default = {"default": "reproducible", "state": asked, "reason": "x", "would_set": "", "why": ""}
    process = {
        "pid": 5,
        "patches": [],
        "devices_served": {"0": True},
        "notes": ["mhc: fine", *([note] if note else [])],
    }
    found.status |= {"patches": patches, "defaults": [default], "processes": [process]}
    told = [one for one in software_checks.checks(found) if one.check == "reproducible"]
    assert [one.state for one in told] == ([] if state is None else [state])
    assert all(words in one.found for one in told)


def test_the_note_of_sums_that_are_not_ours_has_the_words():
    assert software_checks.NOT_REPRODUCIBLE in Path(facts.__file__).parents[2].joinpath(ADAPTER).read_text()


@pytest.mark.parametrize(
    ("wrong", "state", "words"),
    [
        ({"triton": "C4: relative error 0.3, allowed 0.08"}, FAIL, "sparse_decode/triton is wrong on this card: C4"),
        ({"triton": "crashed after 0 case(s): x"}, WARN, "crashed under calibrate: sparse_decode/triton"),
        ({"ours": "crashed after 0 case(s): illegal access"}, FAIL, "sparse_decode/ours is wrong on this card"),
    ],
)
def test_a_provider_that_is_wrong_on_this_card_is_named(tmp_path, wrong, state, words):
    file = tmp_path / "profile.json"
    here = profile.Identity("GPU A", "580.1", None, "0.1.0")
    operators = {"sparse_decode": {"winner": "ours", "wrong": wrong}}
    file.write_text(json.dumps({"format": 1, "identity": asdict(here), "operators": operators}))
    found = gathered(tmp_path)
    found.status["profile"] = profile.consult(str(file), None, here).describe()
    named = finding(software_checks.checks(found), "profile")
    assert named.state == state and words in named.found


def test_caches_that_a_container_loses(tmp_path):
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text("overlay / overlay rw 0 0\n/dev/sda /root/.cache ext4 rw 0 0\n")
    found = gathered(tmp_path)
    lost = [c.variable for c in found.caches if not c.survives]
    assert lost == ["TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"]
    fix = finding(software_checks.checks(found), "kernel caches").fix
    assert fix == "docker run -v dsv4-tilelang:/root/.tilelang -v dsv4-triton:/root/.triton"


def test_it_is_shown_with_cost_and_fix(tmp_path, capsys):
    show(list(gpu_checks.checks(gathered(tmp_path, rtx(width="8x")))))
    text = capsys.readouterr().out
    assert "costs: 50% of the link" in text and "fix: another slot" in text and " WARN" in text
