"""doctor on machines where a server runs and is slow: slots, slices, heat, processors, what was left switched on."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.commands.doctor import (
    command,
    cpu_checks,
    cpus,
    facts,
    gpu_checks,
    host_checks,
    nvidia_smi,
    probe,
    server,
    software_checks,
)
from deepseek_v4_sm120.commands.doctor.finding import FAIL, NOT_RUN, OK, WARN
from deepseek_v4_sm120.patching.steering import NOT_BY_DEFAULT
from tests.doctor.test_machine import finding, gathered, rtx, smi
from tests.doctor.test_server import PLANNED
from tests.patching.test_wheel_speculation import number
from tests.patching.wheels import RELEASES, content, every_release, fetch, members

COUNTERS = "clocks_event_reasons_counters"
VIRTUAL = "<gpu_virtualization_mode><virtualization_mode>{}</virtualization_mode></gpu_virtualization_mode>"


def with_fields(text, count=2):
    """nvidia-smi's answer with these fields in each card's."""
    return rtx(count).replace(" </gpu>", f"{text} </gpu>")


def said(findings, check):
    return [one for one in findings if one.check == check]


# ---- the slot


def slot(tmp_path, card=("32.0 GT/s PCIe", "16"), port=("32.0 GT/s PCIe", "16"), node="-1"):
    """/sys with two cards behind a port each."""
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for i in (1, 2):
        bridge = tmp_path / f"sys/devices/pci0000:00/0000:00:0{i}.0"
        (bridge / f"0000:0{i}:00.0").mkdir(parents=True)
        for folder, (speed, width) in ((bridge, port), (bridge / f"0000:0{i}:00.0", card)):
            (folder / "max_link_speed").write_text(f"{speed}\n")
            (folder / "max_link_width").write_text(f"{width}\n")
            (folder / "numa_node").write_text(f"{node}\n")
            (devices / folder.name).symlink_to(folder)


def link(tmp_path, loaded, **changes):
    found = gathered(tmp_path, rtx(**changes))
    found.probe = {"links": {"0": loaded}, "peers": []}
    return finding(gpu_checks.checks(found), "PCIe link of GPU 0")


def test_a_width_of_card_and_slot_is_not_called_the_cards(tmp_path):
    """NVIDIA's maximum is of both: 8 lanes for a card of 16 in a slot of 8."""
    slot(tmp_path, port=("32.0 GT/s PCIe", "8"))
    told = link(tmp_path, [5, 8], **{"width": "8x", "<max_link_width>16x": "8x"})
    assert (told.state, told.fix) == (WARN, gpu_checks.LINK_FIX) and told.cost.startswith("50% of the link")
    assert "the card can gen 5 x16, the port above it gen 5 x8" in told.found


def test_without_sys_nobody_says_that_nothing_is_to_be_done(tmp_path):
    told = link(tmp_path, [5, 8], **{"width": "8x", "<max_link_width>16x": "8x"})
    assert told.state == WARN and gpu_checks.LINK_FIX in told.fix and "card and slot" in told.found


def test_a_card_of_few_lanes_is_the_card(tmp_path):
    slot(tmp_path, card=("32.0 GT/s PCIe", "8"))
    told = link(tmp_path, [5, 8], **{"width": "8x", "<max_link_width>16x": "8x"})
    assert told.fix == "none, the card"


@pytest.mark.parametrize("port", [("2.5 GT/s PCIe", "1"), ("Unknown", "255"), ("32.0 GT/s PCIe", "16")])
def test_ports_that_tell_less_than_the_link_has_or_all_are_not_blamed(tmp_path, port):
    slot(tmp_path, port=port)
    told = link(tmp_path, [5, 8], width="8x")
    assert told.state == WARN and "port" not in told.found


@pytest.mark.parametrize("lanes", ["0x", "99999999999999999999x", "N/A"])
@pytest.mark.parametrize("field", ["<current_link_width>16x", "<current_link_gen>5"])
def test_a_link_of_impossible_lanes_is_not_told_and_ends_nothing(tmp_path, field, lanes):
    assert link(tmp_path, [5, 16], **{field: lanes}).state == NOT_RUN


# ---- the card


@pytest.mark.parametrize(
    ("counters", "words"),
    [
        ({"sw_power_cap": 9e9, "sw_therm_slowdown": 0, "hw_therm_slowdown": 0, "hw_power_brake": 0}, None),
        ({"sw_power_cap": 9e9, "hw_therm_slowdown": 7.2e7}, "72 s by heat since"),
        ({"sw_power_cap": 0, "sw_therm_slowdown": 2e7, "hw_power_brake": 1e7}, "20 s by heat, 10 s by the power"),
        ({"sw_power_cap": 0, "sw_therm_slowdown": 9e6}, None),
        ({"sw_power_cap": 91403239, "sw_therm_slowdown": 91403239}, None),  # a driver that tells one number for both
    ],
)
def test_a_card_that_was_hot_while_nobody_looked(tmp_path, counters, words):
    rows = "".join(f"<{COUNTERS}_{name}>{n:.0f} us</{COUNTERS}_{name}>" for name, n in counters.items())
    told = finding(
        gpu_checks.checks(gathered(tmp_path, with_fields(f"<{COUNTERS}>{rows}</{COUNTERS}>"))), "power of GPU 0"
    )
    assert told.state == (WARN if words else OK) and (words or "limit 600 W") in told.found


def test_slices_and_shares_of_cards_are_told(tmp_path):
    sliced = with_fields("<mig_mode><current_mig>Enabled</current_mig></mig_mode>")
    assert finding(gpu_checks.checks(gathered(tmp_path, sliced)), "MIG of GPU 1").state == WARN
    shared = list(gpu_checks.checks(gathered(tmp_path, with_fields(VIRTUAL.format("VGPU")))))
    assert ["vGPU" in one.found for one in said(shared, "GPU 0")] == [True]
    whole = list(gpu_checks.checks(gathered(tmp_path, with_fields(VIRTUAL.format("None")))))
    assert not said(whole, "GPU 0") and not said(whole, "MIG of GPU 0")


def test_bridges_that_are_the_hosts_are_not_called_fine(tmp_path):
    slot(tmp_path)
    for mode, state in (("Pass-Through", NOT_RUN), ("None", NOT_RUN)):
        told = finding(gpu_checks.checks(gathered(tmp_path, with_fields(VIRTUAL.format(mode)))), "ACS and IOMMU")
        assert told.state == state and ("virtual machine" in told.found) == (mode == "Pass-Through")


def process(pid, name, memory, kind="C"):
    fields = {"pid": pid, "type": kind, "process_name": name, "used_memory": f"{memory} MiB"}
    return f"<process_info>{''.join(f'<{k}>{v}</{k}>' for k, v in fields.items())}</process_info>"


@pytest.mark.parametrize(
    ("one", "words"),
    [
        ((9, "/usr/bin/ollama serve", 4000), "/usr/bin/ollama (pid 9) has 4000 MiB"),
        ((9, "/usr/bin/ollama", 1000), None),
        ((9, "/usr/bin/gnome-shell", 4000, "G"), None),
        ((5, "python3", 4000), None),
        ((9, "sglang::scheduler_TP0", 4000), None),
        ((9, "[Not Found]", 4000), None),
        ((9, "x", "N/A"), None),
    ],
)
def test_who_computes_on_the_card_beside_a_server(tmp_path, one, words):
    xml = with_fields(f"<processes>{process(4, 'sglang::scheduler', 80000)}{process(*one)}</processes>")
    found = gathered(tmp_path, xml)
    found.status["processes"] = [{"pid": 5, "patches": []}]
    told = finding(gpu_checks.checks(found), "memory of GPU 0")
    assert told.state == (WARN if words else OK) and (not words or f"beside the server {words}" in told.found)


def test_who_computes_on_other_cards_than_the_servers_is_let_be(tmp_path):
    xml = with_fields(f"<processes>{process(9, '/usr/bin/ollama', 4000)}</processes>")
    found = gathered(tmp_path, xml)
    found.status["processes"] = [{"pid": 5, "patches": []}]
    assert finding(gpu_checks.checks(found), "memory of GPU 0").state == OK


@pytest.mark.parametrize("is_serving", [False, True])
def test_the_memory_of_a_server_without_reports_is_its_own(tmp_path, monkeypatch, is_serving, capsys):
    """Who gives --url is not told to stop what answers there."""
    xml = rtx(**{"<used>0 MiB": "93000 MiB"}).replace(
        " </gpu>", f"<processes>{process(4, 'sglang::scheduler', 92000)}</processes> </gpu>"
    )
    found = gathered(tmp_path, xml)
    monkeypatch.setattr(facts, "gather", lambda root, environ, **_: found)
    monkeypatch.setattr(command.server, "ask", lambda url, key: server.Answers(PLANNED | {"nnodes": 2}, None))
    url = "http://127.0.0.1:1" if is_serving else None
    command.run(argparse.Namespace(url=url, api_key=None, quick=True, json=True, out=None, log=None, profile=None))
    told = finding(gpu_checks.checks(found), "memory of GPU 0")
    assert told.state == (OK if is_serving else WARN)
    assert found.hosts == (2 if is_serving else None)
    assert is_serving or ("sglang::scheduler (pid 4) has 92000 MiB" in told.found and "--url" in told.fix)


# ---- the processors


def processors(tmp_path, *, allowed="0-63", limit="max 100000", stat="", cpu=(), nodes=(), swap=0, pids=()):
    (tmp_path / "sys/fs/cgroup/pod").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{limit}\n")
    (tmp_path / "sys/fs/cgroup/cpu.stat").write_text(stat)
    for pid in ("self", *pids):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text("0::/pod\n")
        (tmp_path / f"proc/{pid}/status").write_text(f"Cpus_allowed_list:\t{allowed}\nVmSwap:\t  {swap} kB\n")
    frequency = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    frequency.mkdir(parents=True)
    for name, value in zip(("scaling_driver", "scaling_governor", "energy_performance_preference"), cpu, strict=False):
        (frequency / name).write_text(f"{value}\n")
    for i, cpulist in enumerate(nodes):
        (tmp_path / f"sys/devices/system/node/node{i}").mkdir(parents=True)
        (tmp_path / f"sys/devices/system/node/node{i}/cpulist").write_text(f"{cpulist}\n")
    return gathered(tmp_path, rtx())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, None),
        ({"allowed": "0-3"}, None),
        ({"allowed": "0"}, "1 may be used; 2 ranks want 4 or more"),
        ({"allowed": "0-1,7"}, "3 may be used"),
        ({"limit": "200000 100000"}, "64 may be used, 2 of them at a time (cpu.max); 2 ranks"),
        ({"limit": "50000 100000", "stat": "nr_throttled 9\nthrottled_usec 61000000\n"}, "threads back for 61 s; 2"),
        ({"limit": "400000 100000", "stat": "throttled_usec 61000000\n"}, None),
        ({"limit": "0 0"}, None),
        ({"allowed": "all"}, None),
    ],
)
def test_fewer_processors_than_ranks_are_told(tmp_path, how, words):
    told = said(cpu_checks.checks(processors(tmp_path, **how)), "CPUs")
    assert [(one.state, words in one.found) for one in told] == ([(WARN, True)] if words else [])


def test_ranks_are_those_of_the_reports(tmp_path):
    """A launcher asks for the first card, as the first rank does."""
    found = processors(tmp_path, allowed="0-3")
    found.status["processes"] = [{"devices_served": {str(i): True}} for i in (0, 0, 1, 2, 3)]
    assert "4 ranks want 6" in finding(cpu_checks.checks(found), "CPUs").found


def test_processors_of_the_servers_processes_count(tmp_path):
    processors(tmp_path, allowed="0-1", swap=200 << 10, pids=(71, 72))
    (tmp_path / "proc/72/status").write_text("Cpus_allowed_list:\t4-5\nVmSwap:\t204800 kB\n")
    read = cpus.read(tmp_path, [71, 72])
    assert read.allowed == {0, 1, 4, 5} and read.swapped_kib == 400 << 10
    found = gathered(tmp_path, rtx())
    found.cpus = read
    assert "400 MiB" in finding(cpu_checks.checks(found), "swap").found
    assert cpus.read(tmp_path, [99]).allowed == {0, 1}  # gone


@pytest.mark.parametrize(
    ("cpu", "is_slow"),
    [
        (("acpi-cpufreq", "powersave"), True),
        (("intel_cpufreq", "powersave"), True),
        (("acpi-cpufreq", "schedutil"), False),
        (("intel_pstate", "powersave", "balance_performance"), False),
        (("amd-pstate-epp", "powersave", "performance"), False),
        (("intel_pstate", "powersave", "power"), True),
        ((), False),
    ],
)
def test_slow_clocks_of_the_processors_are_told_and_usual_ones_are_not(tmp_path, cpu, is_slow):
    assert bool(said(cpu_checks.checks(processors(tmp_path, cpu=cpu)), "CPU clocks")) is is_slow


@pytest.mark.parametrize(
    ("node", "allowed", "is_far"), [("1", "0-31", True), ("1", "0-32", False), ("0", "0-31", False), ("-1", "0", False)]
)
def test_a_process_at_the_other_node_than_its_card_is_told(tmp_path, node, allowed, is_far):
    slot(tmp_path, node=node)
    told = said(cpu_checks.checks(processors(tmp_path, allowed=allowed, nodes=("0-31", "32-63"))), "NUMA")
    assert [("GPU 0 at node 1, GPU 1 at node 1" in one.found, one.state) for one in told] == [(True, WARN)] * is_far


def test_cards_that_torch_does_not_see_are_not_asked_for(tmp_path):
    """CUDA_VISIBLE_DEVICES leaves the first of two, or two of three."""
    slot(tmp_path, node="1")
    found = processors(tmp_path, allowed="0-2", nodes=("0-31", "32-63"))
    found.probe = {"links": {"0": [5, 16]}, "peers": []}
    told = {one.check: one.found for one in cpu_checks.checks(found)}
    assert told.keys() == {"NUMA"} and "GPU 1" not in told["NUMA"]
    found.smi = nvidia_smi.Smi((), None, None, {(0, 1): "PIX", (0, 2): "SYS", (1, 2): "SYS"})
    found.probe = {"peers": [{"from": 0, "to": 1}, {"from": 1, "to": 0}]}
    assert [one.state for one in gpu_checks._topology(found)] == [OK]
    found.probe = None
    found.smi = nvidia_smi.Smi(nvidia_smi.read(smi(rtx(3))).gpus, None, None, found.smi.topology)
    assert [one.state for one in gpu_checks._topology(found)] == [WARN]


def test_windows_and_sleepy_links_are_told(tmp_path):
    kernel, policy = tmp_path / "proc/sys/kernel/osrelease", tmp_path / "sys/module/pcie_aspm/parameters/policy"
    for file, text in (
        (kernel, "6.6.87.2-microsoft-standard-WSL2"),
        (policy, "default performance [powersave] powersupersave"),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(f"{text}\n")
    told = {one.check: one.state for one in cpu_checks.checks(processors(tmp_path))}
    assert told == {"WSL2": WARN, "ASPM": WARN}
    kernel.write_text("6.8.0-31-generic\n")
    policy.write_text("[default] performance powersave powersupersave\n")
    assert list(cpu_checks.checks(gathered(tmp_path, rtx()))) == []


# ---- what was left switched on


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("NCCL_DEBUG", "trace", WARN),
        ("NCCL_DEBUG", "WARN", OK),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", WARN),
        ("SGLANG_TEST_RETRACT", "true", WARN),
        ("SGLANG_TEST_RETRACT", "False", OK),
        ("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "0", OK),
        ("SGLANG_SIMULATE_ACC_LEN", "2.5", FAIL),
        ("SGLANG_SIMULATE_ACC_LEN", "-1", OK),
        ("TRITON_INTERPRET", "1", WARN),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", WARN),  # torch asks whether it is there
    ],
)
def test_switches_for_debugging_are_told_where_they_are_on(tmp_path, variable, value, state):
    found = gathered(tmp_path, rtx(), {variable: value})
    assert finding(host_checks.checks(found), "variables of this process").state == state


def test_a_prompts_sums_are_nccls_on_two_cards_too(tmp_path):
    told = finding(
        host_checks.checks(gathered(tmp_path, rtx(), {"NCCL_P2P_DISABLE": "1"})), "variables of this process"
    )
    assert "on two cards as on more" in told.cost


def test_processes_that_have_the_same_variables_are_told_once(tmp_path):
    found = gathered(tmp_path, rtx())
    traced = {"NCCL_DEBUG": "TRACE"}
    found.server_environ = {7: traced, 8: {**traced, "HOME": "/"}, 9: {}}
    told = {f.check: f.state for f in host_checks.checks(found) if "server" in f.check}
    assert told == {"variables of server processes 7, 8": WARN, "variables of server process 9": OK}


def report(**told):
    row = {"default": "prefill_graphs", "state": "ON", "reason": "DSV4_SM120_SET", "why": ""}
    return {"pid": 5, "patches": [], "defaults": [row], "settings": {"shadow": None}, "profile": None, **told}


def test_what_a_server_has_set_counts_and_not_what_who_asks_has(tmp_path):
    """`serve` sets it for its child alone."""
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23"}
    off = {"default": "prefill_graphs", "state": "OFF", "reason": NOT_BY_DEFAULT, "why": "slow"}
    ready = {"patch": "mhc", "state": "READY", "reason": "", "review": ""}
    profile = {"problem": None, "outdated": None, "warnings": [], "left_out": {}, "wrong": {}, "path": "/p"}
    profile["winners"] = {"mhc": "ours"}
    found.status |= {"defaults": [off], "patches": [ready]}
    assert said(software_checks.checks(found), "default prefill_graphs")
    left_out = {"patch": "mhc", "state": "OFF", "reason": "DSV4_SM120_SET=mhc=off"}
    found.status["processes"] = [report(patches=[left_out], profile=profile)]
    told = list(software_checks.checks(found))
    assert not said(told, "default prefill_graphs")
    assert finding(told, "profile").found == "mhc: ours"
    assert finding(told, "switched off").found == "mhc by DSV4_SM120_SET=mhc=off"


@pytest.mark.parametrize(
    "strange",
    [
        {"defaults": 3, "settings": [], "profile": "x", "patches": [{"patch": "mhc", "state": "OFF"}]},
        {"defaults": [{"default": 1}], "settings": "1", "profile": {"warnings": []}},
        {"defaults": [None], "profile": {"winners": {"a": 1}, "left_out": {"a": 1}, "wrong": {"a": 1}, "warnings": []}},
    ],
)
def test_reports_of_another_shape_are_not_gone_by(tmp_path, strange):
    found = gathered(tmp_path)
    found.versions = {"sglang": "0.5.23"}
    row = {"patch": "mhc", "state": "READY", "reason": "", "review": ""}
    found.status |= {"processes": [report(**strange)], "patches": [row], "settings": {"shadow": None}}
    told = {one.check: one.state for one in software_checks.checks(found)}
    assert told["profile"] == NOT_RUN and "switched off" not in told and "shadow mode" not in told


@pytest.mark.parametrize(
    ("own", "served", "words"),
    [(None, None, None), ("1", None, None), (None, "1", "SGLang's are kept"), ("1", "ours", "ours are kept")],
)
def test_a_server_in_shadow_mode_is_slow_and_says_why(tmp_path, own, served, words):
    found = gathered(tmp_path)
    found.status |= {"settings": {"shadow": own}, "processes": [report(settings={"shadow": served})]}
    told = said(software_checks.checks(found), "shadow mode")
    assert [(one.state, words in one.found) for one in told] == ([(WARN, True)] if words else [])


@pytest.mark.parametrize(("size", "is_told"), [("256 MiB", True), ("131072 MiB", False), ("N/A", False)])
@pytest.mark.parametrize("pair", [{"reported": False, "moved": True}, {"reported": True, "moved": False}])
def test_a_small_window_is_told_where_peers_fail(tmp_path, size, is_told, pair):
    found = gathered(tmp_path, with_fields(f"<bar1_memory_usage><total>{size}</total></bar1_memory_usage>", 3))
    found.probe = {"links": {}, "peers": [{"from": 0, "to": 1, "gbs": 9.0, **pair}]}
    told = finding(gpu_checks.checks(found), "peer copies").found
    assert ("BAR1 of GPU 1" in told) is is_told and (not is_told or "is 256 of 97887 MiB" in told)
    assert "GPU 2" not in told


VERDICT = {"transport": "peer", "text": "2 cards sum by way of each other's memory", "remedy": ""}


@pytest.mark.parametrize(
    ("used", "processes", "is_serving", "asked"),
    [
        (0, [], False, [True]),
        (97000, [], False, []),  # somebody's, of whom nothing is known: of a container's processes nothing is seen
        (97887 - 616 - 2048, [], False, [True]),
        (97887 - 616 - 1024, [report(found={"all_reduce": VERDICT})], False, [False]),
        (97887 - 616 - 1023, [report(found={"all_reduce": VERDICT})], False, []),
        (97887 - 616 - 2048, [report()], False, [True]),
        (97887 - 616 - 2047, [report()], False, []),
        (97887 - 616 - 2047, [], True, []),
    ],
)
def test_a_running_servers_memory_is_not_taken_for_trials(tmp_path, monkeypatch, used, processes, is_serving, asked):
    found = gathered(tmp_path, rtx(**{"<used>0 MiB": f"{used} MiB"}))
    found.status["processes"], found.is_serving, seen = processes, is_serving, []
    monkeypatch.setattr(command.probe, "run", lambda python, seconds, with_sums: (seen.append(with_sums), None))
    _, problem = command._probe(found)
    assert seen == asked and (problem is None) == bool(asked)
    assert asked or "not tried beside a running server" in problem


@pytest.mark.parametrize("with_sums", [False, True])
def test_the_probe_is_told_to_leave_the_sums_out(monkeypatch, with_sums, capsys):
    done = subprocess.CompletedProcess([], 0, '{"links": {}, "peers": []}\n', "")
    monkeypatch.setattr(probe.subprocess, "run", lambda words, **_: seen.append(words) or done)
    seen = []
    probe.run("python", 1.0, with_sums)
    assert (probe.NO_SUMS in seen[0]) is not with_sums
    monkeypatch.setattr(probe.sys, "argv", seen[0][2:])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    for part in ("links", "peers", "sums"):
        monkeypatch.setattr(probe, part, lambda torch, part=part: part)
    assert probe.main() == 0 and ('"sums"' in capsys.readouterr().out) is with_sums


RIGHT, WRONG = {"problem": None, "us": {"1": 9.0}}, {"problem": "rank 0: wrong sums", "us": {}}


@pytest.mark.parametrize(
    ("changes", "cost", "fix"),
    [
        ({"ways": {"peer": WRONG, "host": RIGHT}}, "several us more, 87", "ACS off"),
        ({"ways": {"peer": RIGHT, "host": RIGHT}}, "later yet", "see PCIe link"),
        ({"ways": {"host": RIGHT}, "is_chosen": True}, "than between peers", "without all_reduce=host"),
        ({"ways": 3}, "several us more, 87", "ACS off"),
        ({"ways": {"peer": {}}}, "several us more, 87", "ACS off"),
    ],
)
def test_why_sums_go_by_host_memory_decides_what_is_to_be_done(tmp_path, changes, cost, fix):
    """As a choice, because peers fail, or because they are right and slower yet."""
    found = gathered(tmp_path, rtx())
    told = {"transport": "host", "text": "2 cards sum by way of host memory", "remedy": "ACS off", **changes}
    found.status["processes"] = [report(found={"all_reduce": told})]
    sums = finding(gpu_checks.checks(found), "sums between the cards")
    assert sums.state == WARN and cost in sums.cost and fix in sums.fix


def test_layers_that_were_left_to_sglang_are_told_once(tmp_path):
    found = gathered(tmp_path)
    note = "wo_a: SGLang's own, as layers' weights lie on the host (--cpu-offload-gb)"
    found.status["processes"] = [report(notes=[note, "mhc: fine"])] * 2
    assert [one.found for one in said(software_checks.checks(found), "left to SGLang")] == [note]


def test_the_words_that_reports_are_searched_for_are_theirs():
    adapters = Path(facts.__file__).parents[2] / "sglang_patches/adapters"
    assert software_checks.HANDED_OVER in (adapters / "handed_over.py").read_text()


def test_what_the_driver_says_of_processes_is_read():
    xml = with_fields(
        f"<processes>{process(9, '/opt/x --key=1', 12, 'C+G')}{process(4, '[Not Found]', 80000)}</processes>", 1
    )
    (gpu,) = nvidia_smi.read(lambda words: xml if "-x" in words else None).gpus
    assert gpu.processes == (nvidia_smi.Process(9, "/opt/x", 12), nvidia_smi.Process(4, "[Not Found]", 80000))


# ---- what is looked at is there in the releases

OF_SPEED = ("disable_overlap_schedule", "disable_radix_cache", "cpu_offload_gb", "offload_group_size", "pp_size")
BEFORE_PHASES, BY_PHASES = {"cuda_graph_max_bs", "cuda_graph_bs"}, {"cuda_graph_config", "cuda_graph_max_bs_decode"}


@every_release()
def test_the_arguments_that_are_looked_at_are_told_by_every_release(version):
    wheel = fetch(version)
    named = "".join(
        content(wheel, member)
        for member in members(wheel)
        if member == "sglang/srt/server_args.py" or "/arg_groups/fields/" in member
    )
    told = {name for name in (*OF_SPEED, *BEFORE_PHASES, *BY_PHASES, "disaggregation_mode") if f"    {name}: " in named}
    is_by_phases = number(version) >= server.GRAPHS_BY_PHASE_SINCE
    assert told == {*OF_SPEED, "disaggregation_mode", *(BY_PHASES if is_by_phases else BEFORE_PHASES)}


def test_the_switches_of_sglangs_are_the_newest_releases():
    wheel = fetch(RELEASES[-1])
    sources = content(wheel, "sglang/srt/environ.py") + content(wheel, "sglang/kernels/kernel_api_logging.py")
    names = [name for name in (*host_checks.VARIABLE_COSTS, *host_checks.MADE_UP) if name.startswith("SGLANG_")]
    assert len(names) > 5 and [name for name in names if name not in sources] == []


@pytest.mark.parametrize(
    ("info", "cached", "asked", "words"),
    [
        ({}, 900_000.0, 10.0, "90% of 100,000 tokens a prompt were cached"),
        ({}, 200_000.0, 10.0, "20% of 100,000 tokens a prompt were cached. Of conversations"),
        ({}, 0.0, 200.0, "0% of 5,000 tokens a prompt were cached"),
        ({}, 2_000_000.0, 1.0, "100% of 1,000,000 tokens a prompt were cached"),
        ({}, 0.0, 0.0, None),
        ({"disable_radix_cache": True}, 0.0, 10.0, None),
    ],
)
def test_what_prompts_found_in_the_prefix_cache_is_told(info, cached, asked, words):
    """Where it is little, of what is long, with where to read on; nothing tells whether they are conversations."""
    metrics = {"token_usage": 0.3, "prompt_tokens_total": 1_000_000.0, "cached_tokens_total": cached}
    answers = server.Answers(PLANNED | info, metrics | {"num_requests_total": asked}, model_type="deepseek_v4")
    (told,) = [f for f in server.checks(answers) if f.check == "cached prompts"] or (None,)
    assert (told and told.found.partition(" nine tenths")[0]) == words
    assert told is None or told.state == OK


@pytest.mark.parametrize(
    ("evicted", "more", "words"),
    [
        (700_000.0, {}, "600,000 tokens dropped 700,000 for others"),
        (700_000.0, {}, "--host-cache"),
        (700_000.0, {"hicache_host_total_tokens": 900_000.0}, "(and 900,000 in the host's memory)"),
        (700_000.0, {"hicache_host_total_tokens": 900_000.0}, "a larger --hicache-ratio"),
        (300_000.0, {}, "what parts their prompts"),
        (None, {}, "what parts their prompts"),
    ],
)
def test_where_about_as_much_was_dropped_as_was_read_it_may_be_for_want_of_room(evicted, more, words):
    """Of a million tokens 800,000 were read anew, and the KV cache dropped about as many: for want of room, or, as a
    full one does of any prompts, because they have nothing in common. Both are told."""
    metrics = {"token_usage": 0.3, "prompt_tokens_total": 1_000_000.0, "cached_tokens_total": 200_000.0, **more}
    metrics |= {"num_requests_total": 10.0} | ({} if evicted is None else {"evicted_tokens_total": evicted})
    answers = server.Answers(PLANNED | {"max_total_num_tokens": 600_000}, metrics, model_type="deepseek_v4")
    (told,) = [f for f in server.checks(answers) if f.check == "cached prompts"]
    assert words in told.found and told.state == OK
    assert ("dropped" in told.found) == (evicted == 700_000) and "what parts their prompts" in told.found
    assert ("--host-cache" in told.found) != bool(more) or "parts" in words
