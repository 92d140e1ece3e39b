"""The targets of fp8_linear's row in table.py beside the product itself: what is put off to it.

All versions have the same three places:

    silu_and_mul_clamp    0.5.12 to 0.5.20 import it from their DeepSeek-V4 kernels, 0.5.21 and 0.5.22 from their MoE
                          kernels, 0.5.23 from its activations; one kernel in all. It is called in DeepseekV2MLP.forward
                          where the model has a swiglu_limit; without one SGLang calls SiluAndMul, which stays
    the latent norm       q_norm, made by MQALayer.__init__ and called from two to five places of the attention. The
                          kernels of 0.5.21 and later for DeepSeek-V4.1 do without it, and that model is left alone; so
                          is DSpark's attention, which is another class
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.sglang_patches.names import ATTENTION, targets_of
from deepseek_v4_sm120.sglang_patches.rows.wo_a import INIT_PARAMETERS

MLP_MODEL = "sglang.srt.models.deepseek_v2"
MLP_FORWARD = f"{MLP_MODEL}:DeepseekV2MLP.forward"
SILU_AND_MUL_CLAMP = f"{MLP_MODEL}:silu_and_mul_clamp"


_target = targets_of("fp8_linear")
PROLOGUES = (
    _target(MLP_FORWARD, "mlp_forward", Parameters(("self",), further="any")),
    _target(SILU_AND_MUL_CLAMP, "silu_and_mul_clamp", Parameters(("input", "output", "swiglu_limit"))),
    _target(f"{ATTENTION}.__init__", "attention_init", INIT_PARAMETERS),
)
