"""The probabilities that EAGLE's drafts were drawn by, from a draft's graph to verification: each release's own worker
on the CPU over a stand-in for the graph, whose memory the next graph writes over."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.draft_probabilities import replace_execute
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch, since

COPIED_SINCE = "0.5.21"
WORKER = "sglang.srt.speculative.eagle_worker_v2"
DRAWN_BY = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])

pytestmark = pytest.mark.usefixtures("opened")


class Worker(SimpleNamespace):
    seed_dsa_topk_from_draft_extend = False
    draft_runner = SimpleNamespace(canary_manager=None)
    topk = speculative_num_steps = 2
    speculative_num_draft_tokens = 3

    def __getattr__(self, name):
        return QUIET


def judged_by(version, *, ours, probabilities):
    """What verification has behind the pass over the verified rows, which writes over a graph's memory."""
    memory = None if probabilities is None else probabilities.clone()

    def execute(self, forward_batch):
        return "parents", "scores", "tokens", memory

    execute = replace_execute(execute) if ours else execute
    is_prepared = (QUIET, True, None) if since(version, "0.5.22") else (QUIET, True)

    def build(batch, draft_input, parents, scores, tokens, probabilities, **_):
        assert (parents, scores, tokens) == ("parents", "scores", "tokens")
        return SimpleNamespace(draft_probs=probabilities)

    names = {"torch": torch, "contextlib": contextlib, "prepare_for_draft": lambda *_, **__: is_prepared}
    names |= {"build_eagle_verify_input": build, "EagleVerifyInput": SimpleNamespace, "CaptureHiddenMode": QUIET}
    names["build_tree_kernel_efficient"] = lambda *_, **__: (None,) * 6
    draft = take(fetch(version), names, "EagleDraftWorker.draft", WORKER)
    worker = Worker(cuda_graph_runner=SimpleNamespace(execute=lambda batch: execute(None, batch)))
    worker.prepare_for_draft = names["prepare_for_draft"]
    worker.target_worker = SimpleNamespace(model_runner=Runner())
    batch = SimpleNamespace(spec_info=QUIET, forward_mode=QUIET, seq_lens_sum=1, seq_lens=torch.ones(1))
    batch.seq_lens_cpu = batch.seq_lens
    verify_input = draft(worker, batch)
    if memory is not None:
        memory.fill_(-torch.inf)
    return verify_input.draft_probs


class Runner:
    kv_index_translator = QUIET

    @property
    def attn_backend(self):
        return self

    def get_verify_buffers_to_fill_after_draft(self):
        return None, None

    def __getattr__(self, name):
        return QUIET


@every_release("0.5.14")
def test_drafts_are_judged_by_what_they_were_drawn_by(version):
    stock, ours = (judged_by(version, ours=ours, probabilities=DRAWN_BY) for ours in (False, True))
    assert torch.equal(ours, DRAWN_BY)
    assert torch.equal(stock, DRAWN_BY) == since(version, COPIED_SINCE)


def test_without_rejection_sampling_there_are_none():
    assert judged_by("0.5.20", ours=True, probabilities=None) is None


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    assert judged_by("0.5.20", ours=True, probabilities=DRAWN_BY).isneginf().all()
