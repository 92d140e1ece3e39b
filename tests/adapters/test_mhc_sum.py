"""Sums that are put off into a boundary: who gets them, when they are made, and that whoever else looks sees a sum."""

from __future__ import annotations

import operator
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.ops.all_reduce import AllReduce
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum as adapter
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import Communicator
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum, finished

HIDDEN, RANKS = 4096, 2


class Sums(AllReduce):
    """Of ours, without memory or a card."""

    def __init__(self, ranks=RANKS):
        self.ranks, self.hidden, self.max_rows, self.one_shot_rows, self.num_sms = ranks, HIDDEN, 512, 64, 188
        self.device = torch.device("cpu")


def ours(ranks=RANKS) -> Communicator:
    return Communicator(SimpleNamespace(disabled=True), Sums(ranks))


class Coordinator:
    """A group of two whose ranks have the same terms."""

    def __init__(self):
        self.ca_comm, self.sums, self.symmetric = ours(), 0, False

    def all_reduce(self, input_):
        self.sums += 1
        return RANKS * input_

    def is_symmetric_memory_enabled(self):
        return self.symmetric


@pytest.fixture
def group(monkeypatch):
    """SGLang's module of groups, whose tensor-parallel one it gives."""
    module = ModuleType(adapter.PARALLEL_STATE)
    module._TP, module._PDMUX_PREFILL_TP_GROUP = Coordinator(), None
    module._ATTN_TP, module._PP = module._TP, SimpleNamespace(world_size=1)
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, module)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return module._TP


def x_of(rows, dtype=torch.bfloat16, hidden=HIDDEN):
    return torch.arange(rows * hidden).remainder(64).view(rows, hidden).to(dtype)


def asked_in_a_layer(x):
    """What a layer gets that asks the group for the sum of x."""
    group = sys.modules[adapter.PARALLEL_STATE]._TP
    return adapter.replace_layer_forward(lambda self, x: group.all_reduce(x))(object(), x)


def owed(group, rows=3):
    return asked_in_a_layer(x_of(rows))


# ---- what is put off


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_sum_of_few_rows_waits(group, rows):
    found = asked_in_a_layer(x_of(rows))
    assert isinstance(found, OwedSum) and group.sums == 0
    f, way = found.for_boundary()
    assert torch.equal(f, x_of(rows)) and way == {"sum_over": group.ca_comm.sums, "tag": 1} and group.sums == 0
    assert owed(group).for_boundary()[1]["tag"] == 2


@pytest.mark.parametrize(
    "x",
    [x_of(65), x_of(0), x_of(3, torch.float32), x_of(3, hidden=7168), x_of(3)[0], x_of(64).T.contiguous().T],
    ids=["65 rows", "no rows", "float32", "another width", "1 dim", "strided"],
)
def test_other_sums_are_made_at_once(group, x):
    found = asked_in_a_layer(x)
    assert isinstance(found, torch.Tensor) and torch.equal(found, RANKS * x) and group.sums == 1


def test_four_ranks_wait_up_to_fewer_rows(group):
    group.ca_comm = ours(ranks=4)
    assert isinstance(asked_in_a_layer(x_of(16)), OwedSum) and isinstance(asked_in_a_layer(x_of(17)), torch.Tensor)


CHANGES = {
    "pipeline parallelism": lambda group: setattr(
        sys.modules[adapter.PARALLEL_STATE], "_PP", SimpleNamespace(world_size=2)
    ),
    "PD multiplexing": lambda group: setattr(sys.modules[adapter.PARALLEL_STATE], "_PDMUX_PREFILL_TP_GROUP", object()),
    "data-parallel attention": lambda group: setattr(sys.modules[adapter.PARALLEL_STATE], "_ATTN_TP", Coordinator()),
    "NCCL's symmetric memory is in front": lambda group: setattr(group, "symmetric", True),
    "--enable-mscclpp is in front": lambda group: setattr(group, "pymscclpp_comm", SimpleNamespace(disabled=False)),
    "FlashInfer's is in front": lambda group: setattr(group, "_can_use_flashinfer_allreduce", lambda x: True),
    "SGLang turned it off": lambda group: setattr(group.ca_comm, "disabled", True),
    "the object is SGLang's": lambda group: setattr(group, "ca_comm", SimpleNamespace(disabled=False)),
    "there is none": lambda group: setattr(group, "ca_comm", None),
    "the object has sums of its own": lambda group: setattr(
        group, "ca_comm", SimpleNamespace(disabled=False, sums=Sums())
    ),
    "it does not take the sum": lambda group: setattr(group.ca_comm.sums, "device", torch.device("cuda", 1)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("before", [False, True])
def test_where_the_sum_would_not_be_ours_it_is_made(group, name, before):
    if before:
        assert isinstance(asked_in_a_layer(x_of(1)), OwedSum)
    CHANGES[name](group)
    found = asked_in_a_layer(x_of(3))
    assert isinstance(found, torch.Tensor) and torch.equal(found, RANKS * x_of(3)) and group.sums == 1


def test_ways_to_sum_that_are_off_or_do_not_take_it_change_nothing(group):
    group.pymscclpp_comm = SimpleNamespace(disabled=True)
    group._can_use_flashinfer_allreduce = lambda x: len(x) > 3
    assert isinstance(asked_in_a_layer(x_of(3)), OwedSum) and isinstance(asked_in_a_layer(x_of(4)), torch.Tensor)


def test_outside_of_a_layer_in_another_thread_and_of_another_group_sums_are_made(group):
    other = Coordinator()

    def forward(self):
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(group.all_reduce, x_of(1)).result()
        return group.all_reduce(x_of(1)), other.all_reduce(x_of(1)), elsewhere

    waits, of_another, elsewhere = adapter.replace_layer_forward(forward)(object())
    assert isinstance(waits, OwedSum) and (group.sums, other.sums) == (1, 1)
    assert isinstance(of_another, torch.Tensor) and isinstance(elsewhere, torch.Tensor)
    assert isinstance(group.all_reduce(x_of(1)), torch.Tensor)

    def failing(self):
        raise RuntimeError("of the layer")

    with pytest.raises(RuntimeError, match="of the layer"):
        adapter.replace_layer_forward(failing)(object())
    assert isinstance(group.all_reduce(x_of(1)), torch.Tensor)


def test_status_knows_of_sums_that_are_put_off(group, monkeypatch):
    monkeypatch.setattr(report, "_notes", {})
    group.ca_comm.disabled = True
    asked_in_a_layer(x_of(1))
    assert report._notes == {}
    group.ca_comm.disabled = False
    asked_in_a_layer(x_of(1))
    describe, found = report._notes["mhc"]
    assert "up to 64 rows" in describe() and found() == {"sums_up_to_rows": 64}


def test_shadow_mode_and_compilation_put_nothing_off(group, monkeypatch):
    monkeypatch.setattr(adapter, "settings", lambda: settings.Settings(shadow="1"))
    assert isinstance(asked_in_a_layer(x_of(1)), torch.Tensor)
    monkeypatch.undo()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, SimpleNamespace(_TP=group))
    assert isinstance(asked_in_a_layer(x_of(1)), torch.Tensor)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    monkeypatch.setattr(models_served, "_announced", {"model_type": "deepseek_v4", "torch_compile": True})
    assert isinstance(asked_in_a_layer(x_of(1)), torch.Tensor)


def test_where_functions_of_the_users_look_sums_are_tensors(group, monkeypatch):
    monkeypatch.setattr(models_served, "_announced", {"model_type": "deepseek_v4", "is_looked_into": True})
    assert isinstance(asked_in_a_layer(x_of(1)), torch.Tensor) and group.sums == 1


# ---- who looks at it


def test_what_a_sum_and_its_terms_have_alike_is_no_look(group):
    waits, x = owed(group), x_of(3)
    assert (waits.shape, waits.dtype, waits.device, waits.ndim, len(waits)) == (x.shape, x.dtype, x.device, 2, 3)
    assert waits.dim() == 2 and waits.size(1) == HIDDEN and waits.is_contiguous() and waits.numel() == x.numel()
    assert group.sums == 0


LOOKS = {
    "torch function": lambda x: torch.nn.functional.relu(x),
    "second argument": lambda x: torch.add(torch.ones(3, HIDDEN), x),
    "in a list": lambda x: torch.cat([torch.zeros(1, HIDDEN), x]),
    "keyword": lambda x: torch.mul(input=x, other=3),
    "operator": lambda x: x + 1,
    "reflected": lambda x: 2.0 - x,
    "a tensor's operator": lambda x: torch.ones(3, HIDDEN) * x,
    "both": lambda x: x + x,
    "method": lambda x: x.view(-1)[:7],
    "cut": lambda x: x[1:],
    "copied into": lambda x: torch.zeros(3, HIDDEN).copy_(x),
    "assigned": lambda x: operator.setitem(found := torch.zeros(3, HIDDEN), slice(None), x) or found,
    "rows one by one": lambda x: torch.stack(list(x)),
    "in place": lambda x: operator.iadd(x, 1),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_else_looks_gets_the_finished_sum(group, name):
    waits = owed(group)
    found = LOOKS[name](waits)
    assert isinstance(found, torch.Tensor) and torch.equal(found, LOOKS[name](RANKS * x_of(3))) and group.sums == 1
    LOOKS[name](waits)
    assert group.sums == 1, "made once"


def test_what_was_looked_at_is_no_sum_for_the_boundary(group):
    waits = owed(group)
    assert finished(waits) is waits.run() and finished(None) is None
    f, way = waits.for_boundary()
    assert torch.equal(f, RANKS * x_of(3)) and way == {} and (group.sums, group.ca_comm.next_tag()) == (1, 1)


# ---- the boundaries


def streams_of(rows):
    return {
        "residual": torch.ones(rows, 4, HIDDEN).bfloat16(),
        "post": torch.ones(rows, 4, 1),
        "comb": torch.ones(rows, 4, 4),
        "weights": (torch.zeros(24, 4 * HIDDEN), torch.ones(3), torch.zeros(24)),
    }


@pytest.fixture
def served(group, monkeypatch):
    """The calls of the operators: (name, f, what says how to sum)."""
    calls = []

    def mhc(f, streams, post, comb, *weights, sum_over=None, tag=0, **options):
        calls.append(("mhc", f, sum_over, tag))
        return streams, post.view(-1, 4), comb, streams[:, 0]

    monkeypatch.setattr(boundary.op, "mhc", mhc)
    monkeypatch.setattr(
        boundary.op, "mhc_post", lambda f, streams, *_: calls.append(("mhc_post", f, None, 0)) or streams
    )
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    return calls


def test_a_boundary_takes_the_term_and_its_group(group, served):
    waits, given = owed(group), streams_of(3)
    fused = boundary.replace_fused_post_pre(None)
    fused(waits, given["residual"], given["post"], given["comb"], *given["weights"], 1e-6, 1e-6, 1e-6, 2.0, 20)
    [(name, f, sum_over, tag)] = served
    assert name == "mhc" and torch.equal(f, x_of(3)) and sum_over is group.ca_comm.sums and tag == 1 and not group.sums


def test_a_boundary_that_is_not_ours_and_a_post_get_the_sum(group, served):
    given, seen = streams_of(3), []
    fused = boundary.replace_fused_post_pre(lambda x, *_, **__: seen.append(x))
    # two epsilons: SGLang's own
    fused(owed(group), given["residual"], given["post"], given["comb"], *given["weights"], 1e-6, 1e-6, 1e-3, 2.0, 20)
    boundary.replace_hc_post(None)(None, owed(group), given["residual"], given["post"], given["comb"])
    boundary.replace_hc_post(lambda self, x, *_: seen.append(x))(
        None, owed(group), given["residual"].float(), given["post"], given["comb"]
    )
    seen += [f for _, f, *_ in served]
    assert len(seen) == 3 and all(type(x) is torch.Tensor and torch.equal(x, RANKS * x_of(3)) for x in seen)
    assert group.sums == 3


def test_two_who_want_it(group, served):
    """As where a layer's output is captured beside the next layer."""
    waits, given = owed(group), streams_of(3)
    boundary.replace_hc_post(None)(None, waits, given["residual"], given["post"], given["comb"])
    fused = boundary.replace_fused_post_pre(None)
    fused(waits, given["residual"], given["post"], given["comb"], *given["weights"], 1e-6, 1e-6, 1e-6, 2.0, 20)
    assert [(name, sum_over, tag) for name, _, sum_over, tag in served] == [("mhc_post", None, 0), ("mhc", None, 0)]
    assert all(torch.equal(f, RANKS * x_of(3)) for _, f, *_ in served) and group.sums == 1
