"""Fast DeepSeek-V4 for SGLang on NVIDIA SM120, applied at run time. Importing this package imports nothing else."""

__version__ = "0.1.0"
RECORD = f"deepseek_v4_sm120-{__version__}.dist-info/RECORD"  # the build's list of its files, beside this folder

# settings.py says what they are
REPORT, PROFILE, LAYERS = "DSV4_SM120_REPORT", "DSV4_SM120_PROFILE", "DSV4_SM120_LAYERS"

# The operators; each name is the same in csrc/, ops/, reference/, specs/, sglang_patches/adapters/, tests/ and bench/.
OPS = (
    "sparse_decode",
    "index_select",
    "mxfp4_moe",
    "bf16_linear",
    "router_topk",
    "fp8_linear",
    "wo_a",
    "mhc",
    "compressor",
    "all_reduce",
)
