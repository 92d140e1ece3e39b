"""The angles by which each layer turns its queries and keys: a release's own attention, as it is built of the
checkpoint's configuration, and its own table, beside the formula of the model's public code in float64. Layers without
compression and the MTP block have theta 10,000 and nothing else, the others theta 160,000 with YaRN and no factor on
cosines and sines. All releases were run with this; the suite has those from 0.5.17 on."""

import ast
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.patching.test_wheel_wo_a import MTP, definition, take
from tests.patching.wheels import WheelSources, every_release, fetch, since, tree

FLASH = json.loads((Path(__file__).parents[1] / "data/flash_config.json").read_text())
PLACES = ("sglang.kernels.ops.attention.dsv4.rope", "sglang.kernels.ops.attention.deepseek_v4_rope")
PLACES += ("sglang.srt.layers.deepseek_v4_rope",)
POSITIONS = 4096
TABLE, FIRST_OF_EACH = "precompute_freqs_cis", 4  # layers
ROUNDED, WINDOW = 4e-4, 128  # an angle of 4,096 in float32


class Built(Exception):
    """What the attention asks its table with."""


def asked(version, layer: int, override=None) -> dict:
    """The arguments of a layer's table."""

    def table(**given):
        raise Built(given)

    config = SimpleNamespace(**FLASH, q_head_norm=True, sliding_window_size=FLASH["sliding_window"])
    scaling = dict(FLASH["rope_scaling"])
    kind = "MqaAttentionBase" if definition(fetch(version), "MqaAttentionBase.__init__") else "MQALayer"
    names = {"get_rope_config": lambda config: (config.rope_theta, scaling), "torch": torch, "nn": torch.nn}
    names |= {"super": lambda: SimpleNamespace(__init__=lambda: None), TABLE: table, "GIVEN": {TABLE: table}}
    names |= {"get_parallel": lambda: SimpleNamespace(attn_tp_rank=0, attn_tp_size=1, tp_size=1)}
    names |= {"get_attention_tp_rank": lambda: 0, "get_attention_tp_size": lambda: 1}
    build = take(fetch(version), names, f"{kind}.__init__")
    named = "compress_ratio" if kind == "MqaAttentionBase" else "compress_ratio_override"
    with pytest.raises(Built) as built:
        build(torch.nn.Module(), config, layer, None, "", **{named: override})
    return built.value.args[0]


def assigned(version, name: str, module: str) -> ast.expr:
    body = tree(fetch(version), module).body
    [found] = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return found


def by_sglang(version, **given) -> torch.Tensor:
    module = next(place for place in PLACES if WheelSources(fetch(version)).path(place))
    build = take(fetch(version), {"torch": torch, "math": math, "lru_cache": lambda size: lambda f: f}, TABLE, module)
    return build(**given)


def trained(compressed: bool) -> torch.Tensor:
    theta, scaling = (160_000, FLASH["rope_scaling"]) if compressed else (10_000, None)
    by_pair = [theta ** (-2 * i / 64) for i in range(32)]
    if scaling:

        def pair_of(turns):
            return 64 * math.log(65_536 / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = math.floor(pair_of(32)), math.ceil(pair_of(1))
        slow = [min(max((i - first) / (last - first), 0), 1) for i in range(32)]
        by_pair = [f / 16 * s + f * (1 - s) for f, s in zip(by_pair, slow, strict=True)]
    turned = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * torch.tensor(by_pair, dtype=torch.float64)
    return torch.polar(torch.ones_like(turned), turned)


@every_release("0.5.17")
def test_each_layer_has_its_own(version):
    """Layers 0 and 1 have YaRN's from 0.5.14 to 0.5.17, too, which docs/mended.md tells."""
    tables = {}
    for layer, ratio in enumerate(FLASH["compress_ratios"][:FIRST_OF_EACH]):
        given = asked(version, layer)
        assert given["seqlen"] == FLASH["max_position_embeddings"]
        tables[ratio] = by_sglang(version, **given | {"seqlen": POSITIONS})
    for ratio in (4, 128):
        assert (tables[ratio] - trained(compressed=True)).abs().max() < ROUNDED
    wrong = (tables[0] - trained(compressed=False))[:WINDOW].abs().max()
    told = since(version, "0.5.14") and not since(version, "0.5.18")
    assert 0.03 < wrong < 0.038 if told else wrong < ROUNDED


@every_release("0.5.17")
def test_the_mtp_block_has_that_of_the_first_layers(version):
    """As layer 0 of a model of its own, whatever kind of layer that is (DeepSeek-V4-Pro's is one with compression)."""
    assert ast.literal_eval(assigned(version, "COMPRESS_RATIO_NEXTN_LAYER", MTP)) == 0
    assert asked(version, layer=2, override=0) == asked(version, layer=0)
