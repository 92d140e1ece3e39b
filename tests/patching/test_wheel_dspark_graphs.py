"""Whether DSPARK's draft goes into graphs, on two cards that have not as much memory free: each release's own decisions
and its own question for the memory, with ours and without."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.dspark_graphs import replace_available_memory
from deepseek_v4_sm120.sglang_patches.names import PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.rows.dspark import COMPONENTS, DSPARK_GRAPHS
from tests.patching.test_wheel_min_p import opened
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import RELEASES, content, fetch, since

OF_OURS = [version for version in RELEASES if since(version, "0.5.16") and not since(version, "0.5.19")]
SAMPLER, WORKER = f"{COMPONENTS}.dspark_draft_sampler", f"{COMPONENTS}.dspark_worker_v2"
CARDS, GIB = (0.97, 1.05), 1 << 30  # free; SGLang asks for 1.0, and for a thousandth more for the sampling's buffers
GROUP, LEAST = object(), object()

every_one = pytest.mark.parametrize("version", OF_OURS)


class Card:
    """Of a server's cards one: what it has free, and what it asks the others."""

    def __init__(self, version, number, *, ours, cards=CARDS, hosts=1):
        self.version, self.cards, self.asked = version, cards, []
        group = SimpleNamespace(world_size=len(cards), cpu_group=GROUP)
        state = ModuleType(PARALLEL_STATE)
        state.get_tp_group = lambda: group
        self.state, self.hosts = state, hosts
        device = SimpleNamespace(
            **{"device_count": lambda: len(cards), "current_device": lambda: number},
            get_device_properties=lambda _: SimpleNamespace(is_integrated=False),
            mem_get_info=lambda _: (int(cards[number] * GIB), 96 * GIB),
        )
        distributed = SimpleNamespace(all_reduce=self.least, ReduceOp=SimpleNamespace(MIN=LEAST))
        self.torch = SimpleNamespace(
            **{"cuda": device, "distributed": distributed, "tensor": torch.tensor, "float32": torch.float32},
            get_device_module=lambda: device,
        )
        names = {"torch": self.torch, "empty_device_cache": lambda _: None}
        free = take(fetch(version), names, "get_available_gpu_memory", "sglang.srt.utils.common")
        self.names = {"get_available_gpu_memory": replace_available_memory(free) if ours else free, "torch": self.torch}

    def least(self, tensor, op, group):
        assert op is LEAST and group is GROUP
        self.asked.append(float(tensor) / GIB)
        tensor.fill_(min(self.cards) * GIB)

    def captures(self) -> bool:
        """By the worker's own init_cuda_graphs."""
        given = SimpleNamespace(decode=SimpleNamespace(bs=[1, 8]))
        exec_ = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=given))
        names = self.names | {"is_cuda": lambda: True, "get_exec": lambda: exec_, "envs": QUIET}
        init = take(fetch(self.version), names, "DSparkWorkerV2.init_cuda_graphs", WORKER)
        told = []
        worker = SimpleNamespace(
            **{"device": "cuda", "gpu_id": self.torch.cuda.current_device(), "_decode_graph_allowed": True},
            **{"server_args": SimpleNamespace(disable_cuda_graph=False), "_draft_context": contextlib.nullcontext},
            **{"_maybe_build_draft_sampler": lambda: None, "_proposer": QUIET, "_draft_sampler": None},
            _draft_worker=SimpleNamespace(init_cuda_graphs=lambda **given: told.append(given)),
        )
        init(worker)
        return told[0]["capture_decode_cuda_graph"]

    def captures_sampling(self) -> bool:
        """By the sampler's own question, from 0.5.17 on."""
        auto = SimpleNamespace(SGLANG_DSPARK_FOLDED_SAMPLING=SimpleNamespace(get=lambda: "auto"))
        kinds = SimpleNamespace(OFF="off", FORCE="force")
        names = self.names | {"envs": auto, "DsparkFoldedSampling": kinds, "_CAPTURE_HEADROOM_GB": 1.0}
        resolve = take(fetch(self.version), names, "_resolve_folded_sampling", SAMPLER)
        head = SimpleNamespace(org_vocab_size=1000, weight=SimpleNamespace(dtype=torch.bfloat16))
        return resolve(model=SimpleNamespace(lm_head=head), gamma=3, max_bs=2, device="cuda", tp_rank=1)


def decided(version, monkeypatch, *, ours, model="deepseek_v4", served=True, **of_server):
    """-> what each card puts into graphs: the draft, its sampling; and what they asked each other."""
    found, asked = [], []
    for number in range(len(of_server.get("cards", CARDS))):
        card = Card(version, number, ours=ours, **of_server)
        opened(monkeypatch, model, served, card.hosts)
        monkeypatch.setitem(sys.modules, PARALLEL_STATE, card.state)
        found.append((card.captures(), card.captures_sampling() if since(version, "0.5.17") else None))
        asked.append(len(card.asked))
    return found, asked


@every_one
def test_sglang_alone_decides_card_by_card(version, monkeypatch):
    found, asked = decided(version, monkeypatch, ours=False)
    assert [bool(draft) for draft, _ in found] == [False, True] and asked == [0, 0]
    if since(version, "0.5.17"):
        assert [sampling for _, sampling in found] == [False, True]


@every_one
@pytest.mark.parametrize(("cards", "is_captured"), [(CARDS, False), (CARDS[::-1], False), ((1.4, 3.0, 1.1), True)])
def test_all_cards_decide_by_the_least(version, monkeypatch, cards, is_captured):
    found, asked = decided(version, monkeypatch, ours=True, cards=cards)
    has_sampler = since(version, "0.5.17")
    assert found == [(is_captured, is_captured if has_sampler else None)] * len(cards)
    assert asked == [1 + has_sampler] * len(cards)


@every_one
def test_one_card_asks_nobody(version, monkeypatch):
    for free, is_captured in ((0.97, False), (1.05, True)):
        found, asked = decided(version, monkeypatch, ours=True, cards=(free,))
        assert found[0][0] is is_captured and asked == [0]


@every_one
def test_nothing_is_asked_of_a_host_that_may_lack_us(version, monkeypatch):
    assert decided(version, monkeypatch, ours=True, hosts=2) == decided(version, monkeypatch, ours=False)
    monkeypatch.setattr(models_served, "_hosts_are_alike", True)
    assert decided(version, monkeypatch, ours=True, hosts=2) == decided(version, monkeypatch, ours=True)


@every_one
@pytest.mark.parametrize("other", [{"served": False}, {"model": None}])
def test_elsewhere_it_stays_sglangs(version, other, monkeypatch):
    assert decided(version, monkeypatch, ours=True, **other) == decided(version, monkeypatch, ours=False)


def test_who_asks_for_more_is_left_alone(monkeypatch):
    """As those do that measure what a capture took, on the first card alone."""
    opened(monkeypatch)
    asked = []
    ours = replace_available_memory(lambda *args, **given: asked.append((args, given)))
    ours("cuda", 0, empty_cache=False)
    assert asked == [(("cuda", 0), {"empty_cache": False})]


@every_one
def test_each_module_asks_once(version):
    """So nobody asks there on some of the cards alone."""
    modules = [target.where.partition(":")[0] for target in DSPARK_GRAPHS.targets]
    assert modules == [WORKER, SAMPLER]
    texts = [
        content(fetch(version), f"{name.replace('.', '/')}.py") for name in modules[: 1 + since(version, "0.5.17")]
    ]
    assert [text.count("get_available_gpu_memory(") for text in texts] == [1] * len(texts)


@pytest.mark.parametrize("version", [version for version in RELEASES if since(version, "0.5.19")])
def test_later_releases_ask_for_the_least_themselves(version):
    text = content(fetch(version), f"{WORKER.replace('.', '/')}.py")
    assert "get_available_gpu_memory(" not in text and "_tp_sync.available_memory_gb(" in text
