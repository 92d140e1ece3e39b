"""The row of table.py that is the KV compressors'.

0.5.12, 0.5.13    SGLang's: 0.5.12's call does not have the slots of the compressed entries, 0.5.12.post1 and 0.5.13
                  have them as int32, and the operator takes int64
0.5.14 to 0.5.23  decode steps are ours; the plans are the same in all of them
"""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, targets_of

MODULE = "sglang.srt.layers.attention.dsv4.compressor_v2"

COMPRESSOR = Patch(
    name="compressor",
    why="the KV compressors of a decode step: stock launches pooling and norm-rope-store apart, 124 launches a step of "
    "Flash where one each is 62; bench/compressor.py",
    targets=(
        targets_of("compressor")(
            f"{MODULE}:CompressorBackendMixin._forward_compress_all_in_one",
            "all_in_one",
            Parameters(("self",), further="keyword-only"),
            ">=0.5.14,<0.6",
        ),
    ),
    needs=(EXTENSION,),
    absent="0.5.12 and 0.5.13 do not give it the slots of the compressed entries as int64",
    retire="when stock runs a compressor's decode step in one launch (bench/compressor.py)",
)
