"""In which format a checkpoint has its routed experts: by its configuration, and where its weights are here by them, as
SGLang looks (configs/deepseek_v4.py); and whether it has something to draft with. A configuration alone does not tell:
that of sgl-project's FP8 conversions has no `expert_dtype`, that of NVFP4 conversions keeps the `fp4` of the checkpoint
that they were made of.

Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from deepseek_v4_sm120.patching import json_file

FP4, FP8, NVFP4 = "fp4", "fp8", "nvfp4"
OURS = "fp8"  # quant_method of the checkpoints whose `expert_dtype` speaks of DeepSeek's own formats
DTYPES = {"U8": FP4, "I8": FP4, "F4": FP4, "F8_E4M3": FP8}  # safetensors' -> format
INDEX = "model.safetensors.index.json"
WEIGHT = re.compile(r"(.*\.experts\.\d+\.(?:w[123]|down_proj|up_proj|gate_proj)\.)weight$")
MTP, LAYER = "mtp.", re.compile(r"(?:model\.)?layers\.(\d{1,4})\.")
SECOND_SCALE = "weight_scale_2"  # one number a matrix, which NVFP4's have and DeepSeek's do not
MOST_HEADER_BYTES = 64 << 20


def told(config: Mapping) -> str | None:
    """The format by the configuration alone; None where it does not tell."""
    text = {**config, **(config.get("text_config") or {})}
    quantized = config.get("quantization_config") or {}
    if of_experts := quantized.get("moe_quant_algo"):
        return str(of_experts).lower()
    method = quantized.get("quant_method")
    if method not in (None, OURS):
        return str(method)
    return quantized.get("expert_dtype") or text.get("expert_dtype")


def stored(folder: Path) -> str | None:
    """The format of the weights in a folder, by a header, or their type where it is no known one (bf16); None where
    there are none, or none of routed experts. JsonFileError for an index or a header that is none."""
    files = indexed(folder)
    names = (name for name in files or () if WEIGHT.match(name) and not name.startswith(MTP))
    name = next((name for name in names if (folder / str(files[name])).is_file()), None)  # a download may be going on
    if name is None:
        return None
    if WEIGHT.match(name)[1] + SECOND_SCALE in files:
        return NVFP4
    tensor = _header(folder / str(files[name])).get(name)
    dtype = tensor.get("dtype") if isinstance(tensor, dict) else None
    return DTYPES.get(dtype, dtype.lower()) if isinstance(dtype, str) else None


def has_drafter(folder: Path, layers: int) -> bool | None:
    """Whether a checkpoint of so many layers has weights to draft with, by SGLang's names for them; None where its
    index is not here. JsonFileError for an index that is none."""
    files = indexed(folder)
    return None if files is None else any(name.startswith(MTP) or _layer(name) == layers for name in files)


def _layer(name: str) -> int | None:
    found = LAYER.match(name)
    return None if found is None else int(found[1])


def indexed(folder: Path) -> dict | None:
    """name of a tensor -> its file; None where there is no index. JsonFileError for one that is none."""
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        files = json_file.load(index)
    except json_file.JsonFileError as error:
        raise json_file.JsonFileError(f"{index} {error}") from error
    files = files.get("weight_map") if isinstance(files, dict) else None
    if not isinstance(files, dict):
        raise json_file.JsonFileError(f"{index} has no weight_map")
    return files


def _header(shard: Path) -> dict:
    """Of a safetensors file: eight bytes that are its length, then JSON."""
    try:
        with open(shard, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            text = file.read(size) if size <= MOST_HEADER_BYTES else b""
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise json_file.JsonFileError(f"{shard} is no safetensors file ({error})") from error
    if not isinstance(found, dict):
        raise json_file.JsonFileError(f"{shard} is no safetensors file: its header is no mapping")
    return found
