"""Whose rows are that pad a step to a captured graph: 0.5.12's own filling of a graph's buffers on the CPU, with ours
and without, and what later releases say."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.padded_rows import replace_populate
from deepseek_v4_sm120.sglang_patches.table import PADDED_ROWS
from tests.patching.test_wheel_dspark_penalties import taken
from tests.patching.wheels import RELEASES, content, fetch, since

CAPTURED = 8
every_one = pytest.mark.parametrize("version", [version for version in RELEASES if not since(version, "0.5.13")])
pytestmark = pytest.mark.usefixtures("opened")


class Buffers(SimpleNamespace):
    """Of a graph of so many requests; what a release has beside these is not there."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def step(requests):
    count = len(requests)
    numbers = {name: torch.full((count,), 9) for name in ("input_ids", "seq_lens", "out_cache_loc", "positions")}
    return Buffers(req_pool_indices=torch.tensor(requests), seq_lens_cpu=torch.full((count,), 9), **numbers)


def filled(version, *, ours=True):
    """The requests of a graph's rows behind a full step and one of three requests."""
    (target,) = PADDED_ROWS.targets
    copies = lambda dsts, srcs: [dst.copy_(src) for dst, src in zip(dsts, srcs, strict=True)]  # noqa: E731
    populate = taken(version, target.where, _grouped_foreach_copy_=copies)
    populate = replace_populate(populate) if ours else populate
    names = ("input_ids", "seq_lens", "seq_lens_cpu", "out_cache_loc", "positions", "req_pool_indices")
    buffers = Buffers(**{name: torch.zeros(CAPTURED, dtype=torch.int64) for name in names})
    for requests in ([*range(11, 11 + CAPTURED)], [3, 18, 5]):
        count, asked = len(requests), dict.fromkeys(("require_gathered_buffer", "nsa_enable_prefill_cp"), False)
        asked |= {"enable_num_token_non_padded_flag": False, "num_tokens_per_bs": 1, "seq_len_fill_value": 1}
        populate(buffers, forward_batch=step(requests), raw_bs=count, raw_num_token=count, bs=CAPTURED, **asked)
        assert buffers.req_pool_indices[:count].tolist() == requests
    assert buffers.seq_lens.tolist() == [9] * 3 + [1] * 5 and not buffers.out_cache_loc[3:].any()
    return buffers.req_pool_indices.tolist()


@every_one
def test_a_padded_row_is_nobodys(version):
    assert filled(version) == [3, 18, 5, 0, 0, 0, 0, 0]


@every_one
def test_in_sglang_alone_it_is_who_had_its_place(version):
    """Among them a request that runs on in another row, 18."""
    assert filled(version, ours=False) == [3, 18, 5, 14, 15, 16, 17, 18]


@every_one
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    assert filled(version) == filled(version, ours=False)


@pytest.mark.parametrize("version", [version for version in RELEASES if since(version, "0.5.13")])
def test_later_releases_reset_the_requests(version):
    text = content(fetch(version), "sglang/srt/model_executor/cuda_graph_buffer_registry.py")
    slot = text[text.index('"req_pool_indices"') :]
    assert "padding_policy=PaddingPolicy.ZERO" in slot[: slot.index("GraphSlot(")]
