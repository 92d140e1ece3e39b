"""The compressors' products, dealt to ranks: with the kernel's order of sums on the CPU, and the gather's own text
between processes of a gloo group; and when the ranks deal, which all must answer alike."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.ops import all_reduce as gathers
from deepseek_v4_sm120.ops import all_reduce_sizes
from deepseek_v4_sm120.ops.all_reduce_sizes import DEALT_ROWS
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce as sums_adapter
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear as whole_adapter
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear_dealt as adapter
from deepseek_v4_sm120.sglang_patches.adapters import compressor, prompts_in_halves
from tests.ops import all_reduce_emulated as emulated

INPUTS, SHARES = 512, 16


def by_the_kernels_order(x, weight, *, out_dtype=torch.float32):
    """16 shares of the inputs, each from its first to its last, then the shares from the first to the last: as
    csrc/bf16_linear adds them, whatever the rows and the outputs are, but for the order within 16 inputs of an mma."""
    x, weight = (one.float().unflatten(1, (SHARES, -1)).movedim(2, 0).contiguous() for one in (x, weight))
    shares = torch.zeros(x.shape[1], weight.shape[1], SHARES)
    for i in range(x.shape[0]):
        shares = shares + x[i, :, None] * weight[i, None]
    found = torch.zeros(shares.shape[:2])
    for i in range(SHARES):
        found = found + shares[..., i]
    return found.to(out_dtype)


def tensors(rows=3, outputs=1024, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.empty(n, INPUTS).uniform_(-2.0, 2.0, generator=generator).bfloat16() for n in (rows, outputs))
    return x, weight


class Group(gathers.AllReduce):
    """Of one rank of several, without memory or a card."""

    def __init__(self, rank=0, ranks=2):
        self.rank, self.ranks = rank, ranks

    def close(self):
        pass


class Theirs:
    disabled = False

    def should_custom_ar(self, inp):
        return False

    def close(self):
        pass


class Coordinator:
    def __init__(self, world_size=2, ca_comm=None):
        self.world_size, self.ca_comm = world_size, ca_comm


class State(ModuleType):
    """sglang.srt.distributed.parallel_state of plain tensor parallelism."""

    def __init__(self, tp):
        super().__init__(adapter.PARALLEL_STATE)
        self._TP = self._ATTN_TP = tp
        self._PP, self._PDMUX_PREFILL_TP_GROUP, self._DCP = Coordinator(1), None, Coordinator(1)
        self.moe_ep = Coordinator(1)

    def get_moe_ep_group(self):
        return self.moe_ep


def original(x, y, *args, **kwargs):
    return "original" if len(y) > len(x) else "of a weight that is none"


@pytest.fixture
def dealing(monkeypatch):
    """of(rank, ranks) -> SGLang's module of groups, for that rank; `parts`: what its gather was given."""
    parts = []

    def all_gather(x, group, *, tag):
        parts.append((tuple(x.shape), group, tag))
        return torch.cat([x] * group.ranks, 1)

    def of(rank=0, ranks=2):
        communicator = sums_adapter.Communicator(Theirs(), Group(rank, ranks), Group(rank, ranks))
        state = State(Coordinator(ranks, communicator))
        monkeypatch.setitem(sys.modules, adapter.PARALLEL_STATE, state)
        return state

    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.bf16_linear, "bf16_linear", by_the_kernels_order)
    monkeypatch.setattr(adapter.all_reduce, "all_gather", all_gather)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compressor, "_in_place", {original})
    monkeypatch.setattr(report, "_notes", {})
    monkeypatch.setattr(adapter, "_seen", type(adapter._seen)())
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    adapter._tell_whole.cache_clear()
    shadow.reset()
    of.parts = parts
    yield of
    adapter._tell_whole.cache_clear()
    shadow.reset()


@pytest.mark.parametrize("outputs", [1024, 2048])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 9, 32])
def test_the_ranks_shares_side_by_side_are_the_whole_to_the_bit(ranks, rows, outputs, dealing, monkeypatch):
    x, weight = tensors(rows, outputs)
    monkeypatch.setattr(adapter.all_reduce, "all_gather", lambda part, group, *, tag: part)
    found = []
    for rank in range(ranks):
        dealing(rank, ranks)
        found.append(adapter.replace_linear_bf16_fp32(original)(x, weight))
    assert {tuple(part.shape) for part in found} == {(rows, outputs // ranks)}
    assert torch.equal(torch.cat(found, 1).view(torch.int32), by_the_kernels_order(x, weight).view(torch.int32))


def test_a_share_is_a_view_of_the_weights(dealing, monkeypatch):
    """Nothing is copied, and new weights in the same memory are what is multiplied next."""
    seen = []
    monkeypatch.setattr(adapter.bf16_linear, "bf16_linear", lambda x, w: seen.append(w) or by_the_kernels_order(x, w))
    x, weight = tensors(outputs=2048)
    dealing(3, 4)
    adapter.replace_linear_bf16_fp32(original)(x, weight)
    assert [w.data_ptr() for w in seen] == [weight[3 * 512 :].data_ptr()] and seen[0].shape == (512, INPUTS)


def test_calls_are_numbered_apart_from_the_sums(dealing, monkeypatch):
    ours = dealing()._TP.ca_comm
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    replaced = adapter.replace_linear_bf16_fp32(original)
    assert [ours.next_tag(), ours.next_tag()] == [1, 2]
    replaced(*tensors())
    replaced(*tensors())
    assert [(group is ours.products, tag) for _, group, tag in dealing.parts] == [(True, 1), (True, 2)]
    assert ours.next_tag() == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(*tensors(rows=DEALT_ROWS + 1)),
        lambda f: f(*tensors(outputs=512)),
        lambda f: f(tensors()[0].float(), tensors()[1]),
        lambda f: f(tensors()[0][:0], tensors()[1]),
        lambda f: f(*tensors(), hpc_kernel_min_m=4),
    ],
    ids=["33 rows", "the index compressor's", "float32 x", "no rows", "a keyword"],
)
def test_what_is_not_dealt_is_bf16_linears(call, dealing):
    dealing()
    assert call(adapter.replace_linear_bf16_fp32(original)) == "original" and dealing.parts == []
    assert report._notes == {}, "nothing to tell"


@pytest.mark.parametrize(("in_place", "deals"), [(None, False), ({"all_reduce"}, False), ({sums_adapter.DEALT}, True)])
def test_a_rank_deals_where_that_is_in_place(in_place, deals, monkeypatch):
    engine = None if in_place is None else SimpleNamespace(in_place=lambda: in_place)
    monkeypatch.setattr(patching, "_engine", engine)
    assert sums_adapter._deals() is deals


def test_one_card_has_all(dealing):
    dealing(0, 1)
    assert adapter.replace_linear_bf16_fp32(original)(*tensors()) == "original" and report._notes == {}


def no_group(state):
    state._TP.ca_comm = Theirs()


def disabled(state):
    state._TP.ca_comm.disabled = True


def not_made(state):
    state._TP.ca_comm.products, state._TP.ca_comm.why_whole = None, "rank 1: no memory"


def attention_of_its_own(state):
    state._ATTN_TP = Coordinator(1)


def multiplexed(state):
    state._PDMUX_PREFILL_TP_GROUP = Coordinator()


def pipeline(state):
    state._PP = Coordinator(2)


def experts(state):
    state.moe_ep = Coordinator(2)


def context(state):
    state._DCP = Coordinator(2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_group, "the sums between the cards are not ours"),
        (disabled, "the sums between the cards are not ours"),
        (not_made, "rank 1: no memory"),
        (attention_of_its_own, "data or context parallel attention"),
        (multiplexed, "PD multiplexing"),
        (pipeline, "pipeline parallelism"),
        (experts, "expert parallelism"),
        (context, "decode context parallelism"),
    ],
)
def test_why_products_stay_whole(change, why, dealing):
    state = dealing()
    change(state)
    for _ in range(2):
        assert adapter.replace_linear_bf16_fp32(original)(*tensors()) == "original"
    assert dealing.parts == []
    [(describe, found)] = report._notes.values()
    assert describe() == f"dealt_products: every card makes whole products: {why}" and found() == {"whole": why}


def test_whose_compressor_comes_behind(dealing, monkeypatch):
    """SGLang's may end before what is in front of it; ours waits."""
    state = dealing()
    monkeypatch.setattr(compressor, "_in_place", set())
    assert adapter.why_whole(state, state._TP.ca_comm) == "SGLang's own kernels compress"
    monkeypatch.setattr(compressor, "settings", lambda: Settings(choices={"reproducible": "on"}))
    compressor.replace_all_in_one_0_5_14(original)
    assert adapter.why_whole(state, state._TP.ca_comm) == "SGLang's own kernels compress"
    compressor.replace_all_in_one(original)
    assert adapter.why_whole(state, state._TP.ca_comm) is None


def test_compiled_models_and_prompts_in_small_halves(dealing, monkeypatch):
    """A half's sums by NCCL run beside the other half's products."""
    state = dealing()
    monkeypatch.setattr(models_served, "is_compiled", lambda: True)
    assert adapter.why_whole(state, state._TP.ca_comm) == "torch compiles the model"
    monkeypatch.setattr(models_served, "is_compiled", lambda: False)
    for least, why in ((0, None), (32, "prompts go in halves of as few rows"), (64, None), (2048, None)):
        monkeypatch.setattr(prompts_in_halves, "least_rows", lambda least=least: least)
        assert adapter.why_whole(state, state._TP.ca_comm) == why


def test_outputs_that_do_not_divide_stay_whole(dealing):
    dealing(0, 8)
    assert adapter.replace_linear_bf16_fp32(original)(*tensors(outputs=1040)) == "original" and dealing.parts == []
    assert next(iter(report._notes.values()))[1]() == {"whole": "1040 outputs are no multiple of 32"}


def test_what_was_dealt_is_counted(dealing):
    dealing()
    replaced = adapter.replace_linear_bf16_fp32(original)
    for rows in (1, 8, 32):
        replaced(*tensors(rows))
    [(describe, found)] = report._notes.values()
    assert describe() == "dealt_products: 3 products of up to 32 rows dealt to 2 cards"
    assert found() == {"ranks": 2, "products": 3, "rows": 41}


@pytest.mark.parametrize("mode", ["1", "ours"])
def test_shadow_compares_dealt_with_whole_to_the_bit(mode, dealing, monkeypatch):
    for module in (shadow, adapter):
        monkeypatch.setattr(module, "settings", lambda: Settings(shadow=mode))
    state, (x, weight) = dealing(), tensors()
    group = state._TP.ca_comm.products
    expected = by_the_kernels_order(x, weight)

    def all_gather(part, group, *, tag):
        others = by_the_kernels_order(x, weight[512:])
        return torch.cat((part, others), 1)

    monkeypatch.setattr(adapter.all_reduce, "all_gather", all_gather)
    replaced = adapter.replace_linear_bf16_fp32(original)
    found = replaced(x, weight)
    assert (found == "original") if mode == "1" else torch.equal(found, expected)
    [record] = shadow.report()
    assert (record["patch"], record["bound"], record["bad_calls"]) == ("dealt_products", 0.0, 0)
    assert record["shape"] == {"rows": 3, "outputs": 1024} and group.rank == 0
    monkeypatch.setattr(adapter.all_reduce, "all_gather", lambda *given, **named: 1.0001 * all_gather(*given, **named))
    replaced(x, weight)
    assert shadow.report()[0]["bad_calls"] == 1


def test_it_wraps_what_bf16_linear_put_there(dealing, monkeypatch):
    """33 rows are whole, of the same bits; 257 SGLang's."""
    monkeypatch.setattr(adapter.all_reduce, "all_gather", lambda part, group, *, tag: torch.cat((part, part), 1))
    dealing()
    replaced = adapter.replace_linear_bf16_fp32(whole_adapter.replace_linear_bf16_fp32(original))
    x, weight = tensors(33)
    weight[512:] = weight[:512]  # what the stand-in for the other rank sends
    assert torch.equal(replaced(x, weight)[:32], replaced(x[:32], weight))
    assert replaced(*tensors(257)) == "original"


# ---- processes with emulated cards

TURNS = ((1, 1024), (1, 2048), (3, 1024), (33, 1024), (32, 2048), (2, 2048), (1, 1024))  # rows, outputs


@pytest.fixture(scope="module")
def library():
    return emulated.library()


def test_the_places_hold_the_most_rows_in_one_launch(library):
    """Of the C4 compressor, 2,048 float32 sums a row, for every number of ranks and both ways."""
    places, kernels = all_reduce_sizes.vectors(DEALT_ROWS, 4096), emulated.Emulated(library)
    for ranks in gathers.RANKS:
        sent = DEALT_ROWS * 2048 // ranks * 4 // 16
        slots = [kernels.all_reduce_slot_vectors(ranks=ranks, transport=way, **places) for way in gathers.TRANSPORTS]
        assert min(slots) >= sent, ranks
        held = [kernels.all_reduce_places_bytes(ranks=ranks, transport=way, **places) for way in gathers.TRANSPORTS]
        assert 4 << 20 <= min(held) <= max(held) < 18 << 20 and held[0] % (2 << 20) == 0, "of a card"
    assert DEALT_ROWS <= all_reduce_sizes.GATHERED_ROWS


def as_a_rank(rank, ranks, gather, library, transport):
    """Products between sums, as a step has them; what this rank has of each product, and the fault of its groups."""
    emulated.stand_in(library, rank=rank)
    device_gate.serves = lambda device: True
    adapter.bf16_linear.bf16_linear = by_the_kernels_order
    compressor._in_place.add(original)
    made = [
        gathers.made_together(
            gather,
            lambda together, more=more: gathers.AllReduce(
                rank, ranks, torch.device("cpu"), together, transport=transport, patience_s=60.0, **more
            ),
        )[0]
        for more in ({"hidden": 64}, {"max_rows": DEALT_ROWS, "name": "dealt_products"})
    ]
    state = State(Coordinator(ranks, sums_adapter.Communicator(Theirs(), *made)))
    sys.modules[adapter.PARALLEL_STATE] = state
    replaced, found = adapter.replace_linear_bf16_fp32(original), []
    for turn, (rows, outputs) in enumerate(TURNS):
        x, weight = tensors(rows, outputs, seed=turn)
        found.append(replaced(x, weight))
        state._TP.ca_comm.custom_all_reduce(torch.ones(rows, 64, dtype=torch.bfloat16))
    gather(None)
    faults = [group.fault() for group in made]
    state._TP.ca_comm.close()
    return found, faults


@pytest.mark.parametrize(("ranks", "transport"), [(2, "peer"), (2, "host"), (4, "peer")])
def test_processes_have_the_whole_product_to_the_bit(ranks, transport, program_python, library):
    answers = emulated.in_gloo(program_python(), ranks, as_a_rank, library, transport)
    for found, faults in answers:
        assert faults == [None, None]
        for turn, (rows, outputs) in enumerate(TURNS):
            if rows > DEALT_ROWS:
                assert found[turn] == "original"
                continue
            expected = by_the_kernels_order(*tensors(rows, outputs, seed=turn))
            assert torch.equal(found[turn].view(torch.int32), expected.view(torch.int32))


def test_messages_name_whose_calls_they_are():
    told = SimpleNamespace(tolist=lambda: [1, 1, 7, 3 - 2**31, 1, 0])
    assert gathers.describe_fault(0, told, "dealt_products").startswith(
        "dealt_products: rank 0 waited in vain for rank 1"
    )
