"""SGLang plugin (entry point group sglang.srt.plugins): on a Hopper card, what our operators take on SM120 alone.

E2E_AS_SM120 names it, comma-separated:

wide        prompts' experts in bf16, as every card has them: nothing is changed, they are counted
scaled      prompts' experts with MXFP8 activations, whose products are bf16's here. Marlin's method asks for them as
            FlashInfer's does, so that shadow mode has an original which runs here, with the bound of MXFP8
fp8_index   the indexer's products in FP8
fp4_cache   --enable-deepseek-v4-fp4-indexer may be asked for: SGLang's arguments refuse an index cache in FP4 here, but
            its kernels that write it run
sms=N       launches planned for N multiprocessors, fewer than the card has

The report's `found` has under FOUND the calls above 256 rows by each kernel. Dummy weights of a method that wants up in
front of gate are swapped: all methods compute the same then.
"""

import functools
import os

VARIABLE, FOUND = "E2E_AS_SM120", "experts_above_256_rows"
KERNELS = {"_sorted_rows": "wide", "_scaled_rows": "scaled"}  # of ops.mxfp4_moe
DUMMY_WEIGHTS = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
W13 = ("w13_weight", "w13_weight_scale_inv")
HOPPER = 9
counts = {}


def is_power_of_two(number):
    return number & (number - 1) == 0


def counting(name, original):
    from deepseek_v4_sm120.patching import report

    @functools.wraps(original)
    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        kernel = "exact" if kwargs.get("exact") else name
        counts[kernel] = counts.get(kernel, 0) + 1
        if is_power_of_two(counts[kernel]):
            report.write()
        return result

    return call


def count():
    from deepseek_v4_sm120.ops import mxfp4_moe
    from deepseek_v4_sm120.patching import report

    for function, name in KERNELS.items():
        setattr(mxfp4_moe, function, counting(name, getattr(mxfp4_moe, function)))
    report.add_note(FOUND, lambda: f"experts above 256 rows: {counts}", lambda: dict(counts))


def scaled():
    from deepseek_v4_sm120.ops import mxfp4_moe as op
    from deepseek_v4_sm120.sglang_patches.adapters import mxfp4_moe as adapter

    op.BLOCK_SCALED_MAJOR = HOPPER
    adapter.replace_marlin_process = adapter.replace_cutlass_process
    adapter.replace_marlin_apply = adapter.replace_cutlass_apply


def fp8_index():
    from deepseek_v4_sm120.ops import index_select

    index_select.has_fp8_mma = lambda index: True


def fp4_cache():
    from sglang.srt.arg_groups import serving_hook

    serving_hook.is_gfx95_supported = lambda: True  # in that file's refusal alone


def planned_for(sms):
    from deepseek_v4_sm120.ops.shared import cuda_tensors

    cuda_tensors.num_sms = lambda index: sms


def swapped(_result, model, *_, **__):
    """Behind the dummy weights: gate and up change places where a method loads them so."""
    import torch

    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "load_up_proj_weight_first", False):
            for name in W13:
                rows = getattr(module, name).data.view(torch.uint8)
                rows.copy_(torch.cat(rows.chunk(2, dim=1)[::-1], dim=1))


CHOICES = {"wide": lambda: None, "scaled": scaled, "fp8_index": fp8_index, "fp4_cache": fp4_cache}


def register():
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    count()
    for word in asked.split(","):
        name, _, number = word.partition("=")
        planned_for(int(number)) if name == "sms" else CHOICES[name]()
    HookRegistry.register(DUMMY_WEIGHTS, swapped, HookType.AFTER)
