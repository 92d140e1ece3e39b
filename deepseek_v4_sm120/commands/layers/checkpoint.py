"""A checkpoint's tensors, by name, out of its safetensors files: mapped, so only what is used is ever read. By hand,
for E8M0 is a type that not every release of safetensors knows."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from deepseek_v4_sm120.commands.console import CommandError, one_line
from deepseek_v4_sm120.patching import json_file

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
MOST_HEADER = 256 << 20


class Checkpoint(Mapping):
    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = loaded(self.folder / "config.json")
        index = self.folder / INDEX
        self._files: dict[str, tuple] = {}
        self._of = loaded(index).get("weight_map") if index.is_file() else None
        if self._of is None:
            if not (self.folder / WHOLE).is_file():
                raise CommandError(f"{self.folder} has neither {INDEX} nor {WHOLE}")
            self._of = dict.fromkeys(self._opened(WHOLE)[0], WHOLE)

    def __getitem__(self, name: str) -> torch.Tensor:
        headers, data, begin = self._opened(self._of[name])
        told = headers[name]
        kind, shape, (first, last) = told["dtype"], told["shape"], told["data_offsets"]
        if kind not in TYPES:
            raise CommandError(f"{name} is of type {one_line(kind, 40)}, which is not known here")
        size = math.prod(shape) * TYPES[kind].itemsize
        if last - first != size or begin + last > len(data):
            raise CommandError(f"{self._of[name]} is cut off, or says {name} has {last - first} bytes, expected {size}")
        if not size:
            return torch.empty(shape, dtype=TYPES[kind])
        flat = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=begin + first)
        aligned = flat if (begin + first) % TYPES[kind].itemsize == 0 else flat.clone()
        return aligned.view(TYPES[kind]).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def _opened(self, name: str) -> tuple:
        """(headers, the file's bytes, where its tensors begin)."""
        if name not in self._files:
            path = self.folder / name
            if os.path.basename(name) != name or not path.is_file():
                raise CommandError(f"{self.folder} has no file {one_line(name)}, which its index names")
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(MOST_HEADER, path.stat().st_size):
                    raise CommandError(f"{path} is no safetensors file, or not a whole one (a pointer of Git LFS?)")
                headers = json.loads(file.read(length))
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants what it could write to
            self._files[name] = headers, data, 8 + length
            headers.pop("__metadata__", None)
        return self._files[name]


def loaded(path: Path) -> dict:
    try:
        found = json_file.load(path)
    except json_file.JsonFileError as error:
        raise CommandError(f"{path} {error}") from error
    if not isinstance(found, dict):
        raise CommandError(f"{path} is no mapping")
    return found


def folder_of(name: str) -> Path:
    """A checkpoint's folder: the path itself, or what Hugging Face's cache on this machine has under that name."""
    if Path(name).is_dir():
        return Path(name)
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    cached = Path(home) / f"models--{name.replace('/', '--')}"
    main = cached / "refs" / "main"
    if main.is_file() and (found := cached / "snapshots" / main.read_text().strip()).is_dir():
        return found
    raise CommandError(f"there is no folder {name} and no such model in {home}: --model is the checkpoint's folder")
