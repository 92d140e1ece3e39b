"""The stage `accepted` of run_stage.py: drafts that are another run's text, or are not (drafts_plugin), so that none,
half and all of them are accepted; and what their verifications must come to."""

import os
import sys
from pathlib import Path

PLUGIN = Path(__file__).resolve().parent / "drafts_plugin"
sys.path.insert(0, str(PLUGIN))
import forced_drafts  # noqa: E402

PLAIN = "accepted_plain"  # whose text is drafted
DRAFTERS = {"eagle314": ("EAGLE", 3), "dspark3": ("DSPARK", 3), "eagle516": ("EAGLE", 5)}  # name -> drafts of a step
FORCED = {
    f"accepted_{name}_{kind}": (name, kind, *drafter)
    for name, drafter in DRAFTERS.items()
    for kind in forced_drafts.KINDS
}
TEXTS = [(f"{what}, {drafts} drafts, {kind} right", run, PLAIN) for run, (_, kind, what, drafts) in FORCED.items()]


def cases(make, options, environment, drafters):
    """The plain run, then those that speculate: every batch to the token, as the environment gives sums one order."""
    forced = [
        make(run, options + drafters[name], environment=environment | {"E2E_DRAFTS": kind})
        for run, (name, kind, *_) in FORCED.items()
    ]
    return [make(PLAIN, options, environment=environment), *forced]


def text(work):
    return work / f"{PLAIN}_text.json"


def environment(case, work):
    """What the plugin needs of a case that forces drafts."""
    if case.name not in FORCED:
        return {}
    paths = filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths), "E2E_TEXT": str(text(work))}


def check(names, work):
    """SystemExit where nothing runs, or ran, that says what is to be drafted."""
    if set(names) & set(FORCED) and PLAIN not in names and not text(work).exists():
        raise SystemExit(f"run_stage: drafts are the text of {PLAIN}: run it with them, or before in this --work")


def acceptance(run, answers):
    """Of drafts that were forced: tokens a verification, and by how many verifications an answer is at most off what
    these drafts must take. SGLang counts the one that is under way when an answer ends, or does not."""
    if run not in FORCED or not all(answer["verified"] for answer in answers):
        return {}
    _, kind, _, drafts = FORCED[run]
    tokens = sum(len(answer["ids"]) - 1 for answer in answers)
    off = [abs(a["verified"] - forced_drafts.verifications(kind, len(a["ids"]), drafts)) for a in answers]
    return {"tokens_a_verification": tokens / sum(a["verified"] for a in answers), "off": max(off)}
