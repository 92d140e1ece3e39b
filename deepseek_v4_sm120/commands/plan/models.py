"""The shapes that bytes and times follow from. Numbers of Flash and Pro: their released config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.speculation import DSPARK, EAGLE
from deepseek_v4_sm120.patching import json_file
from deepseek_v4_sm120.sglang_patches import models_served

ARCHITECTURE = "DeepseekV4ForCausalLM"
FP4, FP8 = "fp4", "fp8"
BLOCKS = (128, 128)  # of the FP8 layers' scales
GREATEST = 1 << 30  # of any number in a config.json that counts or measures
NAMES = {
    ("flash", FP4): "deepseek-ai/DeepSeek-V4-Flash",
    ("flash", FP8): "sgl-project/DeepSeek-V4-Flash-FP8",
    ("pro", FP4): "deepseek-ai/DeepSeek-V4-Pro",
    ("flash-0731", FP4): "deepseek-ai/DeepSeek-V4-Flash-0731",
}


@dataclass(frozen=True)
class Model:
    """DeepSeek-V4's widths; layers by kind: without compression, C4, C128."""

    name: str
    hidden: int
    heads: int
    q_lora: int
    o_groups: int
    o_lora: int
    experts: int
    expert_width: int
    index_topk: int
    layers_plain: int
    layers_c4: int
    layers_c128: int
    experts_per_token: int = 6
    hash_layers: int = 3
    vocab: int = 129_280
    head_dim: int = 512
    window: int = 128
    index_heads: int = 64
    index_dim: int = 128
    streams: int = 4
    max_context: int = 1_048_576
    expert_format: str = FP4
    path: str | None = None  # what --model-path gets
    dspark_block: int | None = None  # of a checkpoint with DSPARK's drafter, which has no MTP block
    dspark_stages: int = 0  # layers of that drafter
    sees_images: bool = False  # its checkpoint, of which SGLang serves the text alone
    no_drafter: str | None = None  # why its checkpoint has nothing to draft with
    ratios: tuple[int, ...] = ()  # of compression, layer by layer
    tables: int = 2  # of embedding and head: a stage has one of them at most

    @property
    def drafter(self) -> str:
        """What the checkpoint drafts with, by SGLang's name."""
        return EAGLE if self.dspark_block is None else DSPARK

    @property
    def draft_layers(self) -> int:
        return self.dspark_stages or 1

    @property
    def layers(self) -> int:
        return self.layers_plain + self.layers_c4 + self.layers_c128

    def kinds(self) -> tuple[tuple[int, int], ...]:
        """(compression ratio, number of layers)."""
        return ((0, self.layers_plain), (4, self.layers_c4), (128, self.layers_c128))

    def of_stages(self, stages: int) -> list[Model]:
        """What each of so many stages holds, as SGLang deals the layers (get_pp_indices): those that are over go to
        the last ones, the embedding to the first, the head to the last."""
        if stages == 1:
            return [self]
        found, first, over = [], 0, self.layers % stages
        for stage in range(stages):
            end = first + self.layers // stages + (stage >= stages - over)
            own = self.ratios[first:end]
            kinds = {"layers_plain": own.count(0), "layers_c4": own.count(4), "layers_c128": own.count(128)}
            hashed = max(0, min(end, self.hash_layers) - first)
            tables = (stage == 0) + (stage == stages - 1)
            found.append(replace(self, **kinds, ratios=own, hash_layers=hashed, tables=tables))
            first = end
        return found


FLASH = Model(
    *("Flash", 4096, 64, 1024, 8, 1024, 256, 2048, 512, 2, 21, 20),
    path=NAMES["flash", FP4],
    ratios=(0, 0, *(4, 128) * 20, 4),
)
PRO = Model(
    *("Pro", 7168, 128, 1536, 16, 1024, 384, 3072, 1024, 0, 30, 31),
    path=NAMES["pro", FP4],
    ratios=(128, 128, *(4, 128) * 29, 4),
)
FLASH_0731 = replace(FLASH, name="Flash-0731", path=NAMES["flash-0731", FP4], dspark_block=5, dspark_stages=3)
BUILT_IN = {"flash": FLASH, "pro": PRO, "flash-0731": FLASH_0731}
CHECKPOINTS = {path.lower(): key for key, path in NAMES.items()}
# what --model takes
KNOWN = f"{', '.join(BUILT_IN)}, a checkpoint like {NAMES['flash', FP8]}, or a folder with the model's config.json"

FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "q_lora": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora": "o_lora_rank",
    "experts": "n_routed_experts",
    "expert_width": "moe_intermediate_size",
    "index_topk": "index_topk",
    "experts_per_token": "num_experts_per_tok",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
    "window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "streams": "hc_mult",
    "max_context": "max_position_embeddings",
}


def find(text: str, experts: str | None) -> Model:
    """A name of BUILT_IN or of NAMES, or a folder (or its config.json); CommandError says what is missing."""
    name, brings = named(text)
    if name is None:
        return from_config(text, experts)
    if brings is not None and experts not in (None, brings):
        raise CommandError(f"--experts {experts}: the experts of {text} are {brings}")
    wanted = experts or brings or BUILT_IN[name].expert_format
    if (name, wanted) not in NAMES:
        raise CommandError(f"there is no {wanted} checkpoint of {name}; known: {', '.join(NAMES.values())}")
    return replace(BUILT_IN[name], expert_format=wanted, path=NAMES[name, wanted])


def named(text: str) -> tuple[str | None, str | None]:
    """(name in BUILT_IN, format of the experts where a checkpoint's own name says it); (None, None) for a folder."""
    if text.lower() in BUILT_IN:
        return text.lower(), None
    return (None, None) if Path(text).exists() else CHECKPOINTS.get(text.lower(), (None, None))


def read(text: str | Path) -> tuple[Path, dict]:
    """models_served.read_config of what --model names; CommandError for what is none."""
    try:
        return models_served.read_config(text)
    except json_file.JsonFileError as error:
        raise CommandError(f"--model must be {KNOWN}: {error}") from error


def from_config(text: str | Path, experts: str | None) -> Model:
    """The model that a config.json describes."""
    path, found = read(text)
    architectures = found.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        raise CommandError(f"{path} is not a DeepSeek-V4 model: architectures is {architectures}, not [{ARCHITECTURE}]")
    if other := models_served.other_model(found["model_type"]):
        raise CommandError(f"{path}: nothing of it would be ours: {other}")
    missing = [key for key in (*FIELDS.values(), "num_hidden_layers", "compress_ratios") if key not in found]
    if missing:
        raise CommandError(f"{path} lacks {', '.join(missing)}")
    ratios, layers = found["compress_ratios"], found["num_hidden_layers"]
    hash_layers, dtype = found.get("num_hash_layers", 3), experts or models_served.expert_format(found) or FP4
    wrong = [key for key in (*FIELDS.values(), "num_hidden_layers") if not _is_whole(found[key], 1)]
    wrong += [] if _is_whole(hash_layers, 0) else ["num_hash_layers"]
    if wrong or not isinstance(ratios, list) or len(ratios) < layers:
        bad = wrong or ["compress_ratios (one entry a layer)"]
        raise CommandError(f"{path}: {', '.join(bad)} must be positive whole numbers")
    ratios = ratios[:layers]
    if strange := [ratio for ratio in ratios if ratio not in (0, 4, 128)]:
        raise CommandError(f"{path}: compress_ratios with {strange[0]!r:.40} are not those of DeepSeek-V4 (0, 4, 128)")
    block, stages = found.get("dspark_block_size"), found.get("dspark_target_layer_ids")
    if block is not None and not (_is_whole(block, 1) and isinstance(stages, list) and stages):
        raise CommandError(f"{path}: dspark_block_size must be a whole number, with a list dspark_target_layer_ids")
    if dtype not in (FP4, FP8):
        raise CommandError(f"{path}: experts in {dtype!r:.40} are not {FP4} or {FP8}, whose sizes are known here")
    if (blocks := models_served.sizes(found)["block"]) != BLOCKS:
        known = "dense layers in FP8 with scales of 128 x 128 weights, whose sizes are known here"
        raise CommandError(f"{path}: its quantization_config ({blocks!s:.40}) does not say {known}")
    values = {name: found[key] for name, key in FIELDS.items()}
    return Model(
        name=path.parent.name or "model",
        **values,
        layers_plain=ratios.count(0),
        layers_c4=ratios.count(4),
        layers_c128=ratios.count(128),
        hash_layers=hash_layers,
        expert_format=dtype,
        path=str(path.parent),
        dspark_block=block,
        dspark_stages=0 if block is None else len(stages),
        sees_images=models_served.sees_images(found),
        no_drafter=found.get(models_served.NO_DRAFTER),
        ratios=tuple(ratios),
    )


def _is_whole(value, least: int) -> bool:
    """A whole number that a model can have, and neither true nor false."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= GREATEST
