"""The stage `accepted` of run_stage.py: drafts that are another run's text, or are not (drafts_plugin), so that none,
half and all of them are accepted; what their verifications must come to; and answers that end by a token which
min_tokens forbids for long, so that an end shows whether all tokens of a step are counted."""

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
ENDED = "ended"  # a text run's part: answers that were asked to end
TOKENIZER = ("--set", "skip_tokenizer_init=false")  # of every text run: without one SGLang refuses min_tokens
# They end by a token that is new there, behind EARLIEST others, and is forbidden for LESS fewer: more than steps under
# way bring. Where a step counts as one token, it is still forbidden when its turn comes; whether it was forbidden
# before, this does not show.
EARLIEST, LESS = 48, 16
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


def end_of(text):
    """Where an answer of that text is to end; None: no token of it is new there."""
    return next((i for i in range(EARLIEST, len(text)) if text[i] not in text[:i]), None)


def ending(text):
    """Sampling parameters by which it does; None: no token can end it."""
    end = end_of(text)
    return None if end is None else {"ignore_eos": False, "stop_token_ids": [text[end]], "min_new_tokens": end - LESS}


def ended(answers, plain):
    """Answers that were asked to end, against the plain run's text up to there."""
    firsts = []
    for n, one in answers.items():
        text = plain[n]["ids"]
        end = end_of(text)
        if end is None or one["finish"] != "stop" or one["ids"] not in (text[:end], text[: end + 1]):
            firsts.append(first_difference(one["ids"], text))
    counts = dict.fromkeys(("at_once", ENDED, "answers"), len(answers))
    return counts | {"differ": len(firsts) if answers else None, "first": min(firsts, default=None)}


def first_difference(one, other):
    """The index of the first token that differs, of answers that do."""
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
