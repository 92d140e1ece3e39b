"""Sums that are made in pieces of their rows, by a group that sums a piece no sooner than somebody waits for it: what
waits for what, who gets the whole, and what is left as it is. Then by two processes of a gloo group."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.sglang_patches import device_gate, models_served
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum_in_pieces as adapter
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum, finished, layers
from deepseek_v4_sm120.sglang_patches.adapters.mhc_sum_in_pieces import SumInPieces
from tests.adapters.test_mhc_sum import ours
from tests.ops.all_reduce_emulated import in_gloo

RANKS, WIDTH, ROWS, TILE = 2, 4096, 4, 2  # of a piece at least; of which it has multiples
RATIO = 0.5  # of the product's output and input


class Coordinator:
    """A group whose ranks have the same terms. sums: made whole; it has nothing but torch's sums."""

    device_group, ca_comm, pynccl_comm = "cards", None, SimpleNamespace(disabled=True)

    def __init__(self):
        self.sums = 0

    def all_reduce(self, x):
        self.sums += 1
        return x.mul_(RANKS)

    def is_symmetric_memory_enabled(self):
        return False


class Work:
    """A piece's sum, made when it is waited for: whoever reads before has the term."""

    def __init__(self, piece):
        self.piece, self.waited = piece, 0

    def wait(self):
        self.waited += 1
        if self.waited == 1:
            self.piece.mul_(RANKS)


@pytest.fixture
def works(monkeypatch) -> list[Work]:
    """The sums that torch was asked for, in their order."""
    asked = []

    def all_reduce(piece, *, group, async_op):
        assert group == "cards" and async_op and piece.is_contiguous()
        asked.append(Work(piece))
        return asked[-1]

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return asked


def settle(monkeypatch, most=2):
    monkeypatch.setattr(adapter, "ROWS", ROWS)
    monkeypatch.setattr(adapter, "TILE_ROWS", TILE)
    monkeypatch.setattr(adapter, "most_pieces", lambda: most)
    monkeypatch.setattr(adapter, "_seen", type(adapter._seen)())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def groups(monkeypatch, coordinator=None):
    """SGLang's module of groups, whose tensor-parallel one it gives."""
    module = ModuleType(mhc_sum.PARALLEL_STATE)
    module._TP, module._PDMUX_PREFILL_TP_GROUP = coordinator or Coordinator(), None
    module._ATTN_TP = module._TP
    monkeypatch.setitem(sys.modules, mhc_sum.PARALLEL_STATE, module)
    return module._TP


@pytest.fixture
def group(monkeypatch, works):
    settle(monkeypatch)
    return groups(monkeypatch)


def x_of(rows, width=WIDTH):
    return torch.arange(rows * width).remainder(61).view(rows, width).bfloat16()


class Linear:
    """RowParallelLinear as far as it counts here: a product, then its sum."""

    output_size = WIDTH

    def __init__(self):
        self.products, self.group = [], sys.modules[mhc_sum.PARALLEL_STATE]._TP

    def forward(self, input_, skip_all_reduce=False, forward_batch=None):
        self.products.append(input_)
        output = input_ * RATIO
        return output if skip_all_reduce else self.group.all_reduce(output), None


PATCHED = adapter.replace_row_parallel_forward(Linear.forward)


def in_a_layer(body, linear=None):
    """body(layer) in a layer's forward, whose wo_b is `linear`."""
    layer = SimpleNamespace(self_attn=SimpleNamespace(wo_b=linear))
    return mhc_sum.replace_layer_forward(body)(layer)


def asked(x):
    """What a layer gets for the sum of x."""
    group = sys.modules[mhc_sum.PARALLEL_STATE]._TP
    return in_a_layer(lambda layer: group.all_reduce(x))


def product(rows=9, **options):
    linear = Linear()
    return linear, in_a_layer(lambda layer: PATCHED(linear, x_of(rows), **options)[0], linear)


# ---- the cut


@pytest.mark.parametrize(
    ("most", "rows", "expected"),
    [
        *((4, 8192, [2048] * 4), (2, 8192, [4096] * 2), (4, 2047, [2047]), (4, 2048, [1024] * 2)),
        *((4, 2100, [1024, 1076]), (4, 4100, [1024, 1024, 1024, 1028]), (4, 3617, [1152, 1152, 1313])),
        *((1, 8192, [8192]), (0, 8192, [8192]), (8, 8191, [1152] * 6 + [1279]), (100, 1, [1])),
    ],
)
def test_pieces_are_of_whole_tiles_and_not_small(most, rows, expected, monkeypatch):
    monkeypatch.setattr(adapter, "most_pieces", lambda: most)
    assert adapter.sizes_of(rows) == expected and sum(expected) == rows


@pytest.mark.parametrize("most", [2, 3, 4, 7])
def test_every_cut(most, monkeypatch):
    monkeypatch.setattr(adapter, "most_pieces", lambda: most)
    for rows in range(1, 20_000, 37):
        sizes = adapter.sizes_of(rows)
        assert sum(sizes) == rows and len(sizes) <= most
        assert len(sizes) == 1 or (min(sizes) >= adapter.ROWS and all(size % 128 == 0 for size in sizes[:-1]))


# ---- a sum


def test_a_sum_of_many_rows_is_started_in_pieces_and_made_where_it_is_looked_at(group, works):
    x = x_of(9)
    found = asked(x)
    assert isinstance(found, SumInPieces) and [len(work.piece) for work in works] == [4, 5] and not group.sums
    assert (found.shape, found.dtype, found.ndim, len(found)) == ((9, WIDTH), x.dtype, 2, 9) and found.is_contiguous()
    assert found.size(1) == WIDTH and found.numel() == x.numel() and [work.waited for work in works] == [0, 0]
    assert torch.equal(found + 0, RANKS * x_of(9)) and [work.waited for work in works] == [1, 1]
    assert finished(found) is x and torch.equal(x, RANKS * x_of(9)) and works[0].waited == 1


def test_every_piece_is_waited_for(group, works):
    for number in range(2):
        found = asked(x_of(9))
        works[-1 - number].waited = 1  # somebody waits in vain for this one: its rows stay terms
        assert not torch.equal(finished(found), RANKS * x_of(9))


def changes():
    coordinator = sys.modules[mhc_sum.PARALLEL_STATE]._TP
    enabled = SimpleNamespace(disabled=False, should_custom_ar=lambda x: len(x) < 10)

    def on(name, value=enabled):
        return lambda monkeypatch: monkeypatch.setattr(coordinator, name, value, raising=False)

    def in_adapter(name, value):
        return lambda monkeypatch: monkeypatch.setattr(adapter, name, value)

    module = sys.modules[mhc_sum.PARALLEL_STATE]
    said = settings.Settings(choices={"reproducible": "on"})
    return {
        **{f"{name} sums": on(name) for name in adapter._OTHERS},
        "SGLang's own kernel takes it": on("ca_comm"),
        "symmetric memory": on("is_symmetric_memory_enabled", lambda: True),
        "FlashInfer's": on("_can_use_flashinfer_allreduce", lambda x: True),
        "not asked for": in_adapter("most_pieces", lambda: 0),
        "one piece": in_adapter("most_pieces", lambda: 1),
        "reproducible": in_adapter("settings", lambda: said),
        "several hosts": lambda monkeypatch: monkeypatch.setattr(models_served, "_announced", {"several_hosts": True}),
        "looked into": lambda monkeypatch: monkeypatch.setattr(models_served, "_announced", {"is_looked_into": True}),
        "shadow": lambda monkeypatch: monkeypatch.setattr(mhc_sum, "settings", lambda: settings.Settings(shadow="1")),
        "compiled": lambda monkeypatch: monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True),
        "captured": lambda monkeypatch: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
        "data-parallel attention": lambda monkeypatch: monkeypatch.setattr(module, "_ATTN_TP", Coordinator()),
        "PD multiplexing": lambda monkeypatch: monkeypatch.setattr(module, "_PDMUX_PREFILL_TP_GROUP", object()),
    }


CHANGES = [
    *(f"{name} sums" for name in adapter._OTHERS),
    *("SGLang's own kernel takes it", "symmetric memory", "FlashInfer's", "not asked for", "one piece", "reproducible"),
    *("several hosts", "looked into", "shadow", "compiled", "captured", "data-parallel attention", "PD multiplexing"),
]


@pytest.mark.parametrize("name", CHANGES)
def test_where_nccl_would_not_have_the_whole_it_stays_whole(name, group, works, monkeypatch):
    assert set(changes()) == set(CHANGES)
    changes()[name](monkeypatch)
    assert torch.equal(asked(x_of(9)), RANKS * x_of(9))
    linear, found = product()
    assert torch.equal(found, RANKS * RATIO * x_of(9)) and len(linear.products) == 1
    assert group.sums == 2 and not works


OTHERS = {"7 rows": x_of(7), "1 dim": x_of(9)[0], "strided": x_of(WIDTH, 9).T, "V4.1's width": x_of(9, 5120)}


@pytest.mark.parametrize("x", OTHERS.values(), ids=OTHERS)
def test_other_sums_stay_whole(x, group, works):
    assert isinstance(asked(x.clone(memory_format=torch.preserve_format)), torch.Tensor) and not works


def test_where_sglangs_kernel_takes_fewer_rows_only_nccl_has_the_rest(group, works):
    group.ca_comm = SimpleNamespace(disabled=False, should_custom_ar=lambda x: len(x) < 9)
    assert isinstance(asked(x_of(8)), torch.Tensor) and isinstance(asked(x_of(9)), SumInPieces)


def test_outside_of_a_layer_sums_are_whole(group, works):
    assert isinstance(asked(x_of(9)), SumInPieces) and layers.layer is None
    assert isinstance(group.all_reduce(x_of(9)), torch.Tensor) and len(works) == 2


def test_beside_ours_sums_of_few_rows_are_still_the_boundarys(group, works):
    group.ca_comm = ours()
    few = torch.zeros(3, WIDTH, dtype=torch.bfloat16)
    found = asked(few)
    assert isinstance(found, OwedSum) and found.for_boundary()[1]["sum_over"] is group.ca_comm.sums and not works
    assert isinstance(asked(torch.zeros(600, WIDTH, dtype=torch.bfloat16)), SumInPieces)


# ---- a product and its sum


def test_a_products_pieces_are_summed_while_the_next_is_made(group, works, monkeypatch):
    settle(monkeypatch, most=3)
    order = []
    start = torch.distributed.all_reduce

    def started(piece, **options):
        order.append(("sum", len(piece)))
        return start(piece, **options)

    monkeypatch.setattr(torch.distributed, "all_reduce", started)
    original = Linear.forward
    patched = adapter.replace_row_parallel_forward(
        lambda self, x, **options: order.append(("product", len(x))) or original(self, x, **options)
    )
    linear = Linear()
    found, bias = in_a_layer(lambda layer: patched(linear, x_of(13)), linear)
    assert order == [(what, rows) for rows in (4, 4, 5) for what in ("product", "sum")] and bias is None
    assert isinstance(found, SumInPieces) and not any(work.waited for work in works)
    assert (found.shape, len(found), found.numel()) == ((13, WIDTH), 13, 13 * WIDTH)
    assert torch.equal(finished(found), RANKS * RATIO * x_of(13)) and not group.sums
    assert [work.waited for work in works] == [1, 1, 1]


def test_a_product_whose_sum_is_asked_for_later(group, works):
    """As 0.5.23's layers, whose boundary asks; the sum has been under way since."""
    linear = Linear()

    def forward(layer):
        terms, _ = PATCHED(linear, x_of(9), skip_all_reduce=True)
        assert len(works) == 2 and terms.shape == (9, WIDTH)
        for look in (lambda: terms + 1, lambda: finished(terms), terms.for_boundary, lambda: terms.cpu()):
            with pytest.raises(RuntimeError, match="sums_in_pieces: a product was read .* DSV4_SM120_SET=sums_in"):
                look()
        return group.all_reduce(terms)

    found = in_a_layer(forward, linear)
    assert torch.equal(finished(found), RANKS * RATIO * x_of(9)) and len(works) == 2 and not group.sums


def test_a_product_whose_sum_nobody_asks_for_is_an_error(group, works):
    with pytest.raises(RuntimeError, match="sums_in_pieces: .* nobody asked for its sum: .*sums_in_pieces=off"):
        product(skip_all_reduce=True)
    assert isinstance(group.all_reduce(x_of(9)), torch.Tensor)  # the layer is left


@pytest.mark.parametrize("options", [{"forward_batch": object()}, {"output_tensor": None}])
def test_calls_of_another_form_and_other_products_are_whole(options, group, works):
    linear, other, taken = Linear(), Linear(), []
    patched = adapter.replace_row_parallel_forward(lambda self, x, **_: (taken.append(len(x)) or x, None))
    in_a_layer(lambda layer: patched(linear, x_of(9), **options), linear)
    in_a_layer(lambda layer: patched(other, x_of(9)), linear)
    in_a_layer(lambda layer: patched(linear, ("quantised",)), linear)
    in_a_layer(lambda layer: patched(linear, x_of(7)), linear)
    patched(linear, x_of(9))
    assert taken == [9, 9, 1, 7, 9] and not works


# ---- the boundaries


def streams_of(rows, hidden=WIDTH):
    weights = (torch.zeros(24, 4 * hidden), torch.ones(3), torch.zeros(24))
    return torch.ones(rows, 4, hidden).bfloat16(), torch.ones(rows, 4, 1), torch.ones(rows, 4, 4), *weights


EPSILONS = (1e-6, 1e-6, 1e-6, 2.0, 20)


def test_a_boundary_runs_piece_by_piece_each_behind_its_own_sum(group, works, monkeypatch):
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    seen = []

    def mhc(f, streams, post, comb, *weights, ready, held_sms, **options):
        for number, piece in enumerate(f):
            ready(number)
            seen.append((held_sms, [work.waited for work in works], piece.clone()))
        return streams, post.view(-1, 4), comb, streams[:, 0]

    monkeypatch.setattr(boundary.op, "mhc", mhc)
    fused = boundary.replace_fused_post_pre(None)
    streams, *rest = streams_of(9)
    fused(asked(x_of(9)), streams, *rest, *EPSILONS)
    assert [waited for _, waited, _ in seen] == [[1, 0], [1, 1]] and {held for held, *_ in seen} == {adapter.SUM_SMS}
    assert torch.equal(torch.cat([piece for *_, piece in seen]), RANKS * x_of(9))


def test_a_post_and_a_boundary_that_is_not_ours_get_the_whole(group, works, monkeypatch):
    """A sum that was made is one tensor for all."""
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    order, seen = [], []
    monkeypatch.setattr(Work, "wait", lambda self, wait=Work.wait: order.append("wait") or wait(self))
    monkeypatch.setattr(boundary.op, "mhc_post", lambda f, streams, *_: order.append("post") or seen.append(f))
    found = asked(x_of(9))
    streams, post, comb, *weights = streams_of(9)
    boundary.replace_hc_post(None)(None, found, streams, post, comb)
    assert order == ["wait", "wait", "post"]
    fused = boundary.replace_fused_post_pre(lambda x, *_, **__: seen.append(x))
    fused(found, streams, post, comb, *weights, 1e-6, 1e-6, 1e-3, 2.0, 20)  # two epsilons: SGLang's own
    assert order == ["wait", "wait", "post"] and seen[0] is seen[1]
    assert torch.equal(seen[0], RANKS * x_of(9)) and found.for_boundary() == (seen[0], {})


def test_status_counts_them(group, works, monkeypatch):
    monkeypatch.setattr(report, "_notes", {})
    asked(x_of(9))
    product()
    describe, found = report._notes["sums_in_pieces"]
    assert found() == {"sums": 1, "products": 1, "pieces": 4}
    assert describe().startswith("sums_in_pieces: 1 products with their sums and 1 sums of 8 rows and more in 4 pieces")


# ---- two processes


def as_a_rank(rank, ranks, gather):
    """(in pieces, whole) of a product's sum and a sum, of terms that differ."""
    group = torch.distributed.group.WORLD
    coordinator = Coordinator()
    coordinator.device_group = group

    def whole(x):
        torch.distributed.all_reduce(x, group=group)
        return x

    coordinator.all_reduce = whole
    with pytest.MonkeyPatch.context() as monkeypatch:
        settle(monkeypatch, most=3)
        groups(monkeypatch, coordinator)
        x = torch.randn(13, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()
        linear = Linear()
        wholes = [whole(x.clone()), whole(x * RATIO)]
        found = in_a_layer(lambda layer: (coordinator.all_reduce(x.clone()), PATCHED(linear, x)[0]), linear)
        kinds = [len(one.pieces) for one in found]
        return kinds, [finished(one) for one in found], wholes


def test_processes_of_a_gloo_group_have_the_whole_sums_bits(torch_python):
    results = in_gloo(torch_python(), 2, as_a_rank)
    for kinds, found, wholes in results:
        assert kinds == [3, 3] and all(torch.equal(one, other) for one, other in zip(found, wholes, strict=True))
    assert torch.equal(results[0][1][0], results[1][1][0])
