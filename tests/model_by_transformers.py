#!/usr/bin/env python3
"""A small DeepSeek-V4 and what Hugging Face's transformers makes of it: another's reading of the model, for
test_reference_model.py. The numbers are kept in tests/data, so that the tests need no transformers.

usage: python3 tests/model_by_transformers.py > tests/data/model_by_transformers.json     (transformers 5.19.0)
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from pathlib import Path

import torch

TOKENS = 260  # two entries of 128, and 65 of 4, of which the index takes 8
ROWS, COLUMNS = (0, 3, 4, 127, 128, 131, 259), 6  # that are kept
CONFIG = {
    **{"hidden_size": 64, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "vocab_size": 64},
    **{"num_attention_heads": 2, "o_groups": 2, "o_lora_rank": 32, "q_lora_rank": 32, "index_n_heads": 2},
    **{"index_topk": 8, "num_experts_per_tok": 3, "n_routed_experts": 8, "moe_intermediate_size": 32},
    **{"num_hash_layers": 2, "routed_scaling_factor": 1.5, "swiglu_limit": 1.0, "num_hidden_layers": 4},
    **{"compress_ratios": [0, 4, 128, 4, 0], "rms_norm_eps": 1e-6, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6},
    **{"hc_mult": 4, "rope_theta": 10000, "compress_rope_theta": 160000, "sliding_window": 128},
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn"}
    },
}
OTHERS = {  # of config.json, that transformers asks for
    **{"max_position_embeddings": 1048576, "n_shared_experts": 1, "num_key_value_heads": 1, "hidden_act": "silu"},
    **{"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "topk_method": "noaux_tc", "attention_bias": False},
    **{"num_nextn_predict_layers": 1, "tie_word_embeddings": False, "attention_dropout": 0.0},
}


def made(name: str, *shape: int, mean=0.0, deviation=None) -> torch.Tensor:
    """float64, even between -1.7 and 1.7 deviations, by the name alone and the same everywhere."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    noise = torch.sin(at * 12.9898 + zlib.crc32(name.encode()) % 1000) * 43758.5453
    deviation = shape[-1] ** -0.5 if deviation is None else deviation
    return ((noise - noise.floor() - 0.5) * 12**0.5 * deviation + mean).view(shape)


def tokens() -> torch.Tensor:
    return (torch.arange(TOKENS) * 29 + torch.arange(TOKENS) ** 2 * 7) % CONFIG["vocab_size"]


def checkpoint() -> dict[str, torch.Tensor]:
    """The tensors by the released checkpoint's names, none of them quantised."""
    c, found = CONFIG, {}
    size, heads, dim, streams = c["hidden_size"], c["num_attention_heads"], c["head_dim"], 4

    def add(name, *shape, **how):
        found[name] = made(name, *shape, **how)

    def norm(name, wide):
        add(f"{name}.weight", wide, mean=1.0, deviation=0.1)

    def mixing(name, mixes, scales):
        add(f"{name}_fn", mixes, streams * size)
        add(f"{name}_base", mixes, deviation=0.5)
        add(f"{name}_scale", scales, mean=1.0, deviation=0.2)

    def compressor(name, ratio, wide):
        width = wide * (2 if ratio == 4 else 1)
        add(f"{name}.ape", ratio, width, deviation=0.5)
        norm(f"{name}.norm", wide)
        add(f"{name}.wkv.weight", width, size)
        add(f"{name}.wgate.weight", width, size)

    add("embed.weight", c["vocab_size"], size, deviation=1.0)
    norm("norm", size)
    mixing("hc_head", streams, 1)
    for number, ratio in enumerate(c["compress_ratios"][:-1]):
        layer = f"layers.{number}"
        attention, ffn, wide = f"{layer}.attn", f"{layer}.ffn", c["moe_intermediate_size"]
        for kind in ("attn", "ffn"):
            mixing(f"{layer}.hc_{kind}", (2 + streams) * streams, 3)
            norm(f"{layer}.{kind}_norm", size)
        add(f"{attention}.wq_a.weight", c["q_lora_rank"], size)
        add(f"{attention}.wq_b.weight", heads * dim, c["q_lora_rank"])
        add(f"{attention}.wkv.weight", dim, size)
        add(f"{attention}.wo_a.weight", c["o_groups"] * c["o_lora_rank"], heads * dim // c["o_groups"])
        add(f"{attention}.wo_b.weight", size, c["o_groups"] * c["o_lora_rank"])
        norm(f"{attention}.q_norm", c["q_lora_rank"])
        norm(f"{attention}.kv_norm", dim)
        add(f"{attention}.attn_sink", heads, deviation=1.0)
        if ratio:
            compressor(f"{attention}.compressor", ratio, dim)
        if ratio == 4:
            compressor(f"{attention}.indexer.compressor", ratio, c["index_head_dim"])
            add(f"{attention}.indexer.wq_b.weight", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            add(f"{attention}.indexer.weights_proj.weight", c["index_n_heads"], size)
        add(f"{ffn}.gate.weight", c["n_routed_experts"], size, deviation=1.0)
        if number < c["num_hash_layers"]:
            picks = torch.arange(c["vocab_size"])[:, None] * 3 + torch.arange(c["num_experts_per_tok"])
            found[f"{ffn}.gate.tid2eid"] = picks % c["n_routed_experts"]
        else:
            add(f"{ffn}.gate.bias", c["n_routed_experts"], deviation=0.3)
        for expert in ("shared_experts", *(f"experts.{i}" for i in range(c["n_routed_experts"]))):
            add(f"{ffn}.{expert}.w1.weight", wide, size, deviation=0.3)
            add(f"{ffn}.{expert}.w3.weight", wide, size, deviation=0.3)
            add(f"{ffn}.{expert}.w2.weight", size, wide)
    return found


ENDS = {  # transformers' names -> the checkpoint's
    **{"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"},
    **{f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")},
}
PARTS = {
    **{"self_attn.q_a_proj": "attn.wq_a", "self_attn.q_a_norm": "attn.q_norm", "self_attn.q_b_proj": "attn.wq_b"},
    **{"self_attn.kv_proj": "attn.wkv", "self_attn.kv_norm": "attn.kv_norm"},
    **{"self_attn.o_a_proj": "attn.wo_a", "self_attn.o_b_proj": "attn.wo_b"},
    **{f"self_attn.compressor.{a}": f"attn.compressor.{b}" for a, b in (("kv_proj", "wkv"), ("gate_proj", "wgate"))},
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    **{"mlp.gate": "ffn.gate", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{
        f"mlp.shared_experts.{a}_proj": f"ffn.shared_experts.{b}"
        for a, b in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
WHOLE = {
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    **{f"{kind}_hc.{part}": f"hc_{kind}_{part}" for kind in ("attn", "ffn") for part in ("fn", "base", "scale")},
}


def of_transformers(name: str, ours: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that transformers calls `name`."""
    if name in ENDS:
        return ours[ENDS[name]]
    _, _, number, part = name.split(".", 3)
    layer = f"layers.{number}"
    experts = [f"{layer}.ffn.experts.{i}" for i in range(CONFIG["n_routed_experts"])]
    if part == "mlp.experts.gate_up_proj":
        return torch.stack([torch.cat([ours[f"{e}.w1.weight"], ours[f"{e}.w3.weight"]]) for e in experts])
    if part == "mlp.experts.down_proj":
        return torch.stack([ours[f"{e}.w2.weight"] for e in experts])
    if part in WHOLE:
        return ours[f"{layer}.{WHOLE[part]}"]
    return ours[f"{layer}.{PARTS[part.removesuffix('.weight')]}.weight"]


def kept(values: torch.Tensor) -> list:
    return [[round(x, 7) for x in values[row, :COLUMNS].tolist()] for row in ROWS]


def main():
    import transformers
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = transformers.DeepseekV4Config(**CONFIG, **OTHERS)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    network, ours, found = theirs.DeepseekV4Model(config).eval().double(), checkpoint(), {"sublayers": []}
    state = {name: of_transformers(f"model.{name}", ours) for name in network.state_dict()}
    network.load_state_dict(state)

    def keep(_, args, kwargs, out):
        y = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        f = out[0] if isinstance(out, tuple) else out
        found["sublayers"].append({"y": kept(y[0]), "f": kept(f[0])})

    for layer in network.layers:
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
        layer.mlp.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        found["end"] = kept(network(tokens()[None]).last_hidden_state[0])
    json.dump(found | {"transformers": transformers.__version__}, sys.stdout)


DATA = Path(__file__).resolve().parent / "data/model_by_transformers.json"

if __name__ == "__main__":
    main()
