"""Requests with min_p: each release's own way to send tokens round, with ours around it, between two processes and over
stand-ins."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.fixes.min_p_tokens import replace_sync_token_ids
from deepseek_v4_sm120.sglang_patches.names import PARALLEL_STATE
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

REPO = Path(__file__).resolve().parents[2]
SAMPLER = "sglang.srt.layers.sampler"
GROUP, ROWS = "the group", "those that share prompts' rows"


def opened(monkeypatch, model="deepseek_v4", card=True, hosts=1):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    told = {"model_type": model, "several_hosts": hosts > 1}
    monkeypatch.setattr(models_served, "announced", lambda: told if model else None)
    monkeypatch.setattr(device_gate, "_ask", lambda index: card)


def batch(min_p=True, greedy=False, grammars=None):
    return SimpleNamespace(need_min_p_sampling=min_p, is_all_greedy=greedy, grammars=grammars)


def groups(monkeypatch, of_rows=None):
    """SGLang's module of groups; of_rows: of the cards that share a prompt's rows, None: not made."""
    state = ModuleType(PARALLEL_STATE)
    state._ATTN_CP = of_rows and SimpleNamespace(device_group=of_rows)
    monkeypatch.setitem(sys.modules, PARALLEL_STATE, state)


def sent(version, monkeypatch, info, cards=2, switch=False, of_rows=GROUP, rows=1):
    """What is sent round of a batch's tokens, in order. cards: in the group for tokens; rows: that of_rows has."""
    calls = []
    groups(monkeypatch, of_rows)
    sizes = {of_rows: rows, GROUP: cards}
    group = {"get_world_size": lambda g: sizes[g], "get_global_rank": lambda g, rank: 4 + rank}
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
def test_it_goes_round_those_that_share_prompts_rows_as_well(version, monkeypatch):
    opened(monkeypatch)
    both = [("broadcast", 4, GROUP), ("broadcast", 4, ROWS)]
    assert sent(version, monkeypatch, batch(), of_rows=ROWS, rows=2) == both
    assert sent(version, monkeypatch, batch(), cards=1, of_rows=ROWS, rows=2) == both[1:]
    assert sent(version, monkeypatch, batch(), of_rows=ROWS) == sent(version, monkeypatch, batch(), of_rows=None)
    assert sent(version, monkeypatch, batch(min_p=False), of_rows=ROWS, rows=2) == []


@every_release()
def test_with_several_hosts_nothing_is_sent_that_one_without_us_would_not_take(version, monkeypatch):
    opened(monkeypatch)
    on_one_host = sent(version, monkeypatch, batch())
    opened(monkeypatch, hosts=2)
    assert sent(version, monkeypatch, batch()) == []
    monkeypatch.setattr(models_served, "_hosts_are_alike", True)
    assert sent(version, monkeypatch, batch()) == on_one_host != []


@every_release()
def test_the_group_for_tokens_is_that_of_a_batchs_heads_with_data_parallel_attention_alone(version):
    """Where all cards are of one group of rows, that is the whole one."""
    sampler = content(fetch(version), f"{SAMPLER.replace('.', '/')}.py").partition("self.tp_sync_group =")[2]
    assert sampler.partition("if is_dp_attention_enabled():")[2].lstrip().startswith("self.tp_sync_group = ")
    whole = content(fetch(version), f"{PARALLEL_STATE.replace('.', '/')}.py").partition("_ATTN_CP is None")[2]
    assert "if attn_cp_size == tensor_model_parallel_size:\n        _ATTN_CP = _TP\n" in whole


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


def _card(rank, store, with_rows):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
    models_served.announced = lambda: {"model_type": "deepseek_v4"}
    device_gate._ask = lambda index: True
    both, alone = torch.distributed.group.WORLD, [torch.distributed.new_group([card]) for card in (0, 1)][rank]
    state = sys.modules[PARALLEL_STATE] = ModuleType(PARALLEL_STATE)
    state._ATTN_CP = SimpleNamespace(device_group=both if with_rows else alone)
    tokens = torch.tensor([7, 11, 30 - rank], dtype=torch.int32)
    sampler = SimpleNamespace(tp_sync_group=alone if with_rows else both)
    replace_sync_token_ids(lambda *_: None)(sampler, tokens, batch())
    assert tokens.tolist() == [7, 11, 30], (rank, tokens)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("with_rows", [False, True], ids=["heads", "rows"])
def test_two_processes_have_the_first_ones_tokens(with_rows, tmp_path, torch_python):
    card = "import sys; from tests.patching.test_wheel_min_p import _card; _card(int(sys.argv[1]), *eval(sys.argv[2]))"
    words = [*torch_python(), "-c", card]
    given = repr((str(tmp_path / "store"), with_rows))
    both = [
        subprocess.Popen([*words, str(rank), given], cwd=REPO, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        said = [one.communicate(timeout=120)[1] for one in both]
    finally:
        for one in both:
            one.kill()
    assert [one.returncode for one in both] == [0, 0], said
