"""EAGLE's drafts: a block that computes rightly of what is not its own, or whose guesses are not its own, is told."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import made  # noqa: E402
import made_chain  # noqa: E402

from deepseek_v4_sm120.commands.layers import command, verdict  # noqa: E402
from deepseek_v4_sm120.commands.layers import judge as judging  # noqa: E402
from deepseek_v4_sm120.commands.layers.chain import Chain  # noqa: E402
from deepseek_v4_sm120.commands.layers.checkpoint import Checkpoint  # noqa: E402
from deepseek_v4_sm120.commands.layers.judge import Judge  # noqa: E402
from deepseek_v4_sm120.commands.layers.record import Segment, Sent  # noqa: E402
from deepseek_v4_sm120.commands.layers.tokens import DRAFTED  # noqa: E402
from deepseek_v4_sm120.commands.layers.verdict import BEGUN, EMBEDDING, GIVEN  # noqa: E402
from deepseek_v4_sm120.reference import model  # noqa: E402

torch.set_num_threads(1)
MODES = [mode for mode in verdict.DRAFTED if mode.startswith("draft")]


@pytest.fixture(autouse=True)
def few_faults(monkeypatch):
    """Each costs a computation of the model; others ask for them."""
    for name in ("ATTENTION", "EXPERTS", "BIASED", "HASHED", "MIXING"):
        monkeypatch.setattr(judging, name, {})
    monkeypatch.setattr(judging, "OF_RATIO", {ratio: {} for ratio in (0, 4, 128)})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "made"
    made.layers_weights.write(folder, made.CONFIG, "cpu")
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def right(checkpoint):
    return made_chain.Engine(checkpoint).answers()


def taken(checkpoint, passes, request, tail=2):
    sent, judge = Sent.of([request]), Judge(made.CONFIG, checkpoint, tail=tail)
    for one in passes:
        judge.take(one, sent.segments(one))
    assert not sent.missing()
    return judge


def judged(checkpoint, passes, request):
    judge = taken(checkpoint, passes, request)
    groups = judge.finish()
    return groups, judge.tokens


def verdict_of(groups, tokens, **options):
    return verdict.of(groups, 3, verdict.DRAFTED, tokens, **options)


def test_a_right_engine_is_right(checkpoint, right):
    groups, tokens = judged(checkpoint, *right)
    found = verdict_of(groups, tokens)
    assert (found.status, found.faults, found.unjudged) == (verdict.RIGHT, [], [])
    given = {g["mode"]: g for g in groups if g["what"] == GIVEN}
    assert {mode: g["rows"] for mode, g in given.items()} == dict(zip(MODES, (4, 8, 16), strict=True))
    assert all(0 < g["error"] < g["rounding"] for g in given.values())
    rows = {(one["what"], one["mode"]): one["rows"] for one in tokens}
    assert [rows[DRAFTED, mode] for mode in MODES] == [1, 8, 3]
    assert [rows[BEGUN, mode] for mode in MODES] == [len(made_chain.PROMPT), 8, 4]
    assert {fault for g in groups if g["what"] == EMBEDDING for fault in verdict.told(g)} == set(judging.OF_DRAFT)
    for lacks in MODES:  # what nobody saw is not right
        without = [g for g in groups if (g["what"], g["mode"]) != (GIVEN, lacks)]
        assert verdict_of(without, tokens).status == verdict.UNJUDGED
        without = [one for one in tokens if (one["what"], one["mode"]) != (DRAFTED, lacks)]
        assert verdict_of(groups, without).status == verdict.UNJUDGED
        assert verdict_of(groups, without, drawn=True).status == verdict.RIGHT


def test_what_only_costs_acceptance_is_told(checkpoint):
    """All at once, each by its own words: a block that computes rightly of another row's streams, or of none, and of
    others' tokens, and whose guesses are not its own."""

    def roll(rows):
        return rows.roll(1, 0)

    streams = {"EXTEND": roll, "DRAFT_EXTEND_V2": roll, "DECODE": torch.zeros_like}
    given = {"EXTEND": roll, "DRAFT_EXTEND_V2": torch.zeros_like, "DECODE": lambda token: token ^ 1}
    engine = made_chain.Engine(checkpoint, streams, given, guesses=5)
    found = verdict_of(*judged(checkpoint, *engine.answers()))
    words = ("4 of 4", "8 of 8", "16 of 16")
    said = [f"{GIVEN}, {mode}: {rows} rows are more than half off" for mode, rows in zip(MODES, words, strict=True)]
    words = ("24 of 24", "8 of 8", "4 of 4")
    said += [f"{BEGUN}, {mode}: {rows} are others" for mode, rows in zip(MODES, words, strict=True)]
    said += [f"{DRAFTED}, {mode}: " for mode in MODES]
    assert [one for one in said if not any(text.startswith(one) for text in found.faults)] == [], found.faults
    assert not any(text.startswith(("attention", "experts", EMBEDDING)) for text in found.faults)


def test_how_a_draft_begins_is_told_by_its_name(checkpoint, right):
    weights, draft = model.Weights(checkpoint, "mtp.0."), right[0][1]
    for fault, rules in judging.OF_DRAFT.items():
        judge, rows = taken(checkpoint, right[0], right[1], tail=None), len(draft["tokens"])
        judge.passes["draft"] = judge.passes["draft"][:1]
        before = judge.begun("draft", judge.passes["draft"], draft["tokens"])
        hidden = draft["hidden"].view(rows, 4, -1)
        at = judge.config, weights, checkpoint["embed.weight"][draft["tokens"]], hidden
        attn = judge.config, weights, "attn", "attn_norm"
        seen = model.entering(*attn, model.draft_streams(*at, draft=rules)).bfloat16()
        mode = judge.passes["draft"][0].mode
        judge.boundary(before, [mode] * rows, seen, lambda streams, attn=attn: model.entering(*attn, streams))
        one = judge.groups[EMBEDDING, mode, 0].summary()
        group = {"what": EMBEDDING, "mode": mode, **one, "layers": {0: one}}
        assert verdict.told(group)[fault] == pytest.approx(1, abs=0.1)
        assert any(f"{EMBEDDING}, {mode}: {fault}, " in text for text in verdict.of([group], 0, ()).faults)


def test_drafts_that_are_accepted(checkpoint, right):
    """All rows of the block over what was verified have the answer's tokens, and the right streams."""
    whole = right[1]["input_ids"] + right[1]["output_ids"]
    passes, request = made_chain.Engine(checkpoint, right=whole).answers()
    assert request == right[1] and len(passes) < len(right[0])
    groups, tokens = judged(checkpoint, passes, request)
    (begun,) = [one for one in tokens if (one["what"], one["mode"]) == (BEGUN, "draft, draft_extend_v2")]
    assert begun["rows"] >= made_chain.STEPS and not any(one["off"] for one in tokens if one["what"] == BEGUN)
    found = verdict_of(groups, tokens)
    assert found.faults and all(text.startswith(DRAFTED) for text in found.faults)  # guesses that it did not make
    assert verdict_of(groups, tokens, drawn=True).faults == []


def test_rows_that_were_refused_are_no_source():
    """Nor is one in whose place a row is that is not judged."""

    def take(kind, mode, start, rows, picks):
        made_ = SimpleNamespace(mode=f"{kind}, {mode.lower()}", picks=[torch.tensor(picks)], sources=[])
        made_.following, made_.tokens = [None] * len(picks), torch.arange(rows)[picks]
        segment = Segment(0, start, slice(0, rows), None)
        chain.take(kind, mode, made_, [segment], torch.arange(rows))
        return made_

    chain = Chain()
    take("target", "TARGET_VERIFY", 10, 4, [0, 1, 2, 3])
    behind = take("draft", "DRAFT_EXTEND_V2", 10, 4, [0, 1, 2, 3])
    assert [place[1] for place in behind.sources] == [0, 1, 2, 3]
    newest = take("target", "TARGET_VERIFY", 11, 4, [2, 3])
    assert behind.following == [1, None, None, None]  # row 1 is in a draft's place, but none behind a draft
    again = take("draft", "DRAFT_EXTEND_V2", 11, 4, [0, 1, 2, 3])
    assert again.sources == [None, None, (newest, 0), (newest, 1)]


def test_drafts_that_are_drawn_are_not_asked(checkpoint):
    for flag in ("speculative_use_rejection_sampling", "speculative_token_map"):
        facts = {"speculative_algorithm": "EAGLE", flag: "x"}
        asked = SimpleNamespace(without_drafts=False)
        assert command.drawn(facts) and not command.drawn(facts | {flag: None})
        assert "not asked" in command.notes_of(facts, SimpleNamespace(others=0), asked)[0]
        assert command.notes_of(facts | {flag: None}, SimpleNamespace(others=0), asked) == []
