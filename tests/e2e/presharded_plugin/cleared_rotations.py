"""SGLang plugin (entry point group sglang.srt.plugins): --load-format presharded for DeepSeek-V4, which SGLang alone
does not start with.

For the name of its folder SGLang makes the model on "meta", and forgets of that what its own rotations have cached; the
model's `precompute_freqs_cis` keeps them by its arguments alone (0.5.17 to 0.5.23), so the model that serves gets
tensors without data. Here they are forgotten, too.
"""

import importlib
import importlib.util

SIGNATURE = "sglang.srt.model_loader.loader.PreshardedModelLoader._compute_structural_signature"
OPERATORS = "sglang.kernels.ops.attention"
PLACES = (f"{OPERATORS}.dsv4.rope", f"{OPERATORS}.deepseek_v4_rope")  # from 0.5.23 on, before
TABLES = ("precompute_freqs_cis", "precompute_cos_sin_table")


def is_there(name):
    package = name.rpartition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None


def forget(*_, **__):
    (place,) = filter(is_there, PLACES)
    module = importlib.import_module(place)
    for name in TABLES:
        if hasattr(module, name):
            getattr(module, name).cache_clear()


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SIGNATURE, forget, HookType.AFTER)
