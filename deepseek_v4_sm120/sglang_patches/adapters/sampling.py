"""What a greedy request's answer takes from the requests beside it in SGLang's sampling, of a reproducible server.

A batch of greedy requests takes the argmax of its logits, and log_softmax of them where log-probabilities are asked
for. As soon as one request of the batch samples, all of it is sampled: the greedy ones by their top_k of 1, which
leaves all of several equal probabilities (logits are bf16 numbers, so some tokens have such a neighbour) and draws one
of them; and log(softmax) stands for log_softmax, with other bits. So does EAGLE's verification, which draws what it
accepts and what follows. DSPARK's chooses by request (SGLang's own SelectMixedAccept).

Here a greedy request keeps its argmax, the first of the greatest, and log_softmax, whoever is beside it; what samples
is drawn as without us. The argmax of a mixed batch is that of its probabilities: that of its logits, unless two
float32 logits differ in their last bit alone.

Up to 0.5.16 SGLang has no way to ask for log_softmax: there the log-probabilities, not the text, of a greedy request
beside one that samples have other bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from deepseek_v4_sm120.sglang_patches.scope import is_ours


def replace_sampler_init(original: Callable) -> Callable:
    """For Sampler.__init__(self): log-probabilities are log_softmax's in every batch, as SGLang does where inference is
    to be deterministic; nothing else hangs on this attribute of a sampler without seeds."""

    @functools.wraps(original)
    def __init__(self):
        original(self)
        if is_ours():
            self.enable_deterministic = True

    return __init__


def replace_sample_from_probs(original: Callable) -> Callable:
    """For Sampler._sample_from_probs(self, probs [rows, vocabulary], sampling_info, positions, simple_sampling_case),
    asked where a request of the batch samples. `probs` stay as they are: log-probabilities may be taken of them."""

    @functools.wraps(original)
    def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
        if is_ours() and has_greedy(sampling_info):
            greedy, first = are_greedy(sampling_info)[:, None], probs.argmax(-1, keepdim=True)
            most = probs.gather(-1, first).masked_fill_(greedy, 1.0)
            probs = probs.masked_fill(greedy, 0.0).scatter_(-1, first, most)
        return original(self, probs, sampling_info, positions, simple_sampling_case)

    return _sample_from_probs


def replace_eagle_sample(original: Callable) -> Callable:
    """For eagle_sample(verify_input, batch, logits_output, a mask of grammars, ..) -> (tokens [requests * width] int32,
    accepted with the one behind them [requests], their places [requests, depth]). The original leaves penalties, biases
    and grammars in the logits; the greedy requests are verified on them once more, as in a batch of their own."""

    @functools.wraps(original)
    def eagle_sample(verify_input, batch, logits_output, *args, **kwargs):
        info = batch.sampling_info
        asked = (verify_input, batch, logits_output, *args)
        mixed = not batch.forward_mode.is_idle() and not info.is_all_greedy and has_greedy(info)
        if not mixed or is_marked(info) or not is_ours():
            return original(*asked, **kwargs)
        predict, lengths, accepted = original(*asked, **kwargs)
        width, requests = verify_input.draft_token_num, len(batch.seq_lens)
        own_predict, own_accepted, own_drafts = inspect.unwrap(original).__globals__["verify_tree_greedy_func"](
            predicts=torch.zeros_like(predict),
            accept_index=torch.full_like(accepted, -1),
            accept_token_num=torch.empty_like(lengths),
            candidates=verify_input.draft_token.reshape(requests, width),
            retrieve_index=verify_input.retrieve_index,
            retrieve_next_token=verify_input.retrieve_next_token,
            retrieve_next_sibling=verify_input.retrieve_next_sibling,
            target_predict=logits_output.next_token_logits.argmax(-1).reshape(requests, width),
            topk=verify_input.tree_topk,
        )
        greedy = are_greedy(info)
        return (
            torch.where(greedy.repeat_interleave(width), own_predict, predict),
            torch.where(greedy, own_drafts + 1, lengths),
            torch.where(greedy[:, None], own_accepted, accepted),
        )

    return eagle_sample


def has_greedy(sampling_info) -> bool:
    """Up to 0.5.15 nobody counts them: there every batch may."""
    return getattr(sampling_info, "is_any_greedy", True)


def is_marked(sampling_info) -> bool:
    """Whether a request asks for a watermark (0.5.22 and later), which may be put on a copy of the logits."""
    return getattr(sampling_info, "has_watermark_candidates", False)


def are_greedy(sampling_info) -> torch.Tensor:
    """[requests] bool, by what SGLang itself calls greedy."""
    return sampling_info.top_ks <= 1
