"""doctor where servers really run: lost cards, cards that are not seen, Kubernetes, another user's folders."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.commands.doctor import facts, gpu_checks, gpu_health, nvidia_smi, probe
from deepseek_v4_sm120.commands.doctor.finding import OK, WARN
from tests.doctor.test_health import FELL
from tests.doctor.test_machine import CARD, finding, gathered, rtx, smi

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"
LOST = "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  Reboot the system"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """says(bytes, status): an nvidia-smi that says so."""

    def say(text, status):
        (tmp_path / "said").write_bytes(text)
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\ncat '{tmp_path / 'said'}'\nexit {status}\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return say


@pytest.mark.parametrize("words", [MISMATCH, LOST])
def test_why_the_driver_does_not_answer_is_told_in_its_own_words(says, words):
    says(words.encode(), 18)
    told = nvidia_smi.read(facts.run_command)
    assert told.gpus == () and " ".join(words.split()) in told.problem


def test_answers_that_are_no_text_stop_nothing(says):
    says(b"[0.0] usb 1-1: Product: \xff\xfe\n", 0)
    assert "\ufffd" in facts.run_command(["nvidia-smi"])


def test_commands_without_a_word_say_nothing(says):
    says(b"", 1)
    assert facts.run_command(["nvidia-smi"]) is None and facts.run_command(["/nowhere"]) is None


def test_a_card_that_nvidia_smi_cannot_list_any_more_is_told_by_the_kernels_log(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    found = facts.gather(tmp_path, {}, lambda command: FELL if command == ["dmesg"] else LOST)
    (only,) = gpu_health.checks(found)
    assert only.state == WARN and "fell off the bus" in only.found and "the card at 0000:00:06: Xid 79" in only.found


def fake_torch(*uuids):
    """Cards that torch numbers in this order; a copy between two arrives."""
    properties = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    return SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: len(uuids), get_device_properties=properties.__getitem__)
    )


def test_cards_have_the_numbers_of_nvidia_smi(monkeypatch):
    """CUDA_VISIBLE_DEVICES=3,1 of four, and a slice that nvidia-smi does not name."""
    gpu = nvidia_smi.read(smi(rtx(1))).gpus[0]
    four = [replace(gpu, index=i, uuid=f"GPU-{i}a5c") for i in range(4)]
    torch = fake_torch("3a5c", "1a5c", "another")
    assert probe.numbers(torch, four) == [3, 1, 2]
    monkeypatch.setattr(probe, "nvidia_smi", SimpleNamespace(read=lambda run: SimpleNamespace(gpus=four)))
    monkeypatch.setattr(probe, "_pair", lambda torch, i, j: {"moved": True})
    pairs = probe.peers(fake_torch("3a5c", "1a5c"))
    assert [(pair["from"], pair["to"]) for pair in pairs] == [(3, 1), (1, 3)]


def test_links_of_cards_that_torch_does_not_see_are_not_under_load(monkeypatch):
    gpu = nvidia_smi.read(smi(rtx(1))).gpus[0]
    asleep = replace(gpu, index=0, uuid="GPU-0a5c", link_generation=(1, 5))
    awake = replace(gpu, index=1, uuid="GPU-1a5c", link_generation=(5, 5))
    torch = fake_torch("1a5c")
    torch.cuda.synchronize = lambda card: None
    torch.empty = lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: None)
    torch.uint8 = None
    monkeypatch.setattr(probe, "LOAD_SECONDS", 0.0)
    asked = SimpleNamespace(poll=lambda: 0, communicate=lambda: [""])
    monkeypatch.setattr(probe.subprocess, "Popen", lambda *_, **__: asked)
    monkeypatch.setattr(probe.nvidia_smi, "read", lambda run: SimpleNamespace(gpus=(asleep, awake)))
    assert probe.links(torch) == {"1": [5, 16]}


def test_a_card_for_the_monitor_needs_no_code_of_ours(tmp_path):
    machine = rtx().replace(CARD, "NVIDIA T400", 1)

    def run(command):
        return "7.5\n12.0\n" if "--query-gpu=compute_cap" in command else smi(machine)(command)

    found = gathered(tmp_path, machine)
    found.smi = nvidia_smi.read(run)
    assert finding(gpu_checks.checks(found), "driver").state == OK


def test_a_container_of_kubernetes_is_one(tmp_path):
    """containerd leaves no /.dockerenv."""
    assert facts.is_container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert not facts.is_container(tmp_path, {})
    found = gathered(tmp_path, environ={"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert found.is_container and not any(cache.survives for cache in found.caches)


def test_folders_that_this_user_may_not_look_into_are_passed_over(tmp_path, monkeypatch):
    """PYTHONPATH and CUDA_HOME with a folder of root's."""
    true_stat = os.stat

    def stat(path, *words, **more):
        if not isinstance(path, int) and str(path).startswith("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return true_stat(path, *words, **more)

    monkeypatch.setattr(os, "stat", stat)
    assert facts.sitecustomize_files(["/closed"], None) == []
    assert facts._nvcc({"CUDA_HOME": "/closed"}) in (None, "/usr/local/cuda/bin/nvcc")


def test_slow_copies_beside_a_server_may_be_its_own(tmp_path):
    found = gathered(tmp_path, rtx())
    found.probe = {"links": {}, "peers": [{"from": 0, "to": 1, "reported": True, "moved": True, "gbs": 9.0}]}
    assert "server" not in str(finding(gpu_checks.checks(found), "peer copies"))
    found.is_serving = True
    peers = finding(gpu_checks.checks(found), "peer copies")
    assert "9.0 GB/s, beside a running server" in peers.found and "while the server is idle" in peers.fix


@pytest.mark.parametrize(
    ("seconds", "asked"), [((0.0625, 0.03125, 0.0625, 0.0625, 0.0625), 5), ((0.25, 0.125, 0.25), 3), ((4.0,), 1)]
)
def test_a_rate_is_the_fastest_of_some(seconds, asked, monkeypatch):
    """A slow link, too, is told within the probe's time."""
    calls, now = [], [0.0]

    def call():
        now[0] += seconds[len(calls)]
        calls.append(1)

    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    assert probe.fastest_s(call) == min(seconds) and len(calls) == asked
