"""A prompt's batch of SGLang's in two: where it is cut, and the two batches.

The second half has the first as its prefix, as a chunk of a prompt has the chunks before it; so a request is cut where
SGLang itself cuts prompts, at a multiple of its page.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

PAGE = 256  # the page that SGLang's model override forces, and the one that prefixes end with

# What ForwardBatch has in 0.5.13 to 0.5.23, by what becomes of it
TOKENS = ("input_ids", "positions", "out_cache_loc")
REQUESTS = (
    *("req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "rids"),
    *("extend_seq_lens", "extend_seq_lens_cpu", "extend_prefix_lens", "extend_prefix_lens_cpu", "extend_start_loc"),
)
ROWS = ("extend_num_tokens", "num_token_non_padded_cpu", "global_num_token_non_padded_cpu")
SUMS = ("batch_size", "seq_lens_sum")
# the layers do not ask, or it is the same for both
KEPT = (
    *("forward_mode", "spec_algorithm", "spec_info", "capture_hidden_mode", "orig_seq_lens", "dp_padding_mode"),
    *("is_extend_in_batch", "all_extend_in_batch", "is_prefill_only", "contains_last_prefill_chunk", "split_index"),
    *("can_run_dp_cuda_graph", "can_run_dp_breakable_cuda_graph", "can_run_decode_cuda_graph"),
    *("can_run_dp_draft_cuda_graph", "can_run_dp_prefill_cuda_graph", "dp_prefill_cuda_graph_max_prefix_len"),
    *("return_logprob", "return_hidden_states_before_norm", "return_pooled_hidden_states", "dimensions"),
    *("top_logprobs_nums", "token_ids_logprobs", "extend_logprob_start_lens_cpu", "sampling_info"),
    *("extend_input_logprob_token_ids_gpu", "next_token_logits_buffer", "temperature", "top_p"),
    *("rids_int", "bootstrap_room_ids_int", "req_all_ids_flat", "req_all_ids_lens", "defer_logits_to_eager"),
    *("reuse_dsa_topk_indices", "reuse_mtp_topk_indices", "out_cache_loc_is_physical", "max_seq_len_host"),
    *("forward_metadata_ready", "forward_metadata_planned_bs", "forward_metadata_planned_num_tokens"),
    *("forward_metadata_replan_equivalent", "padded_static_len"),
    *("freqs_cis_c4", "freqs_cis_c128"),  # of the forward before, which the model drops at its start
)
DROPPED = ("kv_loc_plan", "kv_loc_cols")  # of the whole batch's slots; this model's layers take out_cache_loc
KNOWN = frozenset((*TOKENS, *REQUESTS, *ROWS, *SUMS, *KEPT, *DROPPED))


class Cut(NamedTuple):
    """The first half: `requests` whole ones, then `tokens` of the next; `rows` in all."""

    requests: int
    tokens: int
    rows: int


def cut_of(lengths: list[int], prefixes: list[int]) -> Cut:
    """The place nearest to the middle, at a request's border or a multiple of PAGE within one: at most half a page off.

    lengths: new tokens of each request, prefixes: those before them.
    """
    middle, start, best = sum(lengths) / 2, 0, None
    for request, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        pages = range(PAGE - prefix % PAGE, length, PAGE)
        near = [max(0, min(len(pages) - 1, int((middle - start - pages.start) // PAGE) + i)) for i in (0, 1)]
        for tokens in (0, *(pages[i] for i in near if pages)):
            found = Cut(request, tokens, start + tokens)
            if best is None or abs(found.rows - middle) < abs(best.rows - middle):
                best = found
        start += length
    return best


def unknown_in(batch) -> list[str]:
    """Names of what the batch says beyond what was looked at here."""
    return [name for name, value in vars(batch).items() if name not in KNOWN and _says_something(value)]


def _says_something(value) -> bool:
    """Not None, False, 0, nor a collection of those."""
    if isinstance(value, list | tuple):
        return any(map(_says_something, value))
    return value is not None and value is not False and (not isinstance(value, int | dict | set) or bool(value))


def halves_of(batch, cut: Cut) -> tuple:
    """The two batches; of the whole one nothing is changed."""
    is_within = cut.tokens > 0
    first = _part(batch, slice(0, cut.rows), slice(0, cut.requests + is_within))
    second = _part(batch, slice(cut.rows, None), slice(cut.requests, None))
    second.extend_start_loc = (second.extend_start_loc - cut.rows).clamp_(min=0)
    if is_within:
        length = batch.extend_prefix_lens_cpu[cut.requests] + cut.tokens
        for name, value in (("extend_seq_lens", cut.tokens), ("seq_lens", length)):
            _put(first, name, -1, value)
        for name, value in (
            ("extend_seq_lens", batch.extend_seq_lens_cpu[cut.requests] - cut.tokens),
            ("extend_prefix_lens", length),
        ):
            _put(second, name, 0, value)
    for half in (first, second):
        half.seq_lens_sum = int(half.seq_lens_cpu.sum())
    return first, second


def _part(batch, tokens: slice, requests: slice):
    part = copy.copy(batch)
    for name in TOKENS:
        setattr(part, name, getattr(batch, name)[tokens])
    for name in REQUESTS:
        if getattr(batch, name, None) is not None:
            setattr(part, name, getattr(batch, name)[requests])
    for name in ROWS:
        if getattr(batch, name, None) is not None:
            setattr(part, name, part.input_ids.shape[0])
    for name in DROPPED:
        if hasattr(batch, name):
            setattr(part, name, None)
    part.batch_size = len(part.extend_seq_lens_cpu)
    return part


def _put(batch, name: str, place: int, value: int) -> None:
    """In copies of the tensor on the card and of its mirror on the host."""
    for field in (name, f"{name}_cpu"):
        found = getattr(batch, field)
        found = list(found) if isinstance(found, list) else found.clone()
        found[place] = value
        setattr(batch, field, found)
