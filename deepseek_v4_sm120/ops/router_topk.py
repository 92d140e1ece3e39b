"""Public router top-k, one kernel and no scratch, and the argmax of long rows: checks the arguments, launches."""

from __future__ import annotations

import torch

from deepseek_v4_sm120.ops.shared import cuda_tensors, extension, triton_version
from deepseek_v4_sm120.ops.shared.checks import FP32, INT32, VECTOR, Call, Question
from deepseek_v4_sm120.ops.shared.limits import LIMITS

MAX_EXPERTS, MAX_TOPK = (LIMITS["router_topk"][name].most for name in ("experts", "experts_per_token"))
IN_PAIRS_SINCE = (3, 8)  # the first Triton that adds up a lane's numbers so
_DTYPES = (torch.float32, torch.bfloat16)
PART_NUMBERS = 4096  # of row_argmax's blocks; argmax.h has it too, and a test compares
MOST_ROWS = 65_535
_STRIDES = 4  # that row_argmax's rows have multiples of: 16 bytes


def router_topk(router_logits, bias, topk, *, log1p=True, renormalize=True, scale=1.0, real_rows=None, in_pairs=True):
    """A row's experts: those with the greatest sqrt(softplus(logit)) + bias, and their weights, without the bias.

    router_logits
                 [rows, experts] float32 or bf16, 1 to 512 experts, last dim contiguous
    bias         [experts] float32 or bf16, contiguous
    topk         1 to 8, at most as many as there are experts
    log1p        softplus(x) = max(x, 0) + log1p(exp(-|x|)); False: log(1 + exp(x)), which is 0 below -16.6, and x
                 above 20. What SGLang computes from 0.5.20 on, and before
    renormalize  weights of a row are divided by their sum, if it is positive
    scale        factor of the weights behind that
    real_rows    [1] int32: rows from there on have ids -1 and weights 0; or None
    in_pairs     a row's weights are added up as ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), as by Triton 3.8 and later;
                 False: (((0 + 1) + 2) + 3) + (((4 + 5) + 6) + 7), as before. Where there are no more, 0
    returns      (weights [rows, topk] float32, ids [rows, topk] int32), greatest first; of equal ones the lowest id.
                 NaN ranks as -1e30
    accuracy     ids and weights are those of SGLang's Triton kernel to the bit, with the order in which its Triton adds
                 up a row's weights for logits that are float32, aligned and 64 or more; weights below 1e-5 of
                 float64's, relative L2
    determinism  the same bits in every run and every batch
    raises       TypeError (dtype), ValueError (shape, stride, alignment, overlap, value), RuntimeError (device,
                 launch)
    cuda graphs  capture-safe: no host sync, no scratch; allocates the results through torch
    source       SGLang's moe_fused_gate with scoring_func "sqrtsoftplus"
    """
    check = Call("router_topk", "router_logits", router_logits)
    rows, experts = check.tensor("router_logits", router_logits, _DTYPES, "rows, experts", 1)
    check.tensor("bias", bias, _DTYPES, (experts,))
    if not 1 <= experts <= MAX_EXPERTS:
        check.refuse("shape", "router_logits", f"have 1 to {MAX_EXPERTS} experts", experts)
    if topk not in range(1, min(MAX_TOPK, experts) + 1):
        check.refuse("value", "topk", f"be 1 to {min(MAX_TOPK, experts)}", topk)
    if real_rows is not None:
        check.tensor("real_rows", real_rows, INT32, (1,))
    check.on_cuda()
    weights = torch.empty((rows, topk), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((rows, topk), dtype=torch.int32, device=router_logits.device)
    if rows:
        with cuda_tensors.on_device_of(router_logits):
            _launch(router_logits, bias, weights, ids, log1p, renormalize, scale, real_rows, in_pairs)
    return weights, ids


def row_argmax(x):
    """The place of each row's greatest number: the first of equal ones, both zeros being equal, and a NaN before all.

    x         [rows, columns] float32, last dim contiguous, row stride and columns multiples of 4; 0 to 65,535 rows
    returns   [rows] int64: torch.argmax's, which has one block for a row where this has one for 4,096 numbers

    Exact, so the same in every run and every batch; errors and graphs as router_topk's, with scratch of torch's.
    Source: torch.argmax of CUDA tensors; made for the logits of a step.
    """
    check = Call("row_argmax", "x", x)
    rows, columns = check.tensor("x", x, FP32, "rows, columns", _STRIDES, VECTOR)
    if rows > MOST_ROWS or columns < 1 or columns % _STRIDES:
        check.refuse("shape", "x", f"have at most {MOST_ROWS} rows of a multiple of {_STRIDES} numbers", tuple(x.shape))
    check.on_cuda()
    out = torch.empty(rows, dtype=torch.int64, device=x.device)
    if rows:
        parts = torch.empty(rows * -(-columns // PART_NUMBERS), dtype=torch.int64, device=x.device)
        with cuda_tensors.on_device_of(x):
            extension.load().row_argmax(
                x=x.data_ptr(),
                x_stride=x.stride(0),
                parts=parts.data_ptr(),
                out=out.data_ptr(),
                rows=rows,
                columns=columns,
                pdl=True,
                stream=cuda_tensors.current_stream(x.device.index),
            )
    return out


def takes_row_argmax(x) -> bool:
    """True where row_argmax takes these; an adapter asks before it replaces a call."""
    ask = Question("row_argmax", "x", x)
    return bool(
        x.ndim == 2
        and 0 < x.shape[0] <= MOST_ROWS
        and x.shape[1] > 0
        and x.shape[1] % _STRIDES == 0
        and ask.tensor("x", x, FP32, x.shape, _STRIDES, VECTOR)
    )


def triton_adds_in_pairs() -> bool:
    """What `in_pairs` is for the bits of the Triton that is here."""
    return triton_version.is_at_least(*IN_PAIRS_SINCE)


def takes(router_logits, bias, topk, real_rows) -> bool:
    """True where router_topk computes this; an adapter asks before it replaces a call."""
    if router_logits.ndim != 2 or not 1 <= router_logits.shape[1] <= MAX_EXPERTS:
        return False
    shape, ask = router_logits.shape, Question("router_topk", "router_logits", router_logits)
    return bool(
        1 <= topk <= min(MAX_TOPK, shape[1])
        and ask.tensor("router_logits", router_logits, _DTYPES, shape, 1)
        and ask.tensor("bias", bias, _DTYPES, shape[1:])
        and (real_rows is None or ask.tensor("real_rows", real_rows, INT32, (1,)))
    )


def _launch(logits, bias, weights, ids, log1p, renormalize, scale, real_rows, in_pairs) -> None:
    """Checked arguments to raw pointers; logits' device is current."""
    extension.load().router_topk(
        logits=logits.data_ptr(),
        logits_stride=logits.stride(0),
        logits_bf16=logits.dtype == torch.bfloat16,
        bias=bias.data_ptr(),
        bias_bf16=bias.dtype == torch.bfloat16,
        weights=weights.data_ptr(),
        ids=ids.data_ptr(),
        real_rows=0 if real_rows is None else real_rows.data_ptr(),
        scale=float(scale),
        log1p=bool(log1p),
        renormalize=bool(renormalize),
        in_pairs=bool(in_pairs),
        rows=logits.shape[0],
        experts=logits.shape[1],
        topk=ids.shape[1],
        pdl=True,
        stream=cuda_tensors.current_stream(logits.device.index),
    )
