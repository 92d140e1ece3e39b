"""Who owns a cache slot: random load on 0.5.23's own scheduler, with what each slot must hold beside it."""

import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SEEDS = "2"
SEEN = ("Wrong", "AssertionError")  # by us, by SGLang: what else ends a run is a program that is wrong itself


def test_every_slot_holds_what_its_readers_take_it_for():
    """Prompts in chunks, prefixes, drafts, ends, aborts, retraction, pauses, flushes; and each fault that is put into
    0.5.23, or into what is known of a pass, is seen, as is the one that `preempted_requests` mends."""
    line = [sys.executable, "-m", "tests.patching.slots_random_load", "0.5.23", SEEDS]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = json.loads(done.stdout)
    assert {name: found["wrong"] for name, found in loaded["cases"].items() if found["wrong"]} == {}
    for name, found in loaded["cases"].items():
        assert found["seen"]["answered"] > 20 and found["seen"]["aborted"] > 0, name
        assert found["seen"].get("cached", 0) > 0 or name in ("no prefix cache", "priorities"), name
    assert sum(found["seen"].get("retracted", 0) for found in loaded["cases"].values()) > 0
    seen = {name: (wrong or "").partition(": ")[2].partition(" ")[0] for name, wrong in loaded["wrong ones"].items()}
    assert {name: kind for name, kind in seen.items() if kind not in SEEN} == {}
    assert len(loaded["wrong ones"]) == 5
