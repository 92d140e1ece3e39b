"""doctor's checks of the cards' health, over a driver's true answer (an H100's) and what it writes to kernel logs."""

from pathlib import Path

import pytest

from deepseek_v4_sm120.commands.doctor import facts, gpu_health, nvidia_smi
from deepseek_v4_sm120.commands.doctor.finding import FAIL, NOT_RUN, OK, WARN

ANSWER = (Path(__file__).resolve().parents[1] / "data/nvidia_smi_h100.xml").read_text()
XID = "[{when}] NVRM: Xid (PCI:0000:{place}): {code}, pid=6211, name=python3, {words}\n"
FELL = XID.format(when="388.565288", place="00:06", code=79, words="GPU has fallen off the bus.")
SILENT = XID.format(when="436.566381", place="00:06", code=119, words="Timeout after 45s of waiting for RPC response")
FAULT = XID.format(when="514.563388", place="00:06", code=31, words="Ch 00000008, intr 00000000. MMU Fault")
ECHO = XID.format(when="515.0", place="00:06", code=154, words="GPU recovery action changed from 0x0 (None) to 0x2")


def health(tmp_path, xml=ANSWER, log=""):
    """check -> finding; those of one name in a list."""
    (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)

    def run(command):
        return log if command == ["dmesg"] else xml if "-x" in command else None

    found: dict[str, list] = {}
    for one in gpu_health.checks(facts.gather(tmp_path, {}, run)):
        found.setdefault(one.check, []).append(one)
    return found


def test_a_drivers_true_answer_is_read(tmp_path):
    (gpu,) = nvidia_smi.read(lambda command: ANSWER).gpus
    assert (gpu.bus_id, gpu.recovery, gpu.memory_faults, gpu.replays) == ("0000:00:06.0", None, (), 1)
    found = health(tmp_path)
    assert [one.state for named in found.values() for one in named] == [OK, OK]
    assert found["health of GPU 0"][0].found == "no memory errors, 1 PCIe replays"


@pytest.mark.parametrize(
    ("field", "now", "state", "words"),
    [
        ("gpu_recovery_action", "Reset", FAIL, "the driver asks for: Reset"),
        ("gpu_recovery_action", "Drain and Reset", FAIL, "Drain and Reset"),
        ("dram_uncorrectable", "2", WARN, "2 memory errors that were not corrected"),
        ("sram_uncorrectable_parity", "1", WARN, "1 memory errors that were not corrected"),
        ("remapped_row_pending", "Yes", WARN, "rows wait for a reset"),
        ("remapped_row_failure", "Yes", WARN, "rows could not be replaced"),
        ("unrepairable_memory", "Yes", WARN, "memory that cannot be repaired"),
        ("replay_counter", "101", WARN, "101 PCIe replays"),
        ("replay_counter", "100", OK, "100 PCIe replays"),
        ("replay_counter", "N/A", NOT_RUN, "does not tell"),
    ],
)
def test_what_ails_a_card(tmp_path, field, now, state, words):
    before, tag, rest = ANSWER.partition(f"<{field}>")
    assert tag
    xml = before + tag + now + rest[rest.index("<") :]  # of memory errors the first, since the driver was loaded
    (one,) = health(tmp_path, xml)["health of GPU 0"]
    assert one.state == state and words in one.found and (state in (OK, NOT_RUN) or (one.cost and one.fix))


def test_memory_errors_of_another_life_of_the_driver_are_no_finding(tmp_path):
    volatile, aggregate = ANSWER.split("<aggregate>")
    xml = f"{volatile}<aggregate>{aggregate.replace('<dram_uncorrectable>0', '<dram_uncorrectable>3')}"
    assert health(tmp_path, xml)["health of GPU 0"][0].state == OK


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (FELL * 3, ["the card fell off the bus since this log begins (GPU 0: Xid 79)"]),
        (SILENT + ECHO, ["firmware (GSP) does not answer since this log begins (GPU 0: Xid 119)"]),
        (FAULT + FELL, ["fell off the bus", "a process's kernel failed"]),
        (FELL.replace(" 79,", " 48,"), ["memory errors"]),
        (FELL.replace(" 79,", " 500,"), ["GPU 0: Xid 500"]),
    ],
)
def test_the_drivers_complaints_in_the_kernels_log(tmp_path, log, words):
    found = health(tmp_path, log="[0.0] Linux version 6.18\n" + log)["kernel log"]
    assert [one.state for one in found] == [WARN] * len(words)
    assert all(word in one.found and one.cost and one.fix for word, one in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("log", "state"), [(None, NOT_RUN), ("", OK), (FELL.replace("00:06", "81:00"), OK), (ECHO, OK)]
)
def test_a_log_that_says_nothing_of_these_cards(tmp_path, log, state):
    (one,) = health(tmp_path, log=log)["kernel log"]
    assert one.state == state


def test_without_cards_nothing_is_said(tmp_path):
    assert health(tmp_path, "<nvidia_smi_log/>") == {}
