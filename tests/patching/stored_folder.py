"""A checkpoint's folder as far as anybody looks to know how its experts are stored: no tensor is in it."""

import json
from pathlib import Path

from deepseek_v4_sm120.sglang_patches import stored_experts

CONFIG = json.loads((Path(__file__).resolve().parents[1] / "data/flash_config.json").read_text())
EXPERT = "layers.3.ffn.experts.0.w1."


def stored_folder(place, dtype=None, *more, config=CONFIG):
    """A checkpoint's config.json, index and the header of its only shard."""
    (place / "config.json").write_text(json.dumps(config))
    of_draft = "I8" if stored_experts.SECOND_SCALE in more else dtype  # NVFP4 conversions leave it as it was
    if dtype is not None:
        header = {"__metadata__": {"format": "pt"}} | {
            name: {"dtype": kind, "shape": [2048, 2048], "data_offsets": [0, 0]}
            for name, kind in ((f"mtp.0.ffn.{EXPERT[13:]}weight", of_draft), (f"{EXPERT}weight", dtype))
        }
        names = [*(name for name in header if name != "__metadata__"), *(EXPERT + name for name in more)]
        index = {"weight_map": dict.fromkeys(names, "model-00001.safetensors")}
        (place / stored_experts.INDEX).write_text(json.dumps(index))
        text = json.dumps(header).encode()
        (place / "model-00001.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return place
