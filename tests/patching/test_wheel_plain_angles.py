"""The angles of a layer's queries and keys, in each release's own attention, without and with ours, beside the
specification: theta 10,000 alone in layers without compression, 160,000 with YaRN in those that have it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.plan import memory, models
from deepseek_v4_sm120.sglang_patches.fixes import plain_angles
from deepseek_v4_sm120.sglang_patches.names import MODEL
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import RELEASES, WheelSources, fetch, since

PLACES = ("sglang.srt.layers.deepseek_v4_rope", "sglang.kernels.ops.attention.deepseek_v4_rope")
SINCE_0_5_23 = "sglang.kernels.ops.attention.dsv4.rope"
PLAIN, COMPRESSED, PAIRS, TOKENS = 10_000, 160_000, 32, 300
YARN = {"factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1}
RATIOS = (0, 4, 128)
MENDED = "0.5.18"
around = pytest.mark.parametrize("version", [v for v in RELEASES if since(v, "0.5.14") and not since(v, "0.5.19")])


def wanted(ratio: int) -> torch.Tensor:
    """Of DeepSeek's own definition, in float64: pairs 15 to 25 between what they were and a sixteenth of it."""
    pair = torch.arange(PAIRS, dtype=torch.float64)
    speed = float(COMPRESSED if ratio else PLAIN) ** (-pair / PAIRS)
    if ratio:
        ramp = ((pair - 15) / 10).clamp(0, 1)
        speed = speed * (1 - ramp) + speed / 16 * ramp
    angles = torch.arange(TOKENS, dtype=torch.float64)[:, None] * speed
    return torch.polar(torch.ones_like(angles), angles)


class Quiet(torch.nn.Module):
    """Stands for layers, which say nothing of angles."""

    def __init__(self, *args, **more):
        super().__init__()


@pytest.fixture
def built(monkeypatch):
    """built(version, ours, ratio, **more) -> the table of angles that the release's own attention makes."""
    is_ours = SimpleNamespace(value=True)
    monkeypatch.setattr(plain_angles, "is_ours", lambda: is_ours.value)

    def make(version, ours, layer_id, serves=True, **more):
        is_ours.value = serves
        wheel = fetch(version)
        (place,) = [name for name in PLACES if WheelSources(wheel).path(name) is not None]
        given = {"torch": torch, "math": math, "lru_cache": lambda size: lambda function: function}
        precompute = take(wheel, given, "precompute_freqs_cis", place)
        if ours:
            precompute = plain_angles.replace_precompute(precompute)
        names = {"nn": torch.nn, "torch": torch, "GIVEN": {"precompute_freqs_cis": precompute}}
        config = SimpleNamespace(
            **{"head_dim": 512, "qk_rope_head_dim": 2 * PAIRS, "num_attention_heads": 64, "num_key_value_heads": 1},
            **{"hidden_size": 4096, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": TOKENS, "compress_rope_theta": COMPRESSED, "compress_ratios": RATIOS},
        )
        quiet = ("ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear", "RMSNorm", "RadixAttention")
        names |= dict.fromkeys((*quiet, "Compressor", "C4Indexer"), Quiet)
        names["get_rope_config"] = lambda config: (PLAIN, dict(YARN))
        parallel = SimpleNamespace(attn_tp_rank=0, attn_tp_size=1, tp_size=1, attn_cp_size=1)
        names |= {"get_parallel": lambda: parallel, "is_dsa_enable_prefill_cp": lambda: False, "_is_hip": False}
        names |= {"get_attention_tp_rank": lambda: 0, "get_attention_tp_size": lambda: 1, "_FP8_WO_A_GEMM": False}
        names |= {"get_tensor_model_parallel_world_size": lambda: 1, "is_cuda": lambda: False, "_is_npu": False}
        if since(version, "0.5.16"):
            names["MqaAttentionBase"] = take(wheel, names, "MqaAttentionBase", MODEL)
        kind = take(wheel, names, "MQALayer", MODEL)
        if ours:
            kind.__init__ = plain_angles.replace_attention_init(kind.__init__)
        return kind(config, layer_id, **more).freqs_cis

    return make


def is_right(table: torch.Tensor, ratio: int) -> bool:
    return bool((table - wanted(ratio)).abs().max() < 3e-5)


@around
def test_layers_without_compression_have_their_own_angles(version, built):
    is_mended = since(version, MENDED)
    for layer_id, ratio in enumerate(RATIOS):
        assert is_right(built(version, False, layer_id), ratio) is (is_mended or ratio != 0)
        assert is_right(built(version, True, layer_id), ratio)
    for ours in (False, True):  # of the MTP block, which says itself that it has none
        assert is_right(built(version, ours, 1, compress_ratio_override=0), 0) is (is_mended or ours)


@pytest.mark.parametrize("version", ["0.5.14", "0.5.17"])
def test_how_far_off_they_are_within_a_window(version, built):
    """What docs/mended.md says; and another model's stay SGLang's."""
    found = built(version, False, 0)
    assert (found[127] / wanted(0)[127]).angle().abs().max() == pytest.approx(0.037, abs=0.0005)
    assert torch.equal(built(version, True, 0, serves=False), found)


@pytest.mark.parametrize("version", ["0.5.12", "0.5.13", "0.5.17", "0.5.18", "0.5.23"])
def test_a_plan_reckons_with_the_tables_of_both_kinds(version):
    """In front of the pools: complex angles of all positions of the config, and the cosines and sines of SGLang's own
    rotation beside them, from 0.5.13 on."""
    wheel, module = fetch(version), "sglang.srt.layers.rotary_embedding"
    place = next(name for name in (*PLACES, SINCE_0_5_23) if WheelSources(wheel).path(name) is not None)
    given = {"torch": torch, "math": math, "lru_cache": lambda size: lambda function: function}
    of_all = dict(dim=2 * PAIRS, seqlen=TOKENS, original_seq_len=0, base=PLAIN, factor=16, beta_fast=32, beta_slow=1)
    held = take(wheel, given, "precompute_freqs_cis", place)(**of_all).nbytes
    has_rotation = "get_rope_wrapper(" in WheelSources(wheel).read(MODEL)
    assert has_rotation is since(version, "0.5.13")
    if has_rotation:
        made = take(wheel, {"torch": torch}, "RotaryEmbedding._compute_cos_sin_cache", f"{module}.base")
        speed = torch.ones(PAIRS)
        of_plain = {"base": PLAIN, "_compute_inv_freq": lambda base: speed, "position_start": 0}
        own = SimpleNamespace(max_position_embeddings=TOKENS, **of_plain)
        held += made(own).nbytes
    parts = tuple(int(part) for part in version.split("."))
    model = replace(models.FLASH, max_context=TOKENS)
    assert memory.angle_tables_bytes(model, parts, drafts=False) == 2 * held
    assert memory.angle_tables_bytes(models.FLASH, (0, 5, 23), drafts=True) == 1 << 30
    pro = [memory.angle_tables_bytes(models.PRO, (0, 5, 23), drafts=drafts) for drafts in (False, True)]
    assert pro == [1 << 29, 1 << 30], "which has no layer without compression but the drafter's"
