"""shortage_stage.py without a GPU: servers that look for a full disk and for who took the card's memory, the real
control flow. What a server may do wrong there must be a bar that is not met."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import collect, made_sglang, shortage_rows, shortage_stage
from tests.e2e.test_serving_stage import free_ports
from tests.e2e.test_start_stage import HARNESS

HERE = Path(__file__).resolve().parent

LAUNCH_SERVER = (
    made_sglang.ANSWERING
    + """
import json, os, subprocess, sys, threading, time
from http.server import ThreadingHTTPServer
from pathlib import Path
faults, card = os.environ.get("FAKE_FAULTS", "").split(), os.environ["CUDA_VISIBLE_DEVICES"]
taken = Path(os.environ["FAKE_FOLDER"]) / f"ate_{card}"
def say(text):
    if "silent" not in faults:
        print(text, flush=True)
reports, kernels = os.environ.get("DSV4_SM120_REPORT"), os.environ["TRITON_CACHE_DIR"]
if reports:
    try:
        Path(reports, "1.json").write_text("x" * 5000)
    except OSError as error:
        say(f"deepseek_v4_sm120: no reports in DSV4_SM120_REPORT={reports}: {error.strerror}; all else goes on")
try:
    Path(kernels).mkdir(parents=True, exist_ok=True)
    Path(kernels, "kernel").write_text("x" * 5000)
except OSError as error:
    say(f"OSError: {error}")
    sys.exit(1)
if taken.exists() and int(taken.read_text()) < 5000:
    say("torch.OutOfMemoryError: CUDA out of memory")
    if "stays" in faults:
        nowhere = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, **nowhere)
    sys.exit(1)
class Handler(Answering):
    def answer_to(self, asked):
        length, new = len(asked["input_ids"]), asked["sampling_params"]["max_new_tokens"]
        short = length >= 16000 and taken.exists()
        if short and "plenty" not in faults:
            if "hangs" in faults:
                time.sleep(600)
            say("torch.OutOfMemoryError: CUDA out of memory")
            os._exit(1)
        token = 2 if "other_bits" in faults and reports or short and length == 16001 else 1
        steps = [[-1.0, token, None]] * new
        meta = {"output_token_logprobs": steps, "prompt_tokens": length, "finish_reason": {"type": "length"}}
        self.answer({"output_ids": [token] * new, "meta_info": meta})
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
)
EATER = """
import os, sys
from pathlib import Path
taken = Path(os.environ["FAKE_FOLDER"]) / f"ate_{os.environ['CUDA_VISIBLE_DEVICES']}"
taken.write_text(sys.argv[1])
print("ate", 1000, flush=True)
sys.stdin.read()
taken.unlink()
"""


@pytest.fixture
def stage(tmp_path, stage_python):
    """stage(faults) -> (CompletedProcess, {(case, metric): row}, the stage file)."""
    files = {"tools/run_engine.py": HARNESS, "build/sitecustomize.py": ""}
    files |= made_sglang.site(LAUNCH_SERVER) | {"eater.py": EATER}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(faults: str = "", *more: str):
        line = [*stage_python()[0], str(HERE / "shortage_stage.py"), "--harness", str(tmp_path / "tools")]
        line += ["--patch", str(tmp_path / "build"), "--models", str(tmp_path / "m"), "--work", str(tmp_path / "work")]
        line += ["--out", str(tmp_path / "out"), "--port", str(free_ports(1)[0] // 4), "--rest-s", "0.2"]
        line += ["--ask-s", "2", "--given-up-s", "1", *more, "--eater", sys.executable, str(tmp_path / "eater.py")]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "E2E_"))}
        kept |= {"PYTHONPATH": str(tmp_path / "site"), "FAKE_FAULTS": faults, "FAKE_FOLDER": str(tmp_path)}
        kept |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
        done = subprocess.run(line, env=kept, capture_output=True, text=True, timeout=300)
        found = json.loads((tmp_path / "out/stage_shortage.json").read_text())
        rows = collect.collect([found], None)["rows"]
        return done, {(r["case"].split(", ")[1], r["metric"]): r for r in rows}, found

    yield run
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FAKE_FOLDER={tmp_path}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def unmet(rows):
    return {key for key, row in rows.items() if row["met"] is False}


def test_a_server_that_says_what_ran_out(stage, tmp_path):
    done, rows, found = stage()
    assert done.returncode == 0 and unmet(rows) == set(), done.stdout + done.stderr
    assert set(found["shortage"]["cases"]) == set(shortage_stage.CASES) and not found["shortage"]["broke"]
    cases = found["shortage"]["cases"]
    assert cases["full_reports"]["told"] == 1 and cases["full_cache"]["started"] is False
    assert cases["oom_under_load"]["refused"] == shortage_stage.LONG_AT_ONCE and cases["oom_under_load"]["ended"]
    assert {case: rows[case, "answers"]["value"] for case in cases if case != "full_cache"} == {
        **{"full_reports": 4, "second_engine": 8, "oom_at_start": 4, "oom_under_load": 4}
    }
    assert not (tmp_path / "work/reports").is_mount() and not (tmp_path / "work/kernels").is_mount()
    assert {row["issue"] for row in rows.values()} == {23}


def test_on_one_card_the_second_part_begins_when_the_first_has_ended(stage):
    """The eater leaves nothing for a server that is still there: the plain one would say so."""
    done, rows, found = stage("", "--one-card")
    assert done.returncode == 0 and unmet(rows) == set(), done.stdout + done.stderr
    assert found["command"].endswith("shortage_stage.py --one-card") and not found["shortage"]["broke"]
    assert found["shortage"]["cases"]["oom_at_start"]["started"] is False
    assert {rows[case, "answers"]["value"] for case in ("second_engine", "oom_under_load")} == {8, 4}


def test_what_a_server_does_wrong_is_a_bar_that_is_not_met(stage):
    done, rows, _ = stage("silent other_bits stays hangs")
    said = {(case, "logs that lack what ran out") for case in ("full_reports", "full_cache", "oom_at_start")}
    bits = {(case, "answers that differ") for case in ("full_reports", "second_engine")}
    stays = {("oom_at_start", "processes left"), ("all ended", "processes left")}
    stays.add(("oom_at_start", "seconds until all its processes have ended"))
    hangs = {("oom_under_load", "long prompts without an end")}
    assert done.returncode == 1 and unmet(rows) == said | bits | stays | hangs, done.stdout + done.stderr


def test_where_nothing_runs_short_nothing_is_shown(stage):
    """Memory that was there all along, and an answer that was another meanwhile."""
    done, rows, found = stage("plenty")
    case = "oom_under_load"
    assert found["shortage"]["cases"][case]["answered"] == shortage_stage.LONG_AT_ONCE
    other = (case, "long prompts answered otherwise than with all of the memory")
    assert unmet(rows) == {(case, "no shortage was seen"), other} and rows[other]["value"] == 1, done.stdout


WELL = {"seconds_to_the_end": 60.0, "processes_left": [], "is_said": True, "hung": 0, "no_shortage": 0, "other_long": 0}
WELL |= {"answers": 4, "differ": 0}


@pytest.mark.parametrize(
    ("seen", "missed"),
    [
        ({}, set()),
        ({"problem": "RuntimeError: it broke"}, {"broke"}),
        ({"seconds_to_the_end": 60.1}, {"seconds until all its processes have ended"}),
        ({"processes_left": ["/bin/sleep 600"]}, {"processes left"}),
        ({"is_said": False}, {"logs that lack what ran out"}),
        ({"hung": 1}, {"long prompts without an end"}),
        ({"no_shortage": 1}, {"no shortage was seen"}),
        ({"other_long": 1}, {"long prompts answered otherwise than with all of the memory"}),
        ({"differ": 1}, {"answers that differ"}),
        ({"answers": 0}, {"answers that differ"}),
    ],
)
def test_each_bar_is_missed_by_one(seen, missed):
    made = {"cases": {"oom_at_start": WELL | seen}, "broke": {}, "processes": []}
    rows = shortage_rows.rows(collect.row, [made])
    assert {row["metric"] for row in rows if row["met"] is False} == missed
    assert all(row["case"] == "shortage, oom_at_start" for row in rows[:-1])


def test_a_part_that_broke_is_missed_and_so_are_answers_that_nobody_gave():
    made = {"cases": {"oom_at_start": {"started": True}, "full_cache": {"started": False}}, "processes": ["sleep"]}
    made |= {"broke": {"on_first_card": {"problem": "it broke"}}}
    missed = {(r["case"], r["metric"]) for r in shortage_rows.rows(collect.row, [made]) if r["met"] is False}
    assert missed == {
        ("shortage, on_first_card", "broke"),
        ("shortage, oom_at_start", "answers that differ"),
        ("shortage, all ended", "processes left"),
    }
