"""The adapter on what SGLang gives it: objects without a card, then processes of a gloo group with emulated cards."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.commands.doctor import finding, gpu_checks
from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.ops import all_reduce_probe as probe
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce as adapter
from tests.ops import all_reduce_emulated as emulated

HIDDEN = 4096
DEVICE = torch.device("cpu")


class Theirs:
    """CustomAllreduce as far as anybody asks it."""

    max_size = 8 << 20

    def __init__(self, group=None, device=None, disabled=False):
        self.group, self.disabled, self.calls = group, disabled, []

    def should_custom_ar(self, inp):
        self.calls.append("asked")
        return inp.shape[0] <= 1024

    def custom_all_reduce(self, input):
        self.calls.append("sum")
        return torch.full_like(input, 7.0)

    @contextmanager
    def capture(self):
        self.calls.append("begin")
        yield
        self.calls.append("end")

    def close(self):
        self.calls.append("close")


class Group(op.AllReduce):
    """Of ours, without memory or a card."""

    def __init__(self, max_rows=op.MAX_ROWS):
        self.rank, self.ranks, self.device, self.max_rows, self.hidden = 0, 2, DEVICE, max_rows, HIDDEN
        self.slot_vectors = 36 * 8080
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def sums(monkeypatch):
    """What the operator was called with, (rows, tag); it doubles."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(op, "all_reduce", lambda x, group, *, tag: found.append((x.shape[0], tag)) or 2 * x)
    return found


def x_of(rows, hidden=HIDDEN, dtype=torch.bfloat16):
    return torch.ones(rows, hidden, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 8, 512])
def test_small_sums_are_ours(rows, sums):
    theirs = Theirs()
    ours = adapter.Communicator(theirs, Group())
    assert not ours.disabled and ours.should_custom_ar(x_of(rows)) is True
    assert float(ours.custom_all_reduce(x_of(rows))[0, 0]) == 2.0
    assert sums == [(rows, 0)] and theirs.calls == []


@pytest.mark.parametrize(
    "x",
    [
        x_of(513),
        x_of(8, 2048),
        x_of(8, dtype=torch.float32),
        x_of(8)[0],
        x_of(2, 2 * HIDDEN)[:, :HIDDEN],
        x_of(0),
        torch.ones(8 * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(8, HIDDEN),
    ],
    ids=["513 rows", "2048 wide", "float32", "1 dim", "strided", "no rows", "unaligned"],
)
@pytest.mark.parametrize("disabled", [False, True])
def test_what_the_operator_does_not_take_is_theirs(x, disabled, sums):
    theirs = Theirs(disabled=disabled)
    ours = adapter.Communicator(theirs, Group())
    assert ours.should_custom_ar(x) is (not disabled and x.shape[0] <= 1024)
    ours.custom_all_reduce(x)
    assert sums == [] and theirs.calls == (["sum"] if disabled else ["asked", "sum"])


def test_what_else_is_asked_is_theirs(sums):
    theirs = Theirs(group="a group")
    ours = adapter.Communicator(theirs, group := Group(), products := Group())
    assert ours.max_size == 8 << 20 and ours.group == "a group" and not hasattr(ours, "reduce_scatter")
    with ours.capture():
        assert theirs.calls == ["begin"]
    ours.close()
    assert theirs.calls == ["begin", "end", "close"] and group.closed and products.closed


def test_a_sum_is_named_by_its_place_in_the_graph(sums, monkeypatch):
    ours = adapter.Communicator(Theirs(), Group())
    for capturing, rows in ((False, 1), (True, 1), (True, 1), (False, 1), (True, 2)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        ours.custom_all_reduce(x_of(rows))
    assert sums == [(1, 0), (1, 1), (1, 2), (1, 0), (2, 1)]


# ---- gathers


@pytest.fixture
def gathered(monkeypatch):
    """What the operator was called with, (rows, tag)."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def all_gather(x, group, *, tag):
        found.append((x.shape[0], tag))
        return torch.cat([x] * group.ranks, 1)

    monkeypatch.setattr(op, "all_gather", all_gather)
    return found


class Gathering:
    """A GroupCoordinator, as far as a gather asks it."""

    def __init__(self, ca_comm, symmetric=False):
        self.ca_comm, self.asked = ca_comm, []
        self.is_symmetric_memory_enabled = lambda: symmetric

    def all_gather(self, input_, dim=-1, output_tensor_list=None):
        self.asked.append((tuple(input_.shape), dim, output_tensor_list))
        return torch.cat([input_] * 2, dim) + self.off

    off = 0.0


def gathering(coordinator, *call, **named):
    return adapter.replace_all_gather(Gathering.all_gather)(coordinator, *call, **named)


@pytest.mark.parametrize("call", [{}, {"dim": -1}, {"dim": 1}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 64])
def test_gathers_of_few_rows_are_ours(rows, dtype, call, gathered):
    coordinator, x = Gathering(adapter.Communicator(Theirs(), Group())), torch.ones(rows, 64_640, dtype=dtype)
    assert gathering(coordinator, x, **call).shape == (rows, 129_280)
    assert gathered == [(rows, 0)] and coordinator.asked == []


def logits_of(rows=2, columns=16, dtype=torch.bfloat16):
    return torch.ones(rows, columns, dtype=dtype)


def no_group(coordinator):
    coordinator.ca_comm = None


def disabled(coordinator):
    coordinator.ca_comm.disabled = True


@pytest.mark.parametrize(
    ("x", "call", "of"),
    [
        (logits_of(65), (), None),
        (logits_of(columns=12), (), None),
        (logits_of(dtype=torch.int64), (), None),
        (logits_of(), (0,), None),
        (logits_of()[None], (), None),
        (logits_of(columns=32)[:, :16], (), None),
        (logits_of(), (-1, []), None),
        (logits_of(), (), no_group),
        (logits_of(), (), disabled),
    ],
    ids=["65 rows", "12 wide", "int64", "dim 0", "3 dims", "strided", "a list", "no object", "disabled"],
)
def test_other_gathers_are_sglangs(x, call, of, gathered):
    coordinator = Gathering(adapter.Communicator(Theirs(), Group()))
    if of is not None:
        of(coordinator)
    gathering(coordinator, x, *call)
    assert gathered == [] and coordinator.asked == [(tuple(x.shape), *call, *(-1, None)[len(call) :])]


def test_a_gather_by_symmetric_memory_is_sglangs(gathered):
    coordinator = Gathering(adapter.Communicator(Theirs(), Group()), symmetric=True)
    gathering(coordinator, logits_of())
    assert gathered == [] and len(coordinator.asked) == 1


def test_sglangs_own_object_knows_no_gather_of_ours(gathered):
    """Another model's server, or one whose cards have no way."""
    coordinator = Gathering(Theirs())
    gathering(coordinator, logits_of())
    assert gathered == [] and len(coordinator.asked) == 1


def test_sums_and_gathers_are_numbered_together(gathered, sums, monkeypatch):
    communicator = adapter.Communicator(Theirs(), Group())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    communicator.custom_all_reduce(x_of(1))
    gathering(Gathering(communicator), logits_of())
    assert sums == [(1, 1)] and gathered == [(2, 2)]


# ---- shadow mode


class Coordinator:
    """all_reduce of a GroupCoordinator: its communicator where that takes the sum, else in place."""

    def __init__(self, ca_comm):
        self.ca_comm = ca_comm

    def all_reduce(self, x):
        if not self.ca_comm.disabled and self.ca_comm.should_custom_ar(x):
            return self.ca_comm.custom_all_reduce(x)
        x.fill_(2.0)
        return x


@pytest.fixture
def shadowed(monkeypatch, request):
    monkeypatch.setattr(shadow, "settings", lambda: settings.Settings(shadow=request.param))
    shadow.reset()
    yield request.param
    shadow.reset()


def in_a_group(monkeypatch, theirs):
    ours = adapter.Communicator(theirs, Group())
    state, coordinator = ModuleType(adapter.PARALLEL_STATE), Coordinator(ours)
    state._groups = {"gone": lambda: None, "pp:0": lambda: SimpleNamespace(ca_comm=None), "tp:0": lambda: coordinator}
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, state)
    return ours


@pytest.mark.parametrize("shadowed", ["1", "ours"], indirect=True)
@pytest.mark.parametrize("disabled", [True, False])
def test_shadow_mode_has_sglangs_own_sum_beside(shadowed, disabled, sums, monkeypatch):
    """NCCL's, in place, where their object is disabled; else theirs, which differs here."""
    theirs, x = Theirs(disabled=disabled), x_of(8)
    ours = in_a_group(monkeypatch, theirs)
    out = ours.custom_all_reduce(x)
    stock = 2.0 if disabled else 7.0
    assert float(out[0, 0]) == (2.0 if shadowed == "ours" else stock) and float(x[0, 0]) == 1.0
    (record,) = shadow.report()
    assert (record["patch"], record["shape"], record["calls"]) == ("all_reduce", {"rows": 8}, 1)
    assert record["bad_calls"] == (0 if disabled else 1) and sums == [(8, 0)]
    assert ours.should_custom_ar(x) is True and theirs.calls == ([] if disabled else ["asked", "sum"])


@pytest.mark.parametrize("shadowed", ["1", "ours"], indirect=True)
@pytest.mark.parametrize("off", [0.0, 2.0**-7])
def test_shadow_mode_has_sglangs_own_gather_beside(shadowed, off, gathered):
    """A bit is too much; what is not finite there is left out."""
    coordinator, x = Gathering(adapter.Communicator(Theirs(), Group())), logits_of(3)
    coordinator.off = off
    x[0, 0], x[1, 1] = -torch.inf, torch.nan
    out = gathering(coordinator, x)
    assert float(out[2, 0]) == (1.0 if shadowed == "ours" else 1.0 + off)
    (record,) = shadow.report()
    assert (record["patch"], record["shape"], record["calls"], record["bound"]) == ("all_gather", {"rows": 3}, 1, 0.0)
    assert record["bad_calls"] == (1 if off else 0) and record["nonfinite_original"] == 4 and gathered == [(3, 0)]


@pytest.mark.parametrize("shadowed", ["1"], indirect=True)
def test_in_the_warm_up_of_a_capture_there_is_nothing_to_compare_with(shadowed, sums, monkeypatch):
    """SGLang's v1 gives zeros there."""
    with (ours := in_a_group(monkeypatch, Theirs())).capture():
        assert float(ours.custom_all_reduce(x_of(8))[0, 0]) == 2.0 and shadow.report() == []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert float(ours.custom_all_reduce(x_of(8))[0, 0]) == 7.0 and len(shadow.report()) == 1


# ---- what a rank looks at before anything is tried


@pytest.fixture
def our_model(monkeypatch):
    state = ModuleType(adapter.PARALLEL_STATE)
    state._TP = None
    monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, state)
    monkeypatch.setattr(models_served, "announced", lambda: {"model_type": "deepseek_v4", "hidden": HIDDEN})
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    return state


def dispatched():
    return adapter.replace_dispatch(lambda group, device: Theirs)(group="group", device=DEVICE)


def test_the_tensor_parallel_group_of_our_model_is_asked_about(our_model):
    assert dispatched() is not Theirs


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"model_type": "deepseek_v41", "hidden": 5120},
        {"model_type": "llama", "hidden": 4096},
        {"model_type": "deepseek_v4", "hidden": 5120},
        {"model_type": "deepseek_v4"},
    ],
)
def test_other_models_are_untouched(told, our_model, monkeypatch):
    monkeypatch.setattr(models_served, "announced", lambda: told)
    assert dispatched() is Theirs


@pytest.mark.parametrize("ranks", [1, 3, 6, 16])
def test_other_worlds_are_untouched(ranks, our_model, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    assert dispatched() is Theirs


def test_other_groups_are_untouched(our_model):
    our_model._TP = object()
    assert dispatched() is Theirs


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("several_hosts", "the sums between the cards stay SGLang's: the server has several hosts (--nnodes)"),
        ("ranks_come_and_go", "the sums between the cards stay SGLang's: ranks may end and come back"),
    ],
)
@pytest.mark.parametrize(("reproducible", "ranks", "rank"), [(False, 4, 0), (False, 4, 1), (True, 4, 0), (True, 2, 1)])
def test_who_may_not_answer_is_not_asked(asked, words, reproducible, ranks, rank, our_model, monkeypatch, caplog):
    """Those of another host may be without us, and of elastic parallelism a new one comes alone. NCCL's sums of two
    cards have one order. With several hosts each rank says so: the first one's may be the one without us."""
    told = {"model_type": "deepseek_v4", "hidden": HIDDEN, asked: True}
    monkeypatch.setattr(models_served, "announced", lambda: told)
    monkeypatch.setattr(report, "_notes", {})
    monkeypatch.setattr(
        adapter, "settings", lambda: settings.Settings(choices={"reproducible": "on"} if reproducible else {})
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *_, **__: pytest.fail("the others are asked"))
    with caplog.at_level(logging.WARNING):
        made = dispatched()(group="group", device=DEVICE)
    assert (words in caplog.text) is (rank == 0 or asked == "several_hosts")
    assert type(made) is Theirs and made.disabled is reproducible
    described, found = (tell() for tell in report._notes["all_reduce"])
    facts = SimpleNamespace(status={"processes": [{"found": {"all_reduce": found}}]}, probe={"sums": None})
    (told_by_doctor,) = gpu_checks._sums(facts)  # not what its own probe of these cards finds
    assert told_by_doctor.state == finding.WARN and words in told_by_doctor.found
    assert words in described and ("NOT REPRODUCIBLE" in described) is (reproducible and ranks > 2)


def modules_with(monkeypatch, context=None, arguments=None):
    found = {adapter.CONTEXT: context, adapter.SERVER_ARGS: arguments}
    monkeypatch.setattr(adapter, "find_spec", lambda name: found[name])
    monkeypatch.setattr(adapter.importlib, "import_module", lambda name: found[name])


def arguments_of(requests, drafts):
    told = SimpleNamespace(max_running_requests=requests, max_speculative_num_draft_tokens=drafts)
    return SimpleNamespace(get_global_server_args=lambda: told)


@pytest.mark.parametrize(("requests", "drafts", "rows"), [(8, None, 8), (256, 2, 512), (32, 4, 128)])
def test_the_most_rows_of_a_step(requests, drafts, rows, monkeypatch):
    modules_with(monkeypatch, None, arguments_of(requests, drafts))  # up to 0.5.14
    assert adapter._most_rows() == rows
    modules_with(monkeypatch, SimpleNamespace(get_schedule=None), arguments_of(requests, drafts))  # to 0.5.17
    assert adapter._most_rows() == rows
    schedule = SimpleNamespace(max_running_requests=requests)
    now = SimpleNamespace(get_schedule=lambda: schedule, max_speculative_num_draft_tokens=lambda: drafts)
    modules_with(monkeypatch, now, None)
    assert adapter._most_rows() == rows


def place(**changes):
    return adapter.Place(True, "here", 64)._replace(**changes)


@pytest.mark.parametrize(
    ("capability", "force", "served"), [((12, 0), None, True), ((9, 0), None, False), ((9, 0), "ops", True)]
)
def test_asking_for_the_card_does_not_look_at_all_modules(capability, force, served, monkeypatch):
    """device_gate.serves does so once, when the first call is served; there is no model yet."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(adapter, "settings", lambda: settings.Settings(force=force))
    monkeypatch.setattr(device_gate, "_first_served", [lambda: pytest.fail("too early")])
    assert adapter._is_served(torch.device("cuda", 0)) is served


def test_what_stands_against_ours_is_said():
    assert adapter._why_not([place(), place()]) is None
    assert "several hosts" in adapter._why_not([place(), place(host="there")])
    assert "may have 513 rows, ours takes 512" in adapter._why_not([place(most_rows=513)] * 2)
    assert adapter._why_not([place(most_rows=512)] * 2) is None
    assert "several hosts" in adapter._why_not([place(host=None)] * 2), "where nobody can tell"


# ---- processes with emulated cards


@pytest.fixture(scope="module")
def library():
    return emulated.library()


SMALL = 64  # hidden


def not_made(rank, *_, **__):
    if rank == 0:
        raise RuntimeError("no memory")


def without_memory_for_products(make, rank):
    return lambda *given, **named: not_made(1 - rank) if "name" in named else make(*given, **named)


def as_a_rank(rank, ranks, gather, python, library, case):
    """What a rank of SGLang does: dispatch, the object, some sums and gathers in turn, its end.
    (kind, text of the log, note, sums and what was gathered)"""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    emulated.stand_in(library)
    for name in ("START_S", "STEP_S", "WHOLE_S"):
        setattr(probe, name, 400.0)
    if "program" in case and rank == case["program"]:
        python = ("/nowhere/python",)
    probe.probe.__kwdefaults__["program"] = (*python, emulated.__file__, str(library), json.dumps(case["fault"]))
    limits.LIMITS["all_reduce"]["hidden"] = limits.OneOf((SMALL,))
    models_served.announced = lambda: {"model_type": "deepseek_v4", "hidden": SMALL}
    capability = (9, 0) if rank in case.get("not_served", ()) else (12, 0)
    torch.cuda.get_device_capability = lambda device: capability
    adapter._most_rows = lambda: case.get("rows", 64)
    adapter._deals = lambda: rank in case.get("deals", ())
    state = sys.modules[adapter.PARALLEL_STATE] = ModuleType(adapter.PARALLEL_STATE)
    state._TP = None
    choices = {"all_reduce": case["chosen"]} if "chosen" in case else {}
    adapter.settings = lambda: settings.Settings(choices=choices)
    group = torch.distributed.group.WORLD
    if case.get("not_made"):
        adapter.op.AllReduce = not_made
    if case.get("no_products"):
        adapter.op.AllReduce = without_memory_for_products(adapter.op.AllReduce, rank)
    made = adapter.replace_dispatch(lambda group, device: Theirs)(group=group, device=torch.device("cpu"))(
        group=group, device=torch.device("cpu")
    )
    notes = [describe() for describe, _ in report._notes.values()]
    state._TP = made  # a group of the same cards that comes behind
    behind = adapter.replace_dispatch(lambda group, device: Theirs)(group=group, device=DEVICE)(
        group=group, device=DEVICE
    )
    assert type(behind).__name__ == "Theirs" and behind.disabled == getattr(made, "_theirs", made).disabled
    sums = []
    if "deals" in case:
        notes = [made.why_whole if made.products is None else made.products.bytes]
    if isinstance(made, adapter.Communicator):
        for turn, rows in enumerate((1, 8, 9, 512, 3)):
            x = emulated.child.terms_of(ranks, rows, SMALL, turn, DEVICE)[rank]
            assert made.should_custom_ar(x)
            logits = emulated.child.terms_of(ranks, min(rows, 64), 72, turn, DEVICE)[rank]
            sums.append((made.custom_all_reduce(x), gathering(Gathering(made), logits)))
        gather(None)
        made.close()
    theirs = getattr(made, "_theirs", made)
    notes += ["theirs is disabled"] if theirs.disabled else []
    return type(made).__name__, said, notes, sums


@pytest.fixture
def ranks_of(program_python, library):
    def run(ranks=2, fault=None, **case):
        python = program_python()
        return emulated.in_gloo(python, ranks, as_a_rank, python, library, {"fault": fault or {}, **case})

    return run


def test_ranks_sum_and_gather_to_the_bit_by_the_way_that_the_probe_found(ranks_of):
    found = ranks_of()
    for kind, _, notes, sums in found:
        assert kind == "Communicator" and len(sums) == 5
        assert (
            notes == ["all_reduce: " + notes[0].removeprefix("all_reduce: ")] and "sum by way of each other" in notes[0]
        )
        for turn, rows in enumerate((1, 8, 9, 512, 3)):
            expected = reference(emulated.child.terms_of(2, rows, SMALL, turn, DEVICE))
            known, (found_sum, gathered) = ~expected.isnan(), sums[turn]
            assert torch.equal(found_sum[known], expected[known]) and torch.equal(found_sum.isnan(), ~known)
            words = torch.cat(emulated.child.terms_of(2, min(rows, 64), 72, turn, DEVICE), 1).view(torch.int32)
            assert torch.equal(gathered.view(torch.int32), torch.where(words == -1, 0x7FFF7FFF, words))
    lines = [[line for line in said if "all_reduce" in line] for _, said, *_ in found]
    assert len(lines[0]) == 1 and "each other's memory" in lines[0][0] and "(probe: " in lines[0][0] and lines[1] == []


@pytest.mark.parametrize("chosen", [None, "peer"])
def test_where_no_way_works_all_ranks_have_nccls_sums_and_one_line_says_why(chosen, ranks_of):
    """SGLang's own object goes by the peers that were seen to fail."""
    found = ranks_of(fault={"rank": 1, "way": "both", "what": "wrong bits"}, **({"chosen": chosen} if chosen else {}))
    assert [kind for kind, *_ in found] == ["Theirs", "Theirs"]
    lines = [line for _, said, *_ in found for line in said if "all_reduce" in line]
    assert len(lines) == 1 and "the sums between the cards are NCCL's" in lines[0]
    assert "rank 1: 1 of 576 sums are wrong" in lines[0] and "ACS" in lines[0] and "IOMMU" in lines[0]
    assert "SGLang's own kernel, which goes by peers too, sums nothing" in lines[0] and "NCCL_P2P_DISABLE=1" in lines[0]
    for *_, (note, disabled), _ in found:
        assert "are NCCL's" in note and disabled == "theirs is disabled"


def test_where_peers_were_not_tried_the_choice_is_sglangs(ranks_of):
    found = ranks_of(program=1)
    for kind, _, notes, _ in found:
        assert kind == "Theirs" and len(notes) == 1 and "stay SGLang's" in notes[0]
        assert "by way of each other's memory: not tried: rank 1: its probe does not start" in notes[0]


def test_peers_that_fail_are_left_where_ours_is_not_made_either(ranks_of):
    found = ranks_of(fault={"rank": 1, "way": "peer", "what": "wrong bits"}, not_made=True)
    for kind, _, (note, disabled), _ in found:
        assert kind == "Theirs" and disabled == "theirs is disabled"
        assert note == "all_reduce: the sums between the cards are NCCL's: rank 0: no memory"


@pytest.mark.parametrize(("chosen", "words"), [("host", "host memory"), ("peer", "each other's memory")])
def test_the_way_that_the_user_chose_is_the_only_one_tried(chosen, words, ranks_of):
    """A fault of the other one is never met; by host memory, SGLang's object, which goes by peers, sums nothing."""
    other = {"host": "peer", "peer": "host"}[chosen]
    found = ranks_of(fault={"rank": 1, "way": other, "what": "dies"}, chosen=chosen)
    for kind, _, (note, *disabled), sums in found:
        assert kind == "Communicator" and len(sums) == 5 and bool(disabled) == (chosen == "host")
        assert note.startswith(f"all_reduce: 2 cards sum by way of {words} (chosen by the user, the only one tried): ")
        assert "; " not in note


def test_by_peers_that_fail_sglangs_own_object_sums_nothing_either(ranks_of):
    """Its kernels write and read there, too: prompts of 513 to 1,024 rows on two cards."""
    for kind, _, (note, disabled), sums in ranks_of(fault={"rank": 1, "way": "peer", "what": "wrong bits"}):
        assert kind == "Communicator" and len(sums) == 5 and disabled == "theirs is disabled"
        assert note.startswith("all_reduce: 2 cards sum by way of host memory: ")
        assert "rank 1: 1 of 576 sums are wrong" in note and "SGLang's own kernel, which goes by peers too" in note
        assert "NCCL_P2P_DISABLE=1 now" in note


def test_where_the_chosen_way_does_not_work_none_is_ours(ranks_of):
    found = ranks_of(fault={"rank": 0, "way": "host", "what": "wrong bits"}, chosen="host")
    for kind, _, (note, disabled), _ in found:
        assert kind == "Theirs" and disabled and "chosen by the user" in note and "rank 0: 1 of 576 sums" in note


@pytest.mark.parametrize(
    ("case", "line"),
    [({"not_served": (1,)}, None), ({"rows": 1024}, "--max-running-requests")],
    ids=["a card that is not ours", "more rows than ours takes"],
)
def test_what_all_ranks_must_have_is_asked_of_all(case, line, ranks_of):
    found = ranks_of(**case)
    assert [kind for kind, *_ in found] == ["Theirs", "Theirs"]
    lines = [text for _, said, *_ in found for text in said if "all_reduce" in text]
    assert (len(lines) == 1 and line in lines[0]) if line else lines == []
    assert all(notes and line in notes[0] if line else notes == [] for *_, notes, _ in found)


def test_dealt_products_have_a_group_of_their_own_where_all_ranks_deal(ranks_of):
    for kind, _, (held,), sums in ranks_of(deals=(0, 1)):
        assert kind == "Communicator" and len(sums) == 5 and 0 < held < 100_000


@pytest.mark.parametrize(
    ("case", "why"),
    [({"deals": (0,)}, "not every rank deals"), ({"deals": (0, 1), "no_products": True}, "rank 1: no memory")],
)
def test_products_are_whole_on_all_ranks_alike_and_the_sums_are_ours(case, why, ranks_of):
    for kind, _, notes, sums in ranks_of(**case):
        assert kind == "Communicator" and len(sums) == 5 and notes == [why]
