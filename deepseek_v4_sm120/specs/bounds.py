"""What is allowed of each operator's results: one number for each meaning, and where it comes from.

Servers read it for shadow mode, so it imports nothing of reference/. Errors are relative L2 unless a line says
otherwise; what was measured is in docs/measured.md and bench/results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """truth   of ours against float64
    shadow  of ours against SGLang's own result of the same call: shadow mode counts a call above it as bad
    others  of anybody's against float64: beyond it an implementation is broken, not coarse (calibrate)
    """

    truth: float
    shadow: float
    others: float


REFERENCES_AGREE = 1e-12  # of two float64 formulations

# The same bits as the specification. Shadow and others: sums that are rounded to bf16 at every hop, up to seven times,
# give 0.001 to 0.002.
ALL_REDUCE = Bound(truth=0.0, shadow=0.004, others=0.01)
ALL_GATHER = 0.0  # of a gather against SGLang's: both only move what is there

# Float32 sums in another order give 2.5e-7. Shadow: two bf16 roundings of the same float32 sum, where out is bf16.
BF16_LINEAR = Bound(truth=1e-5, shadow=0.004, others=0.01)
BF16_LINEAR_BF16_OUT = 0.0025  # its rounding is up to 0.0022 over few outputs

# Of entries, the cache's rounding in them: E4M3 with a scale for 64 numbers gives 0.026 over many; others: of one entry
# alone, of the indexer's 128 numbers, up to 0.032. Shadow: the same bits as the two kernels of 0.5.20 and later. Those
# before merge the 128 tokens of a group in another order: of an entry's 512 numbers, one or two are then a quantisation
# step away, 0.003 to 0.005.
COMPRESSOR = Bound(truth=0.03, shadow=0.01, others=0.04)
COMPRESSOR_FP4 = 0.15  # E2M1 with a scale for 32 gives 0.123
COMPRESSOR_STORED = 0.02  # against the reference's own rounding: a number in some thousand falls on its other side

# Bf16 out: 0.0017 over a thousand outputs and more, up to 0.0022 over a few hundred. Shadow and others: a product whose
# activations are rounded to E4M3, which for what is normally distributed gives 0.026 to 0.04, with float32 as with
# power-of-two scales.
FP8_LINEAR = Bound(truth=0.0025, shadow=0.06, others=0.06)
FP8_LINEAR_WIDE = 0.002  # of ours, from 1024 outputs on

# Bf16 out of float32. Shadow: another order of the sum of squares turns a rounding now and then.
LATENT_NORM = Bound(truth=0.0025, shadow=0.002, others=0.01)

# Two norms, two products and their sum, each rounded to bf16: 0.0027. Shadow: products of activations in E4M3.
DRAFT_INPUT = Bound(truth=0.0035, shadow=0.06, others=0.06)

# Of a draft's logits. Truth: of ours against float64 of its own INT4 weights. Shadow: the weights' rounding, 0.1
# where they are normally distributed; nobody has compared a checkpoint's.
DRAFT_HEAD = Bound(truth=0.001, shadow=0.2, others=0.2)

# Not relative L2: a logit's error as a share of its row's greatest logit. Truth: fp32 sums of 8192 exact products, as
# f16 and bf16 MMA make them. Shadow: DeepGEMM's FP8 sums on Hopper keep about 13 bits. Others: how far below the k-th
# greatest an entry may lie that they choose.
INDEX_SELECT = Bound(truth=2e-6, shadow=1e-3, others=0.01)
# Truth where FP8 MMA is native (SM120): its sums may keep fewer bits. On an H200, which emulates it, 1.4e-7.
INDEX_SELECT_NATIVE_FP8 = 1e-3

# Streams and y, which are bf16. Shadow: roundings that fall the other way give about 0.001; stock's TF32 mixes (above
# 32 rows, and everywhere but on SM120) give y and the coefficients about as much.
MHC = Bound(truth=0.0025, shadow=0.004, others=0.01)
MHC_COEFFICIENTS = 5e-6  # post and comb, float32

# W4A16: bf16 h and bf16 out, nothing coarser, give 0.0029. Shadow: Marlin also rounds gate and up, each expert's
# output, and what it sums. Others: MXFP8 activations alone are 0.03 to 0.05.
MXFP4_MOE = Bound(truth=0.004, shadow=0.008, others=0.08)
MXFP4_MOE_MXFP8 = Bound(truth=0.06, shadow=0.08, others=0.08)  # ours with MXFP8 activations, and against stock's
MXFP4_MOE_MXFP8_ROUNDED = 0.01  # the same against float64 of activations rounded to MXFP8

# Of the weights. Truth: approximate exp2, square root and division give 2e-7; the sum before 0.5.20, log(1 + exp(x)),
# more where logits are below -5. Shadow: the same bits, or a last one where Triton adds up in another order.
ROUTER_TOPK = Bound(truth=1e-5, shadow=1e-6, others=1e-3)

# Bf16 output and bf16 softmax weights, nothing coarser: 0.0018 of few rows, 0.0023 of prompts. Shadow: two roundings of
# each explain about 0.0015. Others, and shadow beside them: FlashInfer's kernels, stock's own from 0.5.15 on, round Q
# and P to E4M3, which by their arithmetic gives 0.03 of what is normally distributed (prompts, whose Q they leave:
# 0.02), 0.05 where heads look at one token by logits of 100 and more, and of single rows 0.08.
SPARSE_DECODE = Bound(truth=0.003, shadow=0.004, others=0.08)
SPARSE_DECODE_LSE = 1e-4
SPARSE_DECODE_KERNELS = 0.0026  # our two kernels against each other: two bf16 roundings each
SPARSE_DECODE_REFERENCES = 2e-6  # a float32 online softmax against float64

# Bf16 out, and x rotated, a product of bf16 weights that are expanded, or both: 0.0017 to 0.0024. Shadow: two products
# of the same bf16 numbers.
WO_A = Bound(truth=0.0025, shadow=0.004, others=0.01)
