"""DSPARK's drafts: an engine that computes them has no share of a fault, one that has a fault is told by its name."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import made_block  # noqa: E402

from deepseek_v4_sm120.commands.layers import judge as judging  # noqa: E402
from deepseek_v4_sm120.commands.layers import tokens as of_tokens  # noqa: E402
from deepseek_v4_sm120.commands.layers import verdict  # noqa: E402
from deepseek_v4_sm120.commands.layers.judge import OF_BLOCK, Judge  # noqa: E402
from deepseek_v4_sm120.commands.layers.record import Sent, Unjudged  # noqa: E402
from deepseek_v4_sm120.reference.draft_block import BlockRules  # noqa: E402
from deepseek_v4_sm120.reference.model import Rules  # noqa: E402

torch.set_num_threads(1)
SHORT = made_block.PROMPT[:20]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made_block.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def right(checkpoint):
    return made_block.Engine(checkpoint).answers(SHORT, new=5)


def only_blocks(judge):
    """The target is judged elsewhere."""
    judge.passes["target"] = []
    return judge.finish()


def taken(checkpoint, passes, request, **options):
    sent, judge = Sent.of([request]), Judge(made_block.CONFIG, checkpoint, **options)
    for one in passes:
        judge.take(one, sent.segments(one))
    return judge


def test_a_right_engine_is_right(checkpoint, right, monkeypatch):
    monkeypatch.setattr(judging, "ATTENTION", {"no sink": Rules(sink=False)})  # of the target others ask for more
    monkeypatch.setattr(judging, "OF_RATIO", {ratio: {} for ratio in (0, 4, 128)})
    judge = taken(checkpoint, *right)
    groups = judge.finish()
    found = verdict.of(groups, 3, verdict.BLOCKS, judge.tokens)
    assert (found.status, found.faults, found.unjudged) == (verdict.RIGHT, [], [])
    keys = {(g["what"], g["mode"]) for g in groups}
    assert {("attention, ratio 0", "block, target_verify"), (verdict.CONTEXT, "target, extend")} <= keys
    by_mode = {one["mode"]: one for one in judge.tokens if one["what"] not in verdict.EXACT}
    assert by_mode["block, target_verify"]["rows"] >= made_block.DRAFTS and by_mode["target, extend"]["rows"] == 1
    told = {fault for g in groups if g["mode"].startswith("block") for fault in verdict.told(g)}
    assert len(told & set(OF_BLOCK)) >= 4
    lacks = [g for g in groups if not g["mode"].startswith("block")]
    assert verdict.of(lacks, 3, verdict.BLOCKS, judge.tokens).status == verdict.UNJUDGED
    tokens = [one for one in judge.tokens if not one["mode"].startswith("block")]
    assert verdict.of(groups, 3, verdict.BLOCKS, tokens).status == verdict.UNJUDGED


FAULTS = {
    "the context is not seen": {"block": BlockRules(context=False)},
    "the context's newest is not seen": {"block": BlockRules(late=1)},
    "half of the window was given back": {"rules": Rules(window=64)},
    "the block's others are not seen": {"block": BlockRules(others=False)},
    "the block's later ones are not seen": {"block": BlockRules(ordered=True)},
    "the context without its norm": {"block": BlockRules(normed=False)},
    "YaRN in layers without entries": {"rules": Rules(yarn_without_entries=True)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_by_its_name(checkpoint, fault):
    prompt = made_block.PROMPT if "window" in fault else SHORT
    judge = taken(checkpoint, *made_block.Engine(checkpoint, **FAULTS[fault]).answers(prompt), faults={fault})
    found = verdict.of(only_blocks(judge), 0, ())
    assert found.status == verdict.FAULT and any(fault in text for text in found.faults), found


@pytest.mark.parametrize("markov, said", [(None, of_tokens.NO_MARKOV), ("first", of_tokens.OF_FIRST)])
def test_the_markov_head_is_asked(checkpoint, markov, said, monkeypatch):
    for name in ("ATTENTION", "OF_BLOCK", "EXPERTS", "BIASED", "MIXING"):  # each costs a computation of the draft
        monkeypatch.setattr(judging, name, {})
    judge = taken(checkpoint, *made_block.Engine(checkpoint, markov=markov).answers(SHORT))
    found = verdict.of(only_blocks(judge), 0, (), judge.tokens)
    assert any(said in text for text in found.faults), found


@pytest.mark.parametrize("place, wrong", [(0, 1), (2, 1)])
def test_a_block_that_begins_with_other_tokens_is_a_fault(checkpoint, right, place, wrong):
    """Than the one that is known, and masks."""
    passes, request = right
    changed = passes[1] | {"tokens": passes[1]["tokens"].clone()}
    changed["tokens"][place] ^= wrong
    judge = taken(checkpoint, [passes[0], changed, *passes[2:]], request)
    found = verdict.of([], 0, (), judge.chain.said())
    rows = sum(one["kind"] == "block" for one in passes) * made_block.DRAFTS
    assert found.faults == [f"{verdict.BEGUN}, block, target_verify: 1 of {rows} are others"]


def test_gaps_are_not_judged(checkpoint, right):
    passes, request = right
    without = [{k: v for k, v in one.items() if k != "context"} for one in passes]
    with pytest.raises(Unjudged, match="nothing of what the target gave it"):
        taken(checkpoint, without, request)
    with pytest.raises(Unjudged, match="no dspark_target_layer_ids"):
        judge = Judge({k: v for k, v in made_block.CONFIG.items() if not k.startswith("dspark")}, checkpoint)
        judge.take(passes[1], [])


def test_another_context_than_the_targets_is_a_fault(checkpoint, right):
    """Of the layer before, as a record has it whose engine gave its draft that."""
    passes, request = right
    width = made_block.made.HIDDEN
    turned = [one | {"context": one["context"].roll(width, 1)} if "context" in one else one for one in passes]
    judge = taken(checkpoint, turned, request, faults=set())
    found = verdict.of(judge.finish(), 0, ())
    assert any(verdict.CONTEXT in text for text in found.faults)
