"""The slots of sliding windows that an answer keeps with DSPARK: each release's own preparation of a step and its own
freeing on the CPU, with ours and without."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.dspark_windows import replace_prepare_for_decode
from deepseek_v4_sm120.sglang_patches.rows.dspark import DSPARK_WINDOWS
from tests.patching.test_wheel_dspark_penalties import DRAFT, taken
from tests.patching.test_wheel_wo_a import QUIET
from tests.patching.wheels import RELEASES, since

RELEASES_OF_OURS = [version for version in RELEASES if since(version, "0.5.16") and not since(version, "0.5.18")]
BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch"
FREE = "sglang.srt.mem_cache.common:free_swa_out_of_window_slots"
PAGE, WINDOW, ROWS, INTERVAL, STEPS, PROMPT, BROUGHT = 256, 128, 4, 8, 400, 700, 3
SERVER = SimpleNamespace(speculative_num_draft_tokens=ROWS)

every_one = pytest.mark.parametrize("version", RELEASES_OF_OURS)
pytestmark = pytest.mark.usefixtures("opened")


class Request(SimpleNamespace):
    cache_protected_len, swa_uuid_for_lock, decode_batch_idx = 0, None, 0
    sampling_params = SimpleNamespace(top_k=1)

    @property
    def seqlen(self):
        return self.kv_committed_len


class Steps:
    """A batch of DSPARK's as far as its steps take and free slots."""

    device, enable_overlap, tree_cache = "cpu", True, None
    forward_mode = SimpleNamespace(is_decode=lambda: True)

    def __init__(self, version, requests, *, ours):
        envs = SimpleNamespace(
            SGLANG_SWA_EVICTION_INTERVAL=SimpleNamespace(get=lambda: INTERVAL),
            SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW=SimpleNamespace(get=lambda: False),
        )
        names = dict(envs=envs, free_swa_out_of_window_slots=taken(version, FREE))
        for name in ("maybe_evict_swa", "_evict_swa"):
            setattr(self, name, taken(version, f"{BATCH}.{name}", **names).__get__(self))
        (target,) = DSPARK_WINDOWS.targets
        self.prepare = taken(
            version,
            target.where,
            get_server_args=lambda: SERVER,
            get_spec=lambda: SERVER,
            _get_overlap_plan_stream=lambda device: (None, contextlib.nullcontext()),
            alloc_for_spec_decode=self.allocate,
        )
        if ours:
            self.prepare = replace_prepare_for_decode(self.prepare)
        self.draft = SimpleNamespace(_ensure_prepare_length_buffers=lambda *_: None, **DRAFT)
        self.reqs, self.forward_iter, self.freed = requests, 0, 0
        self.tree_cache = SimpleNamespace(
            supports_swa=lambda: True, is_chunk_cache=lambda: False, sliding_window_size=WINDOW, page_size=PAGE
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=PAGE, free_swa=self.free)
        longest = PROMPT + STEPS * BROUGHT + PAGE
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(longest).repeat(len(requests), 1))

    def __getattr__(self, name):
        return QUIET

    def batch_size(self):
        return len(self.reqs)

    def allocate(self, *_, reqs, nxt_kv_lens_cpu, **__):
        for one, length in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
            one.kv.kv_allocated_len = length

    def free(self, slots):
        self.freed += len(slots)

    def step(self):
        """What a step brings is known when the next one has been prepared."""
        self.forward_iter += 1
        self.prepare(self.draft, self)
        for one in self.reqs:
            one.kv_committed_len += BROUGHT

    def kept(self):
        return sum(one.kv.kv_allocated_len for one in self.reqs) - self.freed


def request(row):
    kv = SimpleNamespace(kv_allocated_len=PROMPT, swa_evicted_seqlen=0)
    return Request(req_pool_idx=row, kv_committed_len=PROMPT, kv=kv)


def kept_in_steps(version, *, ours):
    batch = Steps(version, [request(0), request(1)], ours=ours)
    found = []
    for _ in range(STEPS):
        batch.step()
        found.append(batch.kept())
    return found, batch


@every_one
def test_an_answer_keeps_its_window(version):
    found, batch = kept_in_steps(version, ours=True)
    between, reserve = (INTERVAL + 1) * BROUGHT, 2 * ROWS
    assert max(found[INTERVAL:]) <= 2 * (2 * PAGE + between + reserve)
    assert all(one.kv.swa_evicted_seqlen <= one.kv_committed_len - BROUGHT - PAGE for one in batch.reqs)
    assert [one.decode_batch_idx for one in batch.reqs] == [STEPS] * 2
    alone = kept_in_steps(version, ours=False)[1]
    assert [one.kv.kv_allocated_len for one in batch.reqs] == [one.kv.kv_allocated_len for one in alone.reqs]


@every_one
def test_in_sglang_alone_it_keeps_all(version):
    found, batch = kept_in_steps(version, ours=False)
    assert found == sorted(found) and found[-1] >= 2 * (PROMPT + (STEPS - 1) * BROUGHT) and not batch.freed
    assert [one.decode_batch_idx for one in batch.reqs] == [0] * 2


@every_one
def test_in_the_first_step_the_prompt_is_still_read(version):
    batch = Steps(version, [request(0)], ours=True)
    batch.forward_iter = INTERVAL - 1
    batch.step()
    assert not batch.freed
    batch.forward_iter = INTERVAL - 1
    batch.step()
    assert batch.freed == (PROMPT + BROUGHT - 1 - PAGE) // PAGE * PAGE


@every_one
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    batch = Steps(version, [request(0)], ours=True)
    for _ in range(3 * INTERVAL):
        batch.step()
    assert not batch.freed and batch.reqs[0].decode_batch_idx == 0
