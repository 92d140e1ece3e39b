"""The rows of sglang_patches.py that are wo_a's: its weights stay E4M3, and `ops.wo_a` multiplies with them.

What each version has, and what is left to it:

    0.5.12, 0.5.14    wo_a expanded to bf16 at load where the checkpoint has its scales, multiplied by einsum in the
                      attention's forward. 0.5.12's own default, FP8 through DeepGEMM, does not run on SM120 (a setting
                      of ours turns it off, so that there is a bf16 layer to replace)
    0.5.17            the expansion is a stream of its own; so, as far as we use it, in 0.5.15 and 0.5.16, not looked at
    0.5.20            the product is a function of the model's that ends in the same einsum
    0.5.23            the same, with kernels of its own for DeepSeek-V4.1, which is SGLang's; SGLANG_OPT_FP8_WO_A_GEMM=1
                      can be asked for on SM120 from 0.5.21 on: then wo_a is E4M3, and DeepGEMM's, already
    all               DSpark's attention (0.5.17 and later) keeps its bf16 wo_a
"""

from deepseek_v4_sm120.patching.contract import Bound, Contract, Parameters
from deepseek_v4_sm120.patching.spec import Patch, Target

MODEL = "sglang.srt.models.deepseek_v4"
ATTENTION = f"{MODEL}:MQALayer"
LOAD_WEIGHTS = f"{MODEL}:DeepseekV4ForCausalLM.load_weights"
EXPANSION = f"{MODEL}:_dequant_fp8_wo_a_streaming"
ROPE = f"{MODEL}:fused_rope_inplace"

INIT_PARAMETERS = Parameters(
    ("self", "config", "layer_id", "quant_config", "prefix", "alt_streams", "compress_ratio_override")
)
INIT_REVIEWED = {
    "0.5.12": "2dfc49215092792e",
    "0.5.14": "aeccbc43f367c9e5",
    "0.5.17": "42753079dcb4c9b5",
    "0.5.20": "c1e0120be55567f5",
    "0.5.23": "d8b52397869139d9",
}
OLD_FORWARD_PARAMETERS = Parameters(("self", "x", "positions", "forward_batch"))
FORWARD_PARAMETERS = Parameters((*OLD_FORWARD_PARAMETERS.names, "x_quant"))
DEFERRING_FORWARD_PARAMETERS = Parameters((*FORWARD_PARAMETERS.names, "defer_all_reduce"))
FORWARD_VERSIONS = (  # of MQALayer.forward: (versions, contract, digests of what was read)
    (">=0.5.12,<0.5.13", OLD_FORWARD_PARAMETERS, {"0.5.12": "cc08aae75e2da626"}),
    (
        ">=0.5.13,<0.5.23",
        FORWARD_PARAMETERS,
        {"0.5.14": "358c5b08bdbb51e7", "0.5.17": "05f2d699962ee20a", "0.5.20": "3e9882b52725952e"},
    ),
    (">=0.5.23,<0.6", DEFERRING_FORWARD_PARAMETERS, {"0.5.23": "1fab66a44a735bf3"}),
)


def _target(where: str, replacement: str, sglang: str, contract: Contract, reviewed: dict[str, str]) -> Target:
    return Target(
        where=where,
        sglang=sglang,
        contract=contract,
        replacement=f"deepseek_v4_sm120.sglang_adapters.wo_a:replace_{replacement}",
        reviewed=reviewed,
    )


WO_A = Patch(
    name="wo_a",
    why="the output projection's first half: stock expands it to bf16 at load and reads twice the bytes, 0.72 GB more "
    "a step and card on 2 cards, behind a launch that rotates its input; bench/wo_a.py",
    targets=(
        _target(
            f"{ATTENTION}.__init__",
            "init",
            ">=0.5.12,<0.6",
            INIT_PARAMETERS,
            INIT_REVIEWED,
        ),
        _target(
            LOAD_WEIGHTS,
            "load_weights",
            ">=0.5.12,<0.6",
            Parameters(("self", "weights", "is_nextn")),
            {
                "0.5.12": "93818dc9b3032477",
                "0.5.14": "1d94b9fed7e8dcdb",
                "0.5.17": "a4ec1e85bd8fc5ae",
                "0.5.20": "f66e25c0c20ddc05",
                "0.5.23": "16c75c10b320f37e",
            },
        ),
        _target(
            EXPANSION,
            "expansion",
            ">=0.5.17,<0.6",
            Parameters(("weights",)),
            dict.fromkeys(("0.5.17", "0.5.20", "0.5.23"), "e5956aab596e8274"),
        ),
        _target(
            ROPE,
            "rope",
            ">=0.5.12,<0.6",
            Bound(),
            {
                "0.5.12": "6def302fc61ff600",
                "0.5.14": "837c6690be8862d8",
                **dict.fromkeys(("0.5.17", "0.5.20", "0.5.23"), "ccba08a6e6f434c7"),
            },
        ),
        *(_target(f"{ATTENTION}.forward", "forward", *version) for version in FORWARD_VERSIONS),
    ),
    needs=("deepseek_v4_sm120.extension:load",),
    modes=("sm120", "ops", "seams"),
    retire="when stock keeps wo_a in FP8 on SM120 and is faster (bench/wo_a.py)",
)
