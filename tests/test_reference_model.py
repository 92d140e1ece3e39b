"""reference/model.py against another's reading of the model (Hugging Face's transformers, model_by_transformers.py):
every sublayer's input and output, and the end. There no cache rounds, so here neither."""

import dataclasses
import json

import pytest
import torch

from deepseek_v4_sm120.reference import compressor, index_select, mhc, model
from deepseek_v4_sm120.reference.model import Rules
from tests import model_by_transformers as theirs

NEAR = 2e-6  # they turn queries and keys in float32


@pytest.fixture
def unrounded(monkeypatch):
    for module, name in ((model, "stored_key"), (model, "stored_index"), (mhc, "bf16")):
        monkeypatch.setattr(module, name, lambda values, *_: values)


def numbers(rules=None):
    """y and f of each sublayer, then the end, one after the other as they are computed."""
    config, weights, tokens = model.Config.of(theirs.CONFIG), model.Weights(theirs.checkpoint()), theirs.tokens()
    streams = weights("embed")[tokens][:, None].expand(-1, 4, -1)
    for number in range(theirs.CONFIG["num_hidden_layers"]):
        layer = weights.under(f"layers.{number}.")
        for kind in ("attn", "ffn"):
            y, post, comb = model.mixing(config, layer, kind, f"{kind}_norm", streams)
            if kind == "attn":
                f = model.attention(config, layer.under("attn."), y, config.ratios[number], rules=rules)
            else:
                hashed = number < config.hash_layers
                f = model.experts(config, layer.under("ffn."), y, tokens, hashed=hashed, rules=rules)
            yield from (theirs.kept(y), theirs.kept(f))
            streams = model.behind(f, streams, post, comb, rules)
    yield theirs.kept(model.head(config, weights, streams))


def distances(rules=None):
    """Of each from what transformers has: the greatest difference."""
    kept = json.loads(theirs.DATA.read_text())
    others = [one[part] for one in kept["sublayers"] for part in "yf"] + [kept["end"]]
    for mine, other in zip(numbers(rules), others, strict=True):
        yield float((torch.tensor(mine) - torch.tensor(other)).abs().max())


def test_every_sublayer_is_that_of_transformers(unrounded):
    assert max(distances()) < NEAR


FAULTS = {
    **{"window": 127, "sees_itself": False, "position": 1, "yarn_without_entries": True, "entries_early": -1},
    **{"overlap": False, "ape": False, "index_share": 7 / 8, "sink": False, "rotates_back": False},
    **{"hashed": False, "next_expert": True, "bias_in_weights": True, "renormalize": False, "routed_scale": 1.0},
    **{"shared_expert": False, "swiglu_limit": False, "mixing_turned": True, "sees_before": 100, "yarn": False},
    **{"unit_queries": False, "rounds": True},
    "index": Rules(yarn=False),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_every_rule_is_one_that_transformers_has(unrounded, rule):
    assert any(distance > 50 * NEAR for distance in distances(Rules(**{rule: FAULTS[rule]})))


def test_no_rule_is_left_out():
    assert {field.name for field in dataclasses.fields(Rules)} == set(FAULTS)


def test_rows_do_not_depend_on_where_a_pass_begins():
    config, weights = model.Config.of(theirs.CONFIG), model.Weights(theirs.checkpoint())
    x = theirs.made("inputs", theirs.TOKENS, theirs.CONFIG["hidden_size"], deviation=1.0)
    for number, ratio in enumerate((0, 4, 128)):
        layer = weights.under(f"layers.{number}.attn.")
        whole = model.attention(config, layer, x, ratio)
        part = model.attention(config, layer, x, ratio, first=201)
        assert torch.allclose(whole[201:], part, atol=1e-9)
        assert torch.allclose(model.attention(config, layer, x[:202], ratio, first=201), part[:1], atol=1e-9)


@pytest.mark.parametrize("ratio, number", [(0, 0), (4, 1), (128, 2)])
def test_rules_that_share_what_they_have_alike_have_their_own_numbers(ratio, number):
    """Asked one after the other of the same rows, as if each was asked alone."""
    config, weights = model.Config.of(theirs.CONFIG), model.Weights(theirs.checkpoint(), f"layers.{number}.attn.")
    x = theirs.made("inputs", theirs.TOKENS, theirs.CONFIG["hidden_size"], deviation=1.0)
    at = torch.tensor([3, 150, 200, len(x) - 1])
    projected = {rounds: model.Projected.of(config, weights, x[at].double(), ratio, rounds) for rounds in (False, True)}
    asked = model.Asked(config, weights, x, ratio, at, projected)
    every = [Rules(), *(Rules(**{rule: value}) for rule, value in FAULTS.items()), Rules(window=140), Rules(position=2)]
    every += [Rules(entries_early=1), Rules(position=1, index=Rules()), Rules(index=Rules(position=1)), Rules()]
    for rules in every:
        made = model.answered(config, weights, model.attended(weights, asked.read(rules)), rules.rounds)
        assert torch.allclose(made, model.attention(config, weights, x, ratio, at=at, rules=rules), atol=1e-9), rules


def test_an_expert_that_rounds_beside_one_that_does_not():
    weights = model.Weights(theirs.checkpoint(), "layers.0.ffn.shared_experts.")
    x = theirs.made("inputs", 3, theirs.CONFIG["hidden_size"], deviation=1.0).double()
    each = [model.mlp(weights, x, 1.0, rounds) for rounds in (False, True)]
    assert torch.allclose(model.mlps(weights, x, 1.0, (False, True)), torch.stack(each), atol=1e-12)
    assert not torch.allclose(*each, atol=1e-6)


def test_tensors_are_dequantised_by_their_scales():
    e4m3 = torch.full((128, 128), 2.0).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    fp4 = torch.full((4, 32), 0x52, dtype=torch.uint8).view(torch.int8)  # 1 and 3
    tensors = {"a.weight": e4m3, "a.scale": scale, "b.weight": fp4, "b.scale": scale.expand(4, 2), "c": e4m3[0]}
    weights = model.Weights(tensors)
    assert bool((weights("a") == 4).all()) and weights("a").dtype == torch.float64
    assert weights("b")[0, :4].tolist() == [2, 6, 2, 6] and weights("b").shape == (4, 64)
    assert weights("c").tolist() == [2.0] * 128
    with pytest.raises(KeyError):
        weights("d")


def test_an_fp4_index_chooses_by_its_own_values():
    """Beside queries and keys packed into a cache's bytes and read as index_select's own reference reads them."""
    config = dataclasses.replace(model.Config.of(theirs.CONFIG), index_topk=8, index_fp4=True)
    weights = model.Weights(theirs.checkpoint(), "layers.1.attn.")
    x = theirs.made("inputs", theirs.TOKENS, theirs.CONFIG["hidden_size"], deviation=1.0).double()
    at = torch.arange(100, len(x))
    projected = {False: model.Projected.of(config, weights, x[at], 4, False)}
    asked = model.Asked(config, weights, x, 4, at, projected)
    by = model.angles(config, 4)
    queries = model.rotated(projected[False].of_index, by * at[:, None]) @ compressor.hadamard(128, x.device)
    packed, scales = index_select.quantise_fp4(queries.bfloat16())
    queries = index_select.fp4_values(packed) * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=-1)
    keys = asked.entries("indexer.compressor.", True, True, True)
    slots, pages = torch.arange(len(keys)), torch.zeros(2, 64, 1, index_select.FP4_BYTES, dtype=torch.uint8)
    index_select.write_keys(pages, slots, keys)
    logits = torch.relu(queries @ index_select.read_keys(pages, slots)[0].T)
    logits = torch.einsum("rhe,rh->re", logits, x[at] @ weights("indexer.weights_proj").T)
    logits = logits.masked_fill(slots >= (at[:, None] + 1) // 4, -torch.inf)
    best = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(8).indices, True)
    rule = (False, 0, True, True, True, 0, 1.0)
    assert torch.equal(asked.chosen(*rule), best)
    asked = model.Asked(dataclasses.replace(config, index_fp4=False), weights, x, 4, at, projected)
    assert not torch.equal(asked.chosen(*rule), best)
