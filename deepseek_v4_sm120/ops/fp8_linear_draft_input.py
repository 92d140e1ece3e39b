"""What a draft's block begins with: two norms, two products and their sum, in four launches.

SGLang makes eight of it, and an embedding in front: each norm, each product, what adds up a product's parts, the sum.
Here one launch has both norms and reads the embedding's row itself, and one adds the parts of both products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import fp8_linear as linear
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.ops.shared.checks import BF16, CONTIGUOUS, POSITIONS, VECTOR, Call, Question

NORM_STEP, MOST_INPUTS = 256, 8192  # inputs of a norm; draft.h has them too, and a test compares


@dataclass(frozen=True)
class Half:
    """A norm and the product behind it.

    norm          [inputs] bf16, contiguous
    eps           0 or more
    weight        [outputs, inputs] E4M3, and weight_scale, as fp8_linear's
    """

    norm: torch.Tensor
    eps: float
    weight: torch.Tensor
    weight_scale: torch.Tensor


def draft_input(hidden, embedded, of_hidden, of_embedded, *, ids=None):
    """y[t, s] = norm(hidden[t, s]) W_h^T + norm(e[t]) W_e^T, for each of a token's streams s.

    hidden       [rows, streams, inputs] bf16, contiguous; inputs a multiple of 256, at most 8192
    embedded     e, [rows, inputs] bf16, last dim contiguous, row stride a multiple of 8; where there are ids, the
                 table [entries, inputs] that they choose e's rows of
    of_hidden    a Half: the norm of `hidden` and W_h
    of_embedded  a Half: the norm of e and W_e
    ids          [rows] int32 or int64, contiguous; or None. A row whose id is none of the table's is NaN
    returns      [rows, streams, outputs] bf16, contiguous
    accuracy     norms in float32, rounded once, in the order of FlashInfer's CUDA kernel; each product has
                 fp8_linear's bits, and the sum is rounded as torch's addition of both
    determinism  the same bits in every run and every batch

    Errors, graphs and streams as fp8_linear's; the norms' weights are read ahead of the end of the kernel before.
    Source: SGLang's DeepseekV4ModelNextN.forward, which is DeepSeek's inference/model.py (MTPBlock).
    """
    check = Call("draft_input", "hidden", hidden)
    rows, streams, inputs = check.tensor("hidden", hidden, BF16, "rows, streams, inputs", CONTIGUOUS, VECTOR)
    check.multiple("hidden.shape[2]", inputs, NORM_STEP)
    if inputs > MOST_INPUTS:
        check.refuse("shape", "hidden.shape[2]", f"be at most {MOST_INPUTS}", inputs)
    of_rows = ("entries", inputs) if ids is not None else (rows, inputs)
    check.tensor("embedded", embedded, BF16, of_rows, 8, VECTOR)
    if ids is not None:
        check.tensor("ids", ids, POSITIONS, (rows,))
    for name, half in (("of_hidden", of_hidden), ("of_embedded", of_embedded)):
        _check_half(check, name, half, inputs)
    outputs = of_hidden.weight.shape[0]
    if of_embedded.weight.shape[0] != outputs:
        check.refuse("shape", "of_embedded.weight.shape[0]", f"be of_hidden's, {outputs}", of_embedded.weight.shape[0])
    check.on_cuda()
    if not rows * streams:
        return torch.empty((rows, streams, outputs), dtype=torch.bfloat16, device=hidden.device)
    with cuda_tensors.on_device_of(hidden):
        return _run(hidden, embedded, of_hidden, of_embedded, ids)


def _check_half(check: Call, name: str, half: Half, inputs: int) -> None:
    check.tensor(f"{name}.norm", half.norm, BF16, (inputs,), CONTIGUOUS, VECTOR)
    if not half.eps >= 0:
        check.refuse("value", f"{name}.eps", "be 0 or more", half.eps)
    linear.check_weight(check, half.weight, half.weight_scale, ("outputs", inputs))


def takes(hidden, of_hidden: Half, of_embedded: Half) -> bool:
    """Whether draft_input takes these, but for the embedding; an adapter asks before it replaces a call."""
    ask = Question("draft_input", "hidden", hidden)
    return bool(
        hidden.ndim == 3
        and ask.tensor("hidden", hidden, BF16, hidden.shape, CONTIGUOUS, VECTOR)
        and hidden.shape[2] % NORM_STEP == 0 < hidden.shape[2] <= MOST_INPUTS
        and all(
            ask.tensor("norm", half.norm, BF16, (hidden.shape[2],), CONTIGUOUS, VECTOR)
            and half.weight.device == hidden.device
            and half.weight.shape == of_hidden.weight.shape
            and half.weight.shape[-1] == hidden.shape[2]
            and linear.takes(half.weight, half.weight_scale)
            for half in (of_hidden, of_embedded)
        )
    )


def _run(hidden, embedded, of_hidden, of_embedded, ids) -> torch.Tensor:
    rows, streams, _ = hidden.shape
    outputs = of_hidden.weight.shape[0]
    splits = _parts(rows, streams, of_hidden.weight.shape, hidden.device.index)
    products = _products(_norms(hidden, embedded, of_hidden, of_embedded, ids), of_hidden, of_embedded, splits)
    out = torch.empty((rows, streams, outputs), dtype=torch.bfloat16, device=hidden.device)
    extension.load().fp8_linear_draft_sum(
        hidden=products[0].data_ptr(),
        embedded=products[1].data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        streams=streams,
        outputs=outputs,
        splits=splits,
        pdl=True,
        stream=cuda_tensors.current_stream(hidden.device.index),
    )
    return out


def _norms(hidden, embedded, of_hidden, of_embedded, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows * streams, inputs], [rows, inputs]) bf16."""
    rows, streams, inputs = hidden.shape
    of_streams = torch.empty((rows * streams, inputs), dtype=torch.bfloat16, device=hidden.device)
    of_tokens = torch.empty((rows, inputs), dtype=torch.bfloat16, device=hidden.device)
    extension.load().fp8_linear_draft_norms(
        hidden=hidden.data_ptr(),
        embedded=0 if ids is not None else embedded.data_ptr(),
        embedded_stride=embedded.stride(0),
        table=0 if ids is None else embedded.data_ptr(),
        entries=embedded.shape[0],
        ids=0 if ids is None else ids.data_ptr(),
        id_bytes=8 if ids is None else ids.element_size(),
        hidden_norm=of_hidden.norm.data_ptr(),
        embedded_norm=of_embedded.norm.data_ptr(),
        hidden_out=of_streams.data_ptr(),
        embedded_out=of_tokens.data_ptr(),
        rows=rows,
        streams=streams,
        inputs=inputs,
        hidden_eps=float(of_hidden.eps),
        embedded_eps=float(of_embedded.eps),
        pdl=True,
        stream=cuda_tensors.current_stream(hidden.device.index),
    )
    return of_streams, of_tokens


def _parts(rows: int, streams: int, shape, index: int) -> int:
    """Parts in which both products are made, for the sum to add up; 1: both are made whole."""
    of_hidden, of_embedded = (linear.splits_of(count, *shape, index) for count in (rows * streams, rows))
    return of_hidden if of_hidden == of_embedded else 1


def _products(normed, of_hidden: Half, of_embedded: Half, splits: int) -> list[torch.Tensor]:
    """Each [splits, .., outputs] float32, or [.., outputs] bf16."""
    multiply = linear.fp8_linear if splits == 1 else linear.fp8_linear_unmerged
    pairs = zip(normed, (of_hidden, of_embedded), strict=True)
    return [multiply(x, half.weight, half.weight_scale) for x, half in pairs]
