"""Where a prompt's batch is cut, and the two batches: what a chunk and the one behind it would be."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import halves_batch
from deepseek_v4_sm120.sglang_patches.adapters.halves_batch import PAGE, Cut, cut_of, halves_of, unknown_in


def batch_of(lengths, prefixes=None, **more):
    """A prompt's batch as SGLang has it: of each token its request and position can be told."""
    prefixes = prefixes or [0] * len(lengths)
    positions = [prefix + i for length, prefix in zip(lengths, prefixes, strict=True) for i in range(length)]
    request = [1000 * r for r, length in enumerate(lengths) for _ in range(length)]
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    ends = [a + b for a, b in zip(lengths, prefixes, strict=True)]
    return SimpleNamespace(
        **{"forward_mode": SimpleNamespace(name="EXTEND"), "batch_size": len(lengths), "seq_lens_sum": sum(ends)},
        input_ids=torch.tensor(request) + 7,
        positions=torch.tensor(positions),
        out_cache_loc=torch.tensor(request) * 1000 + torch.tensor(positions),
        req_pool_indices=torch.arange(len(lengths)) + 50,
        rids=[f"request {r}" for r in range(len(lengths))],
        seq_lens=torch.tensor(ends),
        seq_lens_cpu=torch.tensor(ends),
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_prefix_lens_cpu=list(prefixes),
        extend_start_loc=torch.tensor(starts, dtype=torch.int32),
        extend_num_tokens=len(positions),
        num_token_non_padded_cpu=len(positions),
        **more,
    )


def values(batch):
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items() if k != "forward_mode"}


@pytest.mark.parametrize(
    ("lengths", "prefixes", "expected"),
    [
        ([8192], [0], Cut(0, 4096, 4096)),
        ([8192], [8192], Cut(0, 4096, 4096)),
        ([2100], [0], Cut(0, 1024, 1024)),
        ([2304], [0], Cut(0, 1024, 1024)),  # as near as 1,280: the first
        ([3000], [100], Cut(0, 1436, 1436)),  # position 1,536
        ([1024] * 8, [0] * 8, Cut(4, 0, 4096)),
        ([3, 5000], [0, 512], Cut(1, 2560, 2563)),
        ([5000, 3], [512, 0], Cut(0, 2560, 2560)),
        ([1000, 200, 1000], [0, 0, 0], Cut(1, 0, 1000)),
        ([700, 900, 500], [0, 0, 0], Cut(1, 256, 956)),
        ([1] * 4000, [0] * 4000, Cut(2000, 0, 2000)),
    ],
)
def test_the_place_nearest_to_the_middle(lengths, prefixes, expected):
    assert cut_of(lengths, prefixes) == expected


def some_batches(count=200):
    random.seed(3)
    for _ in range(count):
        lengths = [random.choice((1, 5, 200, 256, 257, 900, 2048, 8192)) for _ in range(random.randint(1, 9))]
        if sum(lengths) >= 2048:
            yield lengths, [random.choice((0, 256, 4096, 31)) for _ in lengths]


def test_a_half_has_half_a_page_less_than_half_at_the_least_and_ends_where_chunks_end():
    batches = list(some_batches())
    assert len(batches) > 100
    for lengths, prefixes in batches:
        cut = cut_of(lengths, prefixes)
        assert abs(cut.rows - sum(lengths) / 2) <= PAGE / 2
        assert cut.rows == sum(lengths[: cut.requests]) + cut.tokens
        assert cut.tokens < lengths[cut.requests] and (
            not cut.tokens or (prefixes[cut.requests] + cut.tokens) % PAGE == 0
        )


def test_the_halves_are_the_batches_of_a_chunk_and_of_the_one_behind_it():
    for lengths, prefixes in some_batches(60):
        whole = batch_of(lengths, prefixes)
        before = copy.deepcopy(values(whole))
        requests, tokens, rows = cut = cut_of(lengths, prefixes)
        first, second = map(values, halves_of(whole, cut))
        assert values(whole) == before
        wanted_lengths = [*lengths[:requests], *([tokens] if tokens else [])]
        wanted = values(batch_of(wanted_lengths, prefixes[: len(wanted_lengths)]))
        assert first == wanted
        lengths, prefixes = list(lengths[requests:]), list(prefixes[requests:])
        lengths[0] -= tokens
        prefixes[0] += tokens
        wanted = values(batch_of(lengths, prefixes))
        for name in ("input_ids", "out_cache_loc"):
            wanted[name] = before[name][rows:]
        wanted |= {name: before[name][requests:] for name in ("req_pool_indices", "rids")}
        assert second == wanted


def test_tensors_keep_their_type_and_tokens_are_not_copied():
    whole = batch_of([3000, 2000], [256, 0])
    for half in halves_of(whole, cut_of([3000, 2000], [256, 0])):
        for name in ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "seq_lens"):
            assert getattr(half, name).dtype == getattr(whole, name).dtype
        assert half.input_ids.untyped_storage().data_ptr() == whole.input_ids.untyped_storage().data_ptr()


def test_what_belongs_to_the_whole_batchs_slots_is_not_handed_on():
    whole = batch_of([4096], kv_loc_plan="of the whole", kv_loc_cols=None, sampling_info="kept")
    for half in halves_of(whole, cut_of([4096], [0])):
        assert half.kv_loc_plan is None and half.sampling_info == "kept"
    assert whole.kv_loc_plan == "of the whole"


@pytest.mark.parametrize(
    ("said", "is_known"),
    [
        ({"mm_inputs": [None, None], "lora_ids": [None], "tbo_children": None, "global_num_tokens_cpu": None}, True),
        ({"attn_tp_sequence_sharded": False, "dcp_kv_mask": None, "engram_history": (), "split_index": 4}, True),
        ({"lora_ids": [None, "a"]}, False),
        ({"mm_inputs": [None, object()]}, False),
        ({"tbo_children": [object()]}, False),
        ({"num_token_non_padded": torch.tensor(0)}, False),
        ({"attn_tp_sequence_sharded": True}, False),
        ({"a_field_of_a_release_to_come": "x"}, False),
        ({"input_ids_global": torch.zeros(4)}, False),  # no field: SGLang sets it
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_batch_that_says_what_nobody_has_looked_at(said, is_known):
    assert unknown_in(batch_of([2048], **said)) == ([] if is_known else list(said))


def test_no_name_has_two_meanings():
    groups = ("TOKENS", "REQUESTS", "ROWS", "SUMS", "KEPT", "DROPPED")
    assert sum(len(getattr(halves_batch, group)) for group in groups) == len(halves_batch.KNOWN)
