#!/usr/bin/env python3
"""Write a checkpoint of six layers and the MTP block in the released layout, random but sharp: queries and keys so long
that attention is far from even, so that a token that is not seen, or an angle that is off, shows.

usage: layers_weights.py FOLDER HARNESS

256 experts, each of an eighth of the model's width (a rank's share of eight cards); all else is the model's size.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

STD8, STD4 = 64.0, 2.93  # of random codes in E4M3 and E2M1
KEYS = 2.5  # of kv_norm: the scores' deviation
CONFIG = {"num_hidden_layers": 6, "moe_intermediate_size": 256, "num_hash_layers": 3, "vocab_size": 16384}


def config(flash: dict) -> dict:
    """Of the whole model's: its first six layers hold every kind."""
    ratios = [*flash["compress_ratios"][: CONFIG["num_hidden_layers"]], 0]
    return flash | CONFIG | {"compress_ratios": ratios}


class Writer:
    def __init__(self, folder: Path, config: dict, device: str):
        self.folder, self.config, self.device = folder, config, device
        self.generator = torch.Generator(device=device).manual_seed(11)
        self.tensors, self.index = {}, {}

    def normal(self, name, *shape, std=None, mean=0.0, dtype=torch.bfloat16):
        std = 1 / math.sqrt(shape[-1]) if std is None else std
        values = torch.empty(*shape, device=self.device).normal_(mean, std, generator=self.generator)
        self.tensors[name] = values.to(dtype).cpu()

    def scale(self, name, rows, columns, exponent):
        around = torch.randint(
            exponent - 1, exponent + 2, (rows, columns), device=self.device, generator=self.generator
        )
        self.tensors[f"{name}.scale"] = (around + 127).to(torch.uint8).view(torch.float8_e8m0fnu).cpu()

    def fp8(self, name, rows, columns):
        values = torch.empty(rows, columns, device=self.device).normal_(0, STD8, generator=self.generator)
        self.tensors[f"{name}.weight"] = values.clamp_(-448, 448).to(torch.float8_e4m3fn).cpu()
        self.scale(name, -(-rows // 128), -(-columns // 128), round(math.log2(1 / (STD8 * math.sqrt(columns)))))

    def fp4(self, name, rows, columns):
        codes = torch.randint(0, 256, (rows, columns // 2), device=self.device, generator=self.generator)
        self.tensors[f"{name}.weight"] = codes.to(torch.uint8).view(torch.int8).cpu()
        self.scale(name, rows, columns // 32, round(math.log2(1 / (STD4 * math.sqrt(columns)))))

    def norm(self, name, size, mean=1.0):
        self.normal(f"{name}.weight", size, std=0.1 * mean, mean=mean)

    def mixing(self, name, mixes):
        streams = self.config["hc_mult"] * self.config["hidden_size"]
        self.normal(f"{name}_fn", mixes, streams, dtype=torch.float32)
        self.normal(f"{name}_base", mixes, std=0.5, dtype=torch.float32)
        self.tensors[f"{name}_scale"] = torch.ones(3 if mixes > self.config["hc_mult"] else 1)

    def compressor(self, name, ratio, size):
        wide = size * (2 if ratio == 4 else 1)
        self.normal(f"{name}.ape", ratio, wide, std=0.5, dtype=torch.float32)
        self.norm(f"{name}.norm", size, KEYS if size > 128 else 1.0)
        for part in ("wkv", "wgate"):
            self.normal(f"{name}.{part}.weight", wide, self.config["hidden_size"])

    def attention(self, name, ratio):
        c, heads, size = self.config, self.config["num_attention_heads"], self.config["head_dim"]
        self.fp8(f"{name}.wq_a", c["q_lora_rank"], c["hidden_size"])
        self.fp8(f"{name}.wkv", size, c["hidden_size"])
        self.fp8(f"{name}.wq_b", heads * size, c["q_lora_rank"])
        self.fp8(f"{name}.wo_a", c["o_groups"] * c["o_lora_rank"], heads * size // c["o_groups"])
        self.fp8(f"{name}.wo_b", c["hidden_size"], c["o_groups"] * c["o_lora_rank"])
        self.norm(f"{name}.q_norm", c["q_lora_rank"])
        self.norm(f"{name}.kv_norm", size, KEYS)
        self.normal(f"{name}.attn_sink", heads, std=1.0, mean=1.0, dtype=torch.float32)
        if ratio:
            self.compressor(f"{name}.compressor", ratio, size)
        if ratio == 4:
            self.fp8(f"{name}.indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])
            self.normal(f"{name}.indexer.weights_proj.weight", c["index_n_heads"], c["hidden_size"])
            self.compressor(f"{name}.indexer.compressor", ratio, c["index_head_dim"])

    def experts(self, name, hashed):
        c, wide, size = self.config, self.config["moe_intermediate_size"], self.config["hidden_size"]
        self.normal(f"{name}.gate.weight", c["n_routed_experts"], size)
        if hashed:
            token = torch.arange(c["vocab_size"])[:, None]
            picks = token * 7 + torch.arange(c["num_experts_per_tok"]) * 11
            self.tensors[f"{name}.gate.tid2eid"] = picks % c["n_routed_experts"]
        else:
            self.normal(f"{name}.gate.bias", c["n_routed_experts"], std=0.1, dtype=torch.float32)
        for part, rows, columns in (("w1", wide, size), ("w3", wide, size), ("w2", size, wide)):
            self.fp8(f"{name}.shared_experts.{part}", rows, columns)
            for expert in range(c["n_routed_experts"]):
                self.fp4(f"{name}.experts.{expert}.{part}", rows, columns)

    def layer(self, name, ratio, hashed):
        size, streams = self.config["hidden_size"], self.config["hc_mult"]
        for kind in ("attn", "ffn"):
            self.mixing(f"{name}.hc_{kind}", (2 + streams) * streams)
            self.norm(f"{name}.{kind}_norm", size)
        self.attention(f"{name}.attn", ratio)
        self.experts(f"{name}.ffn", hashed)

    def ends(self, name=""):
        self.norm(f"{name}norm", self.config["hidden_size"])
        self.mixing(f"{name}hc_head", self.config["hc_mult"])

    def flush(self, file):
        save_file(self.tensors, self.folder / file)
        self.index |= dict.fromkeys(self.tensors, file)
        self.tensors = {}


def write(folder: Path, config: dict, device: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    writer, size = Writer(folder, config, device), config["hidden_size"]
    writer.normal("embed.weight", config["vocab_size"], size, std=1.0)
    writer.normal("head.weight", config["vocab_size"], size, std=6 / math.sqrt(size))
    writer.ends()
    writer.flush("model-top.safetensors")
    for number in range(config["num_hidden_layers"]):
        writer.layer(f"layers.{number}", config["compress_ratios"][number], number < config["num_hash_layers"])
        writer.flush(f"model-{number:02d}.safetensors")
    writer.layer("mtp.0", 0, hashed=False)
    for part in ("e_proj", "h_proj"):
        writer.fp8(f"mtp.0.{part}", size, size)
    for part in ("enorm", "hnorm"):
        writer.norm(f"mtp.0.{part}", size)
    writer.ends("mtp.0.")
    writer.flush("model-mtp.safetensors")
    index = {"metadata": {}, "weight_map": writer.index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[2]).resolve()))
    import make_model

    write(Path(sys.argv[1]), config(make_model.FLASH), "cuda" if torch.cuda.is_available() else "cpu")
