"""The argmax of a step's logits -> `ops.router_topk.row_argmax`: SGLang's greedy sampling, EAGLE's verification and its
next first draft take torch's, one block a row, 27 us of an H200 for this model's vocabulary.

Between the logits and `torch.argmax` SGLang calls nothing, so the logits themselves answer: for the length of these
calls they are a `StepLogits`, a view of them that knows its argmax and is a plain tensor for all else. Same places, to
the first of equals and the first NaN, so there is nothing to choose.

    Sampler.forward                           of a batch that is all greedy
    eagle_sample                              the same, with drafts
    EAGLEDraftExtendCudaGraphRunner.execute   what follows verification: its argmax is the next step's first draft
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import router_topk as op
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.scope import is_ours

PATCH = "greedy_argmax"
CONTEXT = "sglang.srt.runtime_context"
FEWEST = 32_768  # numbers of a row: below it torch's is as fast


class StepLogits(torch.Tensor):
    """Logits whose argmax by rows is ours. What is made of them, rows of them apart, is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ARGMAX and takes(*args, **(kwargs or {})):
                return _serve()(*args, **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(cls) if func is torch.Tensor.__getitem__ else found


_ARGMAX = (torch.argmax, torch.Tensor.argmax)


def takes(x: torch.Tensor, dim: int | None = None, keepdim: bool = False, **more) -> bool:
    """Whether this is the argmax of a step's rows, on a GPU that we serve."""
    return (
        not more
        and x.dim() == 2
        and dim in (-1, 1)
        and x.shape[0] <= STEP_ROWS
        and x.shape[1] >= FEWEST
        and op.takes_row_argmax(x)
        and device_gate.serves(x.device)
    )


def _ours(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    found = op.row_argmax(x)
    return found[:, None] if keepdim else found


@functools.cache
def _serve() -> Callable:
    """(x, dim, keepdim) -> places. In shadow mode none may be another."""
    comparison = shadow.Comparison(
        tensors=lambda ours, theirs, *_, **__: [(ours.view(-1, 1), theirs.view(-1, 1))],
        identity=lambda *_, **__: PATCH,
        shape=lambda x, *_, **__: {"rows": x.shape[0], "vocabulary": x.shape[1]},
        relative_l2=0.0,
    )
    return shadow.shadowed(PATCH, _ours, torch.argmax, comparison)


def lend(call: Callable, output):
    """call(), with `output.next_token_logits` as StepLogits meanwhile."""
    logits = output.next_token_logits
    if type(logits) is not torch.Tensor:
        return call()
    lent = output.next_token_logits = logits.as_subclass(StepLogits)
    try:
        return call()
    finally:
        if output.next_token_logits is lent:
            output.next_token_logits = logits


def draws(runner) -> bool:
    """Whether drafts are drawn by their probabilities: as the caller of `runner` itself asks, since other flags may
    decide it, which SGLang's arguments do not show."""
    context = sys.modules.get(CONTEXT)
    get_spec = getattr(context, "get_spec", None)  # 0.5.17 and later
    settings = runner.model_runner.server_args if get_spec is None else get_spec()
    return settings.speculative_use_rejection_sampling


def replace_forward(original: Callable) -> Callable:
    """For Sampler.forward(self, logits_output, sampling_info, ..)."""

    @functools.wraps(original)
    def forward(self, logits_output, sampling_info, *args, **kwargs):
        def call():
            return original(self, logits_output, sampling_info, *args, **kwargs)

        return lend(call, logits_output) if sampling_info.is_all_greedy and is_ours() else call()

    return forward


def replace_eagle_sample(original: Callable) -> Callable:
    """For eagle_sample(verify_input, batch, logits_output, ..)."""

    @functools.wraps(original)
    def eagle_sample(verify_input, batch, logits_output, *args, **kwargs):
        def call():
            return original(verify_input, batch, logits_output, *args, **kwargs)

        greedy = not batch.forward_mode.is_idle() and batch.sampling_info.is_all_greedy
        return lend(call, logits_output) if greedy and is_ours() else call()

    return eagle_sample


def replace_execute(original: Callable) -> Callable:
    """For EAGLEDraftExtendCudaGraphRunner.execute(self, forward_batch, ..) -> a LogitsProcessorOutput of the graph's,
    which its caller drops. Where drafts are drawn, or are several, it is asked for more than its argmax."""

    @functools.wraps(original)
    def execute(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        if self.eagle_worker.topk == 1 and not draws(self) and is_ours():
            output.next_token_logits = output.next_token_logits.as_subclass(StepLogits)
        return output

    return execute
