"""The rows of table.py that are the small bf16 products'."""

from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import Patch
from deepseek_v4_sm120.sglang_patches.names import EXTENSION, INDEXER, targets_of

COMPRESSORS_PRODUCT = "sglang.srt.layers.attention.dsv4.compressor:linear_bf16_fp32"
PRODUCT = Parameters(("x", "y"), further="any", imported=True)
_projection = targets_of("bf16_linear")

BF16_LINEAR = Patch(
    name="bf16_linear",
    why="the bf16 projections of compressors, router and indexer for up to 256 rows: cuBLAS takes two launches "
    "(split-K and its reduction) and a multiple of the time that the bytes need (256 experts and up to 16 rows: "
    "SGLang's own router, one launch, not compared), and a row's bits change with their number; bench/bf16_linear.py",
    targets=(
        _projection(COMPRESSORS_PRODUCT, "linear_bf16_fp32", PRODUCT),
        _projection(
            "sglang.srt.models.deepseek_v2:MoEGate.forward",
            "gate",
            Parameters(("self", "hidden_states", "gemm_output_zero_allocator=None", "forward_batch=None")),
        ),
        _projection(
            f"{INDEXER}:C4Indexer.compute_weights", "compute_weights", Parameters(("self", "x", "skip_scale=False"))
        ),
    ),
    needs=(EXTENSION,),
    retire="when the stock projections are as fast on SM120 (bench/bf16_linear.py)",
)

DEALT_PRODUCTS = Patch(
    name="dealt_products",
    why="the compressors are replicated: under tensor parallelism every card reads all of their weights in each step, "
    "0.5 GB of an SM120's 6.1 at two cards. Each multiplies its share of the outputs, and the sums are gathered",
    targets=(  # behind bf16_linear's, which it wraps
        targets_of("bf16_linear_dealt")(COMPRESSORS_PRODUCT, "linear_bf16_fp32", PRODUCT, ">=0.5.14,<0.6"),
    ),
    needs=(EXTENSION,),
    default="dealt_products",
    serves="bf16_linear",
    absent="the gather's group is all_reduce's (0.5.13 and later), and what follows it must be our compressor (0.5.14)",
    retire="when SGLang divides the compressors' weights itself",
)
