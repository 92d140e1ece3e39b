"""An engine that computes the model has no fault's share, one that has a fault has its whole; what fills a captured
pass up, drafts and shared prefixes go to the right places."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import made  # noqa: E402

from deepseek_v4_sm120.commands.layers import judge as judging  # noqa: E402
from deepseek_v4_sm120.commands.layers import verdict  # noqa: E402
from deepseek_v4_sm120.commands.layers.judge import Judge  # noqa: E402
from deepseek_v4_sm120.commands.layers.record import Sent, Unjudged  # noqa: E402
from deepseek_v4_sm120.reference import model  # noqa: E402
from deepseek_v4_sm120.reference.model import Rules  # noqa: E402

torch.set_num_threads(1)  # of tensors so small more are slower


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def right(checkpoint):
    """(passes, groups) of an engine that computes the model."""
    every = made.passes(checkpoint)
    return every, made.judged(checkpoint, every)


def test_an_engine_that_computes_the_model_has_no_share_of_a_fault(right):
    groups, missing = right[1]
    assert missing == []
    found = verdict.of(groups, 3, verdict.PLAIN)
    assert (found.status, found.faults, found.unjudged) == (verdict.RIGHT, [], [])
    by_key = {(g["what"], g["mode"]): g for g in groups}
    assert sum(len(verdict.told(g)) for g in groups) > 30
    assert all(g["error"] < 0.03 and g["rows"] for g in groups)
    assert {mode for _, mode in by_key} == {"target, extend", "target, decode"}
    assert by_key["attention, ratio 4", "target, decode"]["rows"] == 3  # without what fills the passes up


FINE = {"share": 0.01, "chance": 0.01, "reach": 0.01, "strength": 0.1}
LAYER = {"rows": 9, "outliers": 0, "odd": 0, "worst": 0.1, "error": 0.02, "rounding": 0.03, "faults": {}, "units": {}}
FAULTS = [
    ("not itself", Rules(sees_itself=False)),
    ("not rotated back", Rules(rotates_back=False)),
    ("YaRN in layers without entries", Rules(yarn_without_entries=True)),
    ("an entry too late", Rules(entries_early=-1)),
    ("groups do not overlap", Rules(overlap=False)),
    ("no routed scale", Rules(routed_scale=1.0)),
    ("bias in the weights", Rules(bias_in_weights=True)),
    ("not by the token's number", Rules(hashed=False)),
    ("streams mixed the other way", Rules(mixing_turned=True)),
]


@pytest.mark.parametrize("fault, rules", FAULTS, ids=[name for name, _ in FAULTS])
def test_a_fault_has_its_whole_share(checkpoint, fault, rules):
    engine = made.Engine(checkpoint, rules)
    every = [engine.one("target", 1, made.ASKED[0][0][:135], 0, "EXTEND")]
    groups, _ = made.judged(checkpoint, every, asked=[{"input_ids": made.ASKED[0][0][:135].tolist()}], faults={fault})
    found = verdict.of(groups, 3, ("target, extend",))
    assert found.status == verdict.FAULT and any(fault in text for text in found.faults)
    told = [verdict.told(g).get(fault, 0.0) for g in groups]
    assert max(told) == pytest.approx(1, abs=0.35)


def test_an_expert_that_rounding_chooses_is_no_fault(checkpoint, monkeypatch):
    """Of an engine that takes the next expert in each row, as at a near tie: where none is one, that is a fault, and
    what no next expert explains is one where all are."""
    prompt = made.ASKED[0][0][:20]

    def found(near, rules, wrong=()):
        monkeypatch.setattr(judging, "NEAR", near)
        engine = made.Engine(checkpoint, rules)
        own, rows = engine.rounded, torch.tensor(wrong, dtype=torch.long)
        engine.rounded = lambda f: own(f.index_copy(0, rows, -f[rows]) if engine.at == (2, "ffn") else f)
        passes = [engine.one("target", 1, prompt, 0, "EXTEND")]
        groups, _ = made.judged(checkpoint, passes, [{"input_ids": prompt.tolist()}], faults={"no sink"})
        return verdict.of(groups, 3, ("target, extend",))

    of_next = Rules(next_expert=True)
    assert found(math.inf, of_next).status == verdict.RIGHT
    assert any(" of 40 rows are further off" in text for text in found(0.0, of_next).faults)
    assert any("experts, routed" in text for text in found(math.inf, of_next, [3, 7]).faults)


def test_rows_at_the_end_are_judged_with_all_before_them(checkpoint, right):
    every, (groups, _) = right
    few, missing = made.judged(checkpoint, every, tail=2, faults={"no sink"})
    by_key = {(g["what"], g["mode"]): g for g in groups}
    assert missing == [] and all(g["rows"] <= by_key[g["what"], g["mode"]]["rows"] for g in few)
    assert {g["rows"] for g in few if g["mode"] == "target, extend" and g["what"] == "embedding"} == {16}
    assert all(g["error"] < 0.03 for g in few)
    found = verdict.of(few, 3, verdict.PLAIN)
    assert found.status == verdict.RIGHT, found


def test_other_rows_of_a_prompt_are_judged_too(checkpoint, right):
    """Two beside the last two, others each time: a prompt that is wrong but for its end does not stay unseen."""
    prompt = [{"input_ids": made.ASKED[0][0][:100].tolist()}]
    y = [one.clone() for one in right[0][0]["y"]]
    y[3][:96] = y[3][:96].flip(0)
    groups, _ = made.judged(checkpoint, [right[0][0] | {"y": y}], prompt, tail=2, faults=set())
    assert verdict.of(groups, 3, ()).status == verdict.FAULT
    picks = {tuple(Judge(made.CONFIG, checkpoint, tail=2).picked(100).tolist()) for _ in range(9)}
    assert len(picks) > 1 and all(one[2:] == (98, 99) and one[0] < one[1] < 98 for one in picks)
    assert Judge(made.CONFIG, checkpoint, tail=2).picked(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("blind", [False, True])
def test_a_draft_behind_a_draft_is_blind_or_is_not(checkpoint, blind, monkeypatch):
    monkeypatch.setattr(judging, "FAULTY", 3)
    prompt, verified = made.tokens(made.PROMPT), made.tokens(8, 50)
    sent = Sent([[*prompt.tolist(), *verified.tolist()]], [made.PROMPT])
    engine, judge = made.Engine(checkpoint), Judge(made.CONFIG, checkpoint, faults={judging.BLIND})

    def hidden(count, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, 4 * made.HIDDEN, generator=generator).bfloat16()

    def take(one):
        judge.take(one, sent.segments(one))

    sent.segments(engine.one("target", 1, prompt, 0, "EXTEND"))
    take(engine.one("draft", 1, prompt, 0, "EXTEND", hidden(made.PROMPT, 5)))
    for step in range(4):  # each drafts two behind what was verified, of which none is accepted but the next token
        begin = made.PROMPT + step
        for behind in range(2):
            rules = Rules(sees_before=begin) if blind else Rules()
            token = made.tokens(1, 10 * step + behind)
            one = engine.one("draft", 1, token, begin + behind, "DECODE", hidden(1, behind), rules)
            take(made.filled(one))
        take(engine.one("draft", 1, verified[step : step + 2], begin, "DRAFT_EXTEND_V2", hidden(2, 60 + step)))
    groups = {(g["what"], g["mode"]): g for g in judge.finish()}
    found = groups["attention, ratio 0", "draft, decode"]
    assert found["rows"] == 8
    assert found["faults"][judging.BLIND]["share"] == pytest.approx(float(blind), abs=0.2)


def test_what_is_not_known_is_said(checkpoint, right):
    one = right[0][0]
    sent = Sent.of(made.requests())
    late = {"positions": torch.arange(8, 108), "tokens": made.ASKED[0][0][8:108]}
    with pytest.raises(Unjudged, match="the first 8 tokens"):
        sent.segments(one | late)
    judge = Judge(made.CONFIG, checkpoint)
    with pytest.raises(Unjudged, match="5 inputs of sublayers, expected 6"):
        judge.take(one | {"y": one["y"][:-1]}, [])
    with pytest.raises(Unjudged, match="one after the other"):
        Sent.of(made.requests()).segments(one | {"positions": torch.tensor([0, 1, 1, *range(2, 99)])})
    with pytest.raises(Unjudged, match="has no mtp.0.h_proj.weight"):
        lacks = {name: checkpoint[name] for name in checkpoint if not name.startswith("mtp.0.h_proj")}
        Judge(made.CONFIG, lacks).weights.under("mtp.0.").raw("h_proj.weight")


def test_products_are_those_of_the_rows_that_are_there(checkpoint):
    """Of a request that has grown, whose drafts were refused, or that is another one."""
    kept, plain = judging.Kept(checkpoint).under("layers.0.attn."), model.Weights(checkpoint, "layers.0.attn.")
    made_ = torch.Generator().manual_seed(1)
    x, more, other = (torch.randn(rows, made.HIDDEN, generator=made_).double() for rows in (40, 5, 40))
    changed = x.clone()
    changed[3] = 0
    for new in (x, torch.cat([x, more]), torch.cat([x[:38], more]), x[:30], other, changed, x):
        assert torch.allclose(kept.product("wkv", new), new @ plain("wkv").T, rtol=1e-12)
    kept.let_go()
    assert not kept.made


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rows_that_are_all_wrong_are_no_near_ties(rows):
    """A single row, too, of which one may be another choice."""
    layer = LAYER | {"rows": rows, "faults": {"a": FINE}}
    group = {"what": "experts, routed", "mode": "draft, decode", **layer, "layers": {0: layer}}
    assert verdict.of([group], 1, ()).status == verdict.RIGHT
    wrong = group | {"outliers": rows, "error": None, "faults": {}}
    assert verdict.of([group, wrong | {"layers": {}}], 1, ()).status == verdict.FAULT


def test_a_layer_alone_that_is_wrong_is_seen():
    """Among layers that are right its share is small."""
    fine, layer = FINE, LAYER | {"faults": {"a": FINE}}
    bad = layer | {"faults": {"a": fine | {"share": 0.9}}}
    part = layer | {"faults": {verdict.PART: fine | {"share": 0.12}}}
    unit = layer | {"units": {"head 3": fine | {"share": 0.97}, "head 4": fine}}
    group = {"what": "attention, ratio 4", "mode": "target, extend", **layer, "layers": {0: layer, 1: layer}}
    assert verdict.of([group], 2, ()).status == verdict.RIGHT
    for wrong, said in (
        *((bad, "a, 0.90"), (part, "a part of it is missing, 0.12"), (unit, "in their place: head 3 (0.97)")),
        *((layer | {"error": 0.07}, "0.070, where rounding makes 0.030"), (layer | {"error": math.nan}, "nan")),
        *((layer | {"outliers": 3}, "3 of 9 rows"), (layer | {"odd": 3}, "3 of 9 rows")),
    ):
        found = verdict.of([group | {"layers": {0: layer, 1: wrong}}], 2, ())
        assert found.status == verdict.FAULT and "layer 1" in found.faults[0] and said in found.faults[0]
    many = {number: layer | {"outliers": 1} for number in range(9)}  # one in each, which one near tie in each may be
    assert verdict.of([group | {"rows": 450, "outliers": 9, "layers": many}], 9, ()).status == verdict.RIGHT
    assert verdict.of([group | {"rows": 81, "outliers": 9, "layers": many}], 9, ()).status == verdict.FAULT
    weak = group["layers"][0] | {"faults": {"a": fine | {"share": 0.9, "strength": verdict.STRONG / 2}}}
    assert verdict.of([group | {"layers": {0: layer, 1: weak}}], 2, ()).status == verdict.RIGHT
    assert verdict.of([group], 3, ("target, extend",)).status == verdict.UNJUDGED
    assert verdict.of([], 2, verdict.PLAIN).status == verdict.UNJUDGED


def test_what_cannot_be_told_is_no_fault():
    """One that chance or rounding alone makes as much of."""
    for name in ("reach", "chance"):
        unsure = {"head 3": FINE | {"share": 0.97, name: 0.3}}
        layer = LAYER | {"units": unsure, "faults": {"a": FINE, "b": FINE | {"share": 0.97, name: 0.3}}}
        group = {"what": "attention, ratio 4", "mode": "target, extend", **layer, "layers": {0: layer}}
        found = verdict.of([group], 1, ())
        assert found.status == verdict.RIGHT
        assert found.notes == ["target, extend: could not be told, whether there or not: b"]
        alone = group | {"faults": {"a": FINE, "b": FINE}}
        found = verdict.of([alone], 1, ())
        assert found.notes == ["target, extend: could not be told of each layer alone: b (1 of 1)"]


@pytest.mark.parametrize("missing, others", [("head 1", "head 0"), ("page 1", "page 2")])
def test_a_part_that_is_missing_is_told_by_its_name(checkpoint, missing, others, monkeypatch):
    """Where the error that it makes is no more than rounding does."""
    monkeypatch.setattr(model, "PAGE", 16)
    engine = made.Engine(checkpoint, noise=0.004)
    own, (kind, number) = engine.rounded, missing.split()

    def rounded(f):
        if engine.at == (1, "attn"):
            weights, config = engine.judge.weights.under("layers.1.attn."), engine.config
            x, matrices = engine.inputs["target", 1, 1], (weights("wo_a"), weights("wo_b"))
            at = torch.arange(len(x) - len(f), len(x))
            every = {False: model.Projected.of(config, weights, x[at], 4, False)}
            read = model.Asked(config, weights, x, 4, at, every).read(Rules())
            if kind == "head":
                f = f + model.without_head(config, *matrices, int(number), model.attended(weights, read))
            else:
                f = model.answered(config, weights, model.without_page(weights, read, int(number)))
        return own(f)

    engine.rounded = rounded
    prompt = made.ASKED[0][0][:60]
    every = [engine.one("target", 1, part, start, "EXTEND") for part, start in ((prompt[:25], 0), (prompt[25:], 25))]
    groups, _ = made.judged(checkpoint, every, [{"input_ids": prompt.tolist()}])
    found = verdict.of(groups, 3, ()).faults
    said = [text for text in found if f"layer 1: missing, or others in their place: {missing} (" in text]
    assert said and float(said[0].split("(")[1].split(")")[0]) == pytest.approx(1, abs=0.1), found
    assert not any(others in text or "layer 0" in text for text in found)


def test_a_share_of_the_index_is_the_configs():
    assert judging.OF_RATIO[4]["three quarters of the index's entries"].index_share == 0.75


def test_float32_scales_are_read_as_such(checkpoint):
    """As FP8 checkpoints have them that others have made."""
    weights = model.Weights(checkpoint, "layers.0.attn.")
    scale = checkpoint["layers.0.attn.wq_a.scale"]
    as_float = {"wq_a.weight": checkpoint["layers.0.attn.wq_a.weight"], "wq_a.scale": torch.exp2(scale.float() - 127)}
    assert torch.equal(model.Weights(as_float)("wq_a"), weights("wq_a"))
