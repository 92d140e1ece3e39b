"""Requests with min_p: each release's own way to send tokens round, with ours around it, between two processes and over
stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.fixes.min_p_tokens import replace_sync_token_ids
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

SAMPLER = "sglang.srt.layers.sampler"
GROUP = "the group"


def opened(monkeypatch, model="deepseek_v4", card=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": model} if model else None)
    monkeypatch.setattr(device_gate, "_ask", lambda index: card)


def batch(min_p=True, greedy=False, grammars=None):
    return SimpleNamespace(need_min_p_sampling=min_p, is_all_greedy=greedy, grammars=grammars)


def sent(version, monkeypatch, info, cards=2, switch=False):
    """What is sent round of a batch's tokens, in order."""
    calls = []
    group = {"get_world_size": lambda g: cards, "get_global_rank": lambda g, rank: 4 + rank}
    for name, told in group.items():
        monkeypatch.setattr(torch.distributed, name, told)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda t, src, group: calls.append(("broadcast", src, group)))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: calls.append(("all_reduce", group)))
    names = {"torch": torch, "dist": torch.distributed, "SYNC_TOKEN_IDS_ACROSS_TP": switch}
    original = take(fetch(version), names, "Sampler._sync_token_ids_across_tp", SAMPLER)
    replace_sync_token_ids(original)(SimpleNamespace(tp_sync_group=GROUP), torch.zeros(3, dtype=torch.int32), info)
    return calls


@every_release()
def test_the_first_cards_token_is_sent_where_a_request_has_min_p(version, monkeypatch):
    opened(monkeypatch)
    round_trip = ("broadcast", 4, GROUP)
    assert sent(version, monkeypatch, batch()) == [round_trip]
    assert sent(version, monkeypatch, batch(grammars=["one"])) == [round_trip, ("all_reduce", GROUP)]
    for other, cards in ((batch(min_p=False), 2), (batch(greedy=True), 2), (batch(), 1)):
        assert sent(version, monkeypatch, other, cards) == []


@every_release()
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, monkeypatch):
    opened(monkeypatch, model, card)
    assert sent(version, monkeypatch, batch()) == []
    assert sent(version, monkeypatch, batch(), switch=True) == [("all_reduce", GROUP)]


@every_release()
def test_who_renormalises_is_who_has_min_p(version):
    """And nobody else of those who sample for a step: FlashInfer's sampling by top_k and top_p adds up in one order."""
    text = content(fetch(version), f"{SAMPLER.replace('.', '/')}.py")
    draws = text.partition("def _sample_from_probs(")[2].partition("\n    def ")[0]
    branch = draws.partition("if sampling_info.need_min_p_sampling:")[2].partition("else:")[0]
    assert "top_k_renorm_prob(" in branch and "top_p_renorm_prob(" in branch
    rest = draws.replace(branch, "").partition("if return_sampling_mask:")[0]
    assert "renorm" not in rest


def _card(rank, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
    models_served.announced = lambda: {"model_type": "deepseek_v4"}
    device_gate._ask = lambda index: True
    tokens = torch.tensor([7, 11, 30 - rank], dtype=torch.int32)
    sampler = SimpleNamespace(tp_sync_group=torch.distributed.group.WORLD)
    replace_sync_token_ids(lambda *_: None)(sampler, tokens, batch())
    assert tokens.tolist() == [7, 11, 30], (rank, tokens)
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_first_ones_tokens(tmp_path):
    torch.multiprocessing.spawn(_card, (str(tmp_path / "store"),), nprocs=2, join=True)
