"""The sizes that each operator was built and tested for: adapters ask them of a call or a layer, `status` of a model.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEP_ROWS = 256  # of a dense layer, of a step at most: decode, speculative verification or drafts; a prompt has more


@dataclass(frozen=True)
class OneOf:
    values: tuple

    def __contains__(self, value) -> bool:
        return value in self.values

    def __str__(self) -> str:
        words = [str(list(value)) if isinstance(value, tuple) else str(value) for value in self.values]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@dataclass(frozen=True)
class MultipleOf:
    step: int
    most: int | None = None

    def __contains__(self, value) -> bool:
        return value > 0 and value % self.step == 0 and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        multiple = "at least 1" if self.step == 1 else f"a multiple of {self.step}"
        return multiple if self.most is None else f"{multiple}, at most {self.most}"


Limit = OneOf | MultipleOf

# operator (or a part of it) -> name of a size -> what was built and tested. Sizes are a rank's own, after tensor
# parallelism; what a name means: `sizes` of
# sglang_patches/models_served.py.
LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "sparse_decode": {"heads": MultipleOf(1, 128), "head_dim": OneOf((512,))},
    "index_select": {"index_heads": OneOf((64,)), "index_dim": OneOf((128,)), "index_topk": MultipleOf(1, 1024)},
    "mxfp4_moe": {
        "expert_format": OneOf(("fp4",)),
        "hidden": OneOf((4096, 7168)),
        "inter": OneOf((256, 384, 512, 768, 1024, 1536, 2048, 3072)),
        "experts": MultipleOf(1, 512),
        "experts_per_token": MultipleOf(1, 12),
    },
    "bf16_linear": {"hidden": MultipleOf(512), "experts": MultipleOf(4)},
    "router_topk": {"experts": MultipleOf(1, 512), "experts_per_token": MultipleOf(1, 8)},
    "fp8_linear": {"block": OneOf(((128, 128),))},
    "wo_a": {
        "block": OneOf(((128, 128),)),
        "head_dim": OneOf((512,)),
        "rotated": OneOf((64,)),
        "o_lora": MultipleOf(128),
        "group_inputs": MultipleOf(512),
    },
    "mhc": {"hidden": OneOf((4096, 7168)), "streams": OneOf((4,)), "pre_of_sublayer_before": OneOf((False,))},
    "all_reduce": {"hidden": OneOf((4096, 7168))},
    "compressor": {"head_dim": OneOf((512,)), "rotated": OneOf((64,)), "index_dim": OneOf((128,))},
}


def takes(operator: str, **given) -> bool:
    """True where all the sizes that are given are ones the operator was built and tested for; KeyError for others."""
    limits = LIMITS[operator]
    return all(value in limits[name] for name, value in given.items())
