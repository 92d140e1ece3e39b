"""Which models our operators are for: the one table that the adapters' predicates, `status` and `doctor` ask.

Two questions. Is the model one that was ever run with us (`MODEL_TYPES`)? Of any other, DeepSeek-V4.1 among them,
nothing is touched: adapters/argument_defaults.py learns the model's type where SGLang resolves its arguments,
and device_gate.py is then closed in all processes of the server. And has it the sizes that an operator was built and
tested for (ops/shared/limits.py)? Asked at the seam, of what a call or a layer brings, and of a whole configuration by
`verdicts`.

Standard library only: `status` answers without torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from deepseek_v4_sm120.ops.shared.limits import LIMITS
from deepseek_v4_sm120.patching import json_file
from deepseek_v4_sm120.sglang_patches import stored_experts

# model_type of config.json -> its name. The operators were built for these and run with Flash's shapes.
MODEL_TYPES = {"deepseek_v4": "DeepSeek-V4"}
# Others that come through the same classes of SGLang -> (name, since when, why they are SGLang's).
OTHER_MODEL_TYPES = {
    "deepseek_v41": (
        "DeepSeek-V4.1",
        "0.5.21",
        "never run with it; its mHC (hidden 5120, pre of the sublayer before), FP8 blocks (32 x 32) and caches (ratios "
        "1 and 2) are others",
    ),
}


EXPERT_FORMAT = "_dsv4_sm120_expert_format"  # of a configuration that was read: the format of the weights beside it
NO_DRAFTER = "_dsv4_sm120_no_drafter"  # likewise: why nothing can draft with them
SEES_IMAGES = (
    "SGLang serves the text of this checkpoint alone, from 0.5.21 on: images are not read, and before, its loading "
    "ends with the names of the vision tower's weights"
)


# ---- a whole model


@dataclass(frozen=True)
class Verdict:
    operator: str
    served: bool
    why: str


def sizes(config: Mapping, tp: int = 1) -> dict[str, object]:
    """The table's sizes of a config.json for one of `tp` ranks; a size that the configuration does not tell is left
    out. DeepSeek-V4.1 has them in its text_config."""
    text = {**config, **(config.get("text_config") or {})}
    quantized = config.get("quantization_config") or {}
    block = quantized.get("weight_block_size")
    found = {
        "heads": _share(text.get("num_attention_heads"), tp),
        "head_dim": text.get("head_dim"),
        "rotated": text.get("qk_rope_head_dim"),
        "index_heads": text.get("index_n_heads"),
        "index_dim": text.get("index_head_dim"),
        "index_topk": text.get("index_topk"),
        "expert_format": expert_format(config),
        "hidden": text.get("hidden_size"),
        "inter": _share(text.get("moe_intermediate_size"), tp),
        "experts": text.get("n_routed_experts"),
        "experts_per_token": text.get("num_experts_per_tok"),
        "block": tuple(block) if isinstance(block, list) else ("none" if "hidden_size" in text else None),
        "o_lora": text.get("o_lora_rank"),
        "streams": text.get("hc_mult"),
        "pre_of_sublayer_before": text.get("hc_pre_from_prev_sublayer", config.get("model_type") == "deepseek_v41"),
    }
    if all(text.get(name) for name in ("num_attention_heads", "head_dim", "o_groups")):
        found["group_inputs"] = text["num_attention_heads"] * text["head_dim"] // text["o_groups"]
    return {name: value for name, value in found.items() if value is not None}


def expert_format(config: Mapping) -> str | None:
    """fp4, fp8, nvfp4, or the name of another method; None where nothing tells."""
    return config.get(EXPERT_FORMAT) or stored_experts.told(config)


def sees_images(config: Mapping) -> bool:
    """DeepSeek-V4-Flash-Vision-Exp, which has Flash's type and architecture; DeepSeek-V4.1 is another model."""
    return config.get("model_type") in MODEL_TYPES and bool(config.get("vision_n_layers"))


def _share(count, tp: int):
    """A rank's part; a fraction, which no limit contains, where it does not divide."""
    if not isinstance(count, int):
        return None
    return count // tp if count % tp == 0 else count / tp


def other_model(model_type: str | None) -> str | None:
    """Why nothing of a server with this model is touched; None for a model of ours, and for one that nobody told."""
    if model_type is None or model_type in MODEL_TYPES:
        return None
    if model_type in OTHER_MODEL_TYPES:
        name, _, why = OTHER_MODEL_TYPES[model_type]
        return f"{name}: {why}"
    return f"model_type {model_type} is not {' or '.join(MODEL_TYPES)}"


def verdicts(config: Mapping, tp: int = 1) -> list[Verdict]:
    """For each operator whether it serves this model, and why not."""
    other = other_model(config.get("model_type"))
    if other:
        return [Verdict(operator, False, other) for operator in LIMITS]
    given, rows = sizes(config, tp), []
    for operator, limits in LIMITS.items():
        told = [(name, given[name], limit) for name, limit in limits.items() if name in given]
        beyond = [f"{name} {value}, made for {limit}" for name, value, limit in told if value not in limit]
        rows.append(Verdict(operator, not beyond, "; ".join(beyond)))
    return rows


def read_config(path: str | Path) -> tuple[Path, dict]:
    """(its path, the config.json) of a model's folder, or of that file; JsonFileError, a sentence, for what is none.
    Of a DeepSeek-V4 with what its weights tell, where they are beside it (EXPERT_FORMAT, NO_DRAFTER)."""
    place = Path(os.path.expanduser(path))  # as it is where nobody knows the home folder
    place = place / "config.json" if place.is_dir() else place
    try:
        found = json_file.load(place)
    except json_file.JsonFileError as error:
        raise json_file.JsonFileError(f"{place} {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise json_file.JsonFileError(f"{place} is no config.json of a model: it has no model_type")
    if found["model_type"] in MODEL_TYPES and (format_ := stored_experts.stored(place.parent)) is not None:
        found[EXPERT_FORMAT] = format_
    if found["model_type"] in MODEL_TYPES and (why := _no_drafter(place.parent, found)) is not None:
        found[NO_DRAFTER] = why
    return place, found


def _no_drafter(folder: Path, config: Mapping) -> str | None:
    """Why SGLang has nothing to draft with; None where it has, as far as anything here tells."""
    layers, blocks = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if isinstance(layers, int) and stored_experts.has_drafter(folder, layers) is False:
        return f"{stored_experts.INDEX} has no tensor of a drafter ({stored_experts.MTP}...)"
    if config.get("dspark_block_size") is None and blocks != 1:  # SGLang stops, once the model is loaded
        return f"config.json has num_nextn_predict_layers {blocks}, not 1"
    return None


# ---- the model that this process serves

VARIABLE = "_DSV4_SM120_MODEL"  # what a patched parent leaves for its children; no setting of users

_UNASKED: dict = {}
_announced: dict | None = _UNASKED  # None: nobody told
_hosts_are_alike = False  # by several_hosts.py, in a rank


def announce(config: Mapping, environ: MutableMapping[str, str] = os.environ, **asked) -> None:
    """The parent, before there are children: their model, and ours from now on; and what the server was asked for that
    adapters go by (`torch_compile`, `is_looked_into`, `several_hosts`, `ranks_come_and_go`, `summing_ranks`: of a
    group whose sums may be ours)."""
    global _announced
    _announced = {"model_type": config.get("model_type"), **asked, **sizes(config)}
    environ[VARIABLE] = json.dumps(_announced)


def forget(environ: MutableMapping[str, str] = os.environ) -> None:
    """A process that begins to resolve a server's arguments: of what an earlier one was told, here or in the process
    that started this one, nothing is this server's."""
    global _announced
    _announced = None
    environ.pop(VARIABLE, None)


def announce_served_card(environ: MutableMapping[str, str] = os.environ) -> None:
    """The parent, once it has found that the cards are ours: for processes that answer without one."""
    global _announced
    told = announced(environ)
    if told is not None:
        _announced = {**told, "on_served_card": True}
        environ[VARIABLE] = json.dumps(_announced)


def announced(environ: Mapping[str, str] = os.environ) -> dict | None:
    """model_type and sizes (of TP1) of the model that this process serves, and what was asked; None: nobody told."""
    global _announced
    if _announced is _UNASKED:
        _announced = json.loads(environ[VARIABLE]) if VARIABLE in environ else None
    return _announced


def serves_this_process() -> bool:
    """False where this process is known to serve another model than ours; then every operator is SGLang's."""
    told = announced()
    return told is None or told["model_type"] in MODEL_TYPES


def _is_asked(name: str) -> bool:
    told = announced()
    return told is not None and bool(told.get(name))


def is_compiled() -> bool:
    """Whether torch.compile is to look through this model's forward (--enable-torch-compile)."""
    return _is_asked("torch_compile")


def is_looked_into() -> bool:
    """Whether functions of the user's, or SGLang's dump, are given what each layer's modules return."""
    return _is_asked("is_looked_into")


def has_several_hosts() -> bool:
    """--nnodes: ranks are on other hosts too, where nobody knows whether they have us."""
    return _is_asked("several_hosts")


def know_that_hosts_are_alike() -> None:
    """In a rank that has seen that all others run what it runs."""
    global _hosts_are_alike
    _hosts_are_alike = True


def may_have_unlike_hosts() -> bool:
    """Whether a rank of this server may be without us, or run something else of ours: with several hosts, of which not
    all have told."""
    return has_several_hosts() and not _hosts_are_alike


def has_ranks_that_come_and_go() -> bool:
    """Elastic expert parallelism: a rank may end and another take its place while the others go on."""
    return _is_asked("ranks_come_and_go")


def has_served_card() -> bool:
    """Whether this server has a model and cards of ours, as far as its parent told; asks no GPU."""
    return serves_this_process() and _is_asked("on_served_card")
