"""The row of sglang_patches.py that is the compressors': a decode step of each as one launch.

What each version has, and what is left to it:

    0.5.12            the same method, but it asks for the slots itself and they are int32: its own two launches
    0.5.14 to 0.5.18  the slots are an argument; SGLANG_OPT_USE_COMPRESSOR_V2=0 (0.5.14) takes another class, which is
                      SGLang's. Groups of 128 are merged in another order than ours, see ops/compressor.py
    0.5.20            arguments for AMD's caches, which must be as they are elsewhere; groups of 128 merged as ours
    0.5.23            a layout for DeepSeek-V4.1, which is SGLang's
    all               prompts, speculative verification, running sums (SGLANG_OPT_USE_ONLINE_COMPRESS), a bf16 state and
                      more than 512 rows are SGLang's

The method takes keywords only; one that the adapter does not know makes the call SGLang's, so a release that adds one
is served as far as it leaves the new one out.
"""

from deepseek_v4_sm120.patching.contract import Bound
from deepseek_v4_sm120.patching.spec import Patch, Target

MODULE = "sglang.srt.layers.attention.dsv4.compressor_v2"

COMPRESSOR = Patch(
    name="compressor",
    why="the KV compressors of a decode step: stock launches pooling and norm-rope-store apart, 124 launches a step of "
    "Flash where one each is 62; bench/compressor.py",
    targets=(
        Target(
            where=f"{MODULE}:CompressorBackendMixin._forward_compress_all_in_one",
            sglang=">=0.5.13,<0.6",
            contract=Bound(),
            replacement="deepseek_v4_sm120.sglang_adapters.compressor:replace_all_in_one",
            reviewed={
                "0.5.14": "ce874846d82c8e88",
                "0.5.17": "ce874846d82c8e88",
                "0.5.20": "d55ad259ec4774c7",
                "0.5.23": "37ff8ec2d4655c46",
            },
        ),
    ),
    needs=("deepseek_v4_sm120.extension:load",),
    modes=("sm120", "ops", "seams"),
    retire="when stock runs a compressor's decode step in one launch (bench/compressor.py)",
)
