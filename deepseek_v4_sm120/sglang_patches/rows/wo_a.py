"""The rows of table.py that are wo_a's: its weights stay E4M3, and `ops.wo_a` multiplies with them.

What each version has, and what is left to it:

    0.5.12 to 0.5.16  wo_a expanded to bf16 at load where the checkpoint has its scales, multiplied by einsum in the
                      attention's forward. 0.5.12's own default, FP8 through DeepGEMM, does not run on SM120 (a default
                      of ours turns it off, so that there is a bf16 layer to replace)
    0.5.17, 0.5.18    the expansion is a stream of its own
    0.5.19, 0.5.20    the product is a function of the model's that ends in the same einsum
    0.5.21 to 0.5.23  the same, with kernels of its own for DeepSeek-V4.1, which is SGLang's; SGLANG_OPT_FP8_WO_A_GEMM=1
                      can be asked for on SM120: then wo_a is E4M3, and DeepGEMM's, already. From 0.5.22 on the
                      forward can leave the all-reduce to its caller (defer_all_reduce), which is handed through
    all               DSpark's attention (0.5.16 and later) keeps its bf16 wo_a
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import ATTENTION, EXTENSION, MODEL, direct_updates, handed_over, targets_of

LOAD_WEIGHTS = f"{MODEL}:DeepseekV4ForCausalLM.load_weights"
EXPANSION = f"{MODEL}:_dequant_fp8_wo_a_streaming"
ROPE = f"{MODEL}:fused_rope_inplace"

INIT_PARAMETERS = Parameters(
    ("self", "config", "layer_id", "quant_config=...", "prefix=...", "alt_streams=...", "compress_ratio_override=...")
)


_target = targets_of("wo_a")

WO_A = Patch(
    name="wo_a",
    why="the output projection's first half: stock expands it to bf16 at load and reads twice the bytes, 0.72 GB more "
    "a step and card on 2 cards, behind a launch that rotates its input; bench/wo_a.py",
    targets=(
        *direct_updates(_target, "direct"),
        *handed_over(),
        _target(f"{ATTENTION}.__init__", "init", INIT_PARAMETERS),
        _target(LOAD_WEIGHTS, "load_weights", Parameters(("self", "weights", "is_nextn=..."))),
        _target(EXPANSION, "expansion", Parameters(("weights",), is_generator=True), ">=0.5.17,<0.6"),
        _target(ROPE, "rope", Parameters(("q", "k", "freqs_cis", "positions", "inverse=False"), imported=True)),
        _target(f"{ATTENTION}.forward", "forward", Parameters(("self",), further="any")),
    ),
    needs=(EXTENSION,),
    retire="when stock keeps wo_a in FP8 on SM120 and is faster (bench/wo_a.py)",
)
