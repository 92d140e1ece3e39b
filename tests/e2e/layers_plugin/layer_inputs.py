"""SGLang plugin (entry point group sglang.srt.plugins): records stock SGLang's layers as DSV4_SM120_LAYERS has ours
recorded, by the same code, in $E2E_LAYERS."""

import os
import pathlib
import sys

REPO = pathlib.Path(__file__).resolve().parents[3]
TARGET, DRAFT = "sglang.srt.models.deepseek_v4", "sglang.srt.models.deepseek_v4_nextn"
HOOKED = {  # what is recorded -> the function
    "model": f"{TARGET}.DeepseekV4Model.forward",
    "draft": f"{DRAFT}.DeepseekV4ModelNextN.forward",
    "attention": f"{TARGET}.MQALayer.forward",
    "experts": "sglang.srt.models.deepseek_v2.DeepseekV2MoE.forward",
    "block": "sglang.srt.models.deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark.forward",
    "draft_attention": "sglang.srt.models.deepseek_v4_dspark.DSparkAttention.forward",
    "runner": "sglang.srt.model_executor.model_runner.ModelRunner.forward",
}


def hooks(folder):
    """{function: what SGLang calls in its place, with the function itself in front}."""
    sys.path.append(str(REPO))
    from deepseek_v4_sm120.sglang_patches.layer_record import Recorder, hooks_of

    own = Recorder(folder, serves=lambda device: True)
    replaced = hooks_of(lambda: own)

    def around(replace):
        return lambda original, *args, **kwargs: replace(original)(*args, **kwargs)

    return {HOOKED[name]: around(replace) for name, replace in replaced.items()}


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if folder := os.environ.get("E2E_LAYERS"):
        for target, hook in hooks(folder).items():
            HookRegistry.register(target, hook, HookType.AROUND)
