"""The experts' sum in parts of its columns: by a group that sums a part no sooner than somebody waits for it, with
experts that make a part when they are asked. What waits for what, who gets the whole, what is made as without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.ops import mhc
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum_in_parts as adapter
from deepseek_v4_sm120.sglang_patches.adapters import mxfp4_moe
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum, finished
from deepseek_v4_sm120.sglang_patches.adapters.mhc_sum_in_parts import SumInParts, UnmadeExperts
from tests.adapters import test_mhc_sum_in_pieces as pieces
from tests.adapters.test_mhc_sum_in_pieces import RANKS, WIDTH, group, in_a_layer, works, x_of  # noqa: F401

PARTS, ROWS = 2, 9  # of the columns; more than twice a piece's


class Made:
    """Experts whose output is twice their input; what was launched, in its order."""

    def __init__(self, hidden):
        self.hidden, self.order = hidden, []

    def whole(self):
        self.order.append("whole")
        return self.hidden * 2

    def parts(self, *, parts, behind, held_sms, shared=None, scaling=1.0):
        assert held_sms == adapter.pieces.SUM_SMS
        out = self.hidden * 2 if shared is None else shared.add(self.hidden * 2, alpha=scaling)
        out = out.view(len(out), parts, -1).transpose(0, 1).contiguous()
        for number, part in enumerate(out):
            self.order.append(number)
            behind(part)
        return out


@pytest.fixture
def asks(monkeypatch):
    """What the adapter asks of the kernels and the card: they make parts, of their own accord."""
    answers = SimpleNamespace(makes=True, prefers=True)
    monkeypatch.setattr(adapter.mxfp4_moe, "makes_parts", lambda w13, w2, parts: answers.makes and parts == PARTS)
    monkeypatch.setattr(adapter.mxfp4_moe, "prefers_wide", lambda device: answers.prefers)
    return answers


WEIGHTS = torch.empty(3, 8, 4), torch.empty(3, WIDTH, 4)


def experts(hidden, *, wide=None):
    """(Made, what the experts' adapter hands on; None: it makes them)"""
    made = Made(hidden)
    waits = adapter.may_wait(hidden, *WEIGHTS, wide)
    return made, UnmadeExperts(made.whole, made.parts, hidden) if waits else None


def layer_of(coordinator, rows=ROWS, *, shared=None, scaling=1.5):
    """(what a layer gets for its experts' sum, Made)"""

    def forward(_):
        made, routed = experts(x_of(rows))
        assert isinstance(routed, UnmadeExperts) and not made.order
        routed = routed[..., :WIDTH].contiguous()  # as SGLang's experts do
        routed = routed if shared is None else routed.with_shared(shared.clone(), scaling)
        return coordinator.all_reduce(routed), made

    return in_a_layer(forward)


def expected(shared=None, scaling=1.5, rows=ROWS):
    routed = x_of(rows) * 2
    return RANKS * (routed if shared is None else shared.clone().add_(routed, alpha=scaling))


@pytest.mark.parametrize("shared", [None, x_of(ROWS) * 0.25])
def test_each_part_is_summed_behind_its_launches(shared, group, works, asks):  # noqa: F811
    found, made = layer_of(group, shared=shared)
    assert isinstance(found, SumInParts) and made.order == [0, 1] and not group.sums
    # the last part's in pieces of its rows
    assert [tuple(work.piece.shape) for work in works] == [(9, WIDTH // 2), (4, WIDTH // 2), (5, WIDTH // 2)]
    assert not any(work.waited for work in works)
    assert (found.shape, found.dtype, len(found), found.is_contiguous()) == ((9, WIDTH), torch.bfloat16, 9, True)
    assert torch.equal(finished(found), expected(shared)) and [work.waited for work in works] == [1, 1, 1]


@pytest.mark.parametrize("forgotten", range(3))
def test_every_part_is_waited_for(forgotten, group, works, asks):  # noqa: F811
    found, _ = layer_of(group)
    works[forgotten].waited = 1  # somebody waits in vain for this one: its columns stay terms
    assert not torch.equal(finished(found), expected())


def test_the_boundary_runs_in_pieces_of_rows_the_first_behind_the_other_parts(group, works, asks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    seen = []

    def made_of(f, streams, post, comb, *weights, ready, held_sms, **options):
        for number, piece in enumerate(f):
            ready(number)
            seen.append(([work.waited for work in works], mhc.joined(piece)))
        return streams, post.view(-1, 4), comb, streams[:, 0]

    monkeypatch.setattr(boundary.op, "mhc", made_of)
    fused = boundary.replace_fused_post_pre(None)
    streams, *rest = pieces.streams_of(ROWS)
    fused(layer_of(group)[0], streams, *rest, *pieces.EPSILONS)
    assert [waited for waited, _ in seen] == [[1, 1, 0], [1, 1, 1]]
    assert torch.equal(torch.cat([rows for _, rows in seen]), expected())


LOOKS = {
    "a number more": (lambda routed: routed + 0, lambda x: x),
    "a factor in place": (lambda routed: routed.__imul__(2), lambda x: x * 2),
    "some columns": (lambda routed: routed[..., :8].contiguous(), lambda x: x[..., :8]),
    "a row": (lambda routed: routed[3], lambda x: x[3]),
    "rows by a mask": (lambda routed: routed[torch.arange(ROWS) > 4], lambda x: x[5:]),
    "torch's function": (lambda routed: torch.cat([routed, routed]), lambda x: torch.cat([x, x])),
    "an addition to another": (lambda routed: torch.ones(ROWS, WIDTH).bfloat16().add_(routed), lambda x: x + 1),
    "an attribute": (lambda routed: routed.float().bfloat16(), lambda x: x),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_gets_the_whole_made_once(name, group, works, asks):  # noqa: F811
    look, right = LOOKS[name]

    def forward(_):
        made, routed = experts(x_of(ROWS))
        found = look(routed)
        routed.run()
        return found, made.order, group.all_reduce(routed)

    found, order, summed = in_a_layer(forward)
    assert torch.equal(found, right(x_of(ROWS) * 2)) and order == ["whole"]
    # its sum goes as any other's, in pieces of rows
    assert not isinstance(summed, SumInParts) and isinstance(summed, OwedSum)


def test_the_sum_outside_of_the_layer_is_of_the_whole(group, works, asks):  # noqa: F811
    made, routed = in_a_layer(lambda _: experts(x_of(ROWS)))
    in_a_layer(lambda _: None)
    assert torch.equal(group.all_reduce(routed), expected()) and made.order == ["whole"] and group.sums == 1


@pytest.mark.parametrize(
    ("change", "wide", "waits"),
    [
        *(({}, None, True), ({}, True, True), ({}, False, False)),
        *(({"prefers": False}, None, False), ({"prefers": False}, True, True), ({"makes": False}, None, False)),
    ],
)
def test_which_experts_wait(change, wide, waits, group, works, asks):  # noqa: F811
    """Those of our kernels for many rows; Triton's have no parts."""
    vars(asks).update(change)
    _, found = in_a_layer(lambda _: experts(x_of(ROWS), wide=wide))
    assert isinstance(found, UnmadeExperts) == waits


@pytest.mark.parametrize("name", pieces.CHANGES)
def test_where_sums_stay_whole_nothing_waits(name, group, works, asks, monkeypatch):  # noqa: F811
    pieces.changes()[name](monkeypatch)
    assert in_a_layer(lambda _: experts(x_of(ROWS)))[1] is None


def test_few_rows_and_no_layer(group, works, asks):  # noqa: F811
    assert in_a_layer(lambda _: experts(x_of(2 * pieces.ROWS - 1)))[1] is None and experts(x_of(ROWS))[1] is None


@pytest.mark.parametrize(("most", "count"), [(2, 2), (3, 2), (4, 4), (7, 4), (8, 8)])
def test_parts_are_a_power_of_two(most, count, monkeypatch):
    monkeypatch.setattr(adapter.pieces, "most_pieces", lambda: most)
    assert adapter.parts_of() == count


# ---- the experts' adapter


def test_sglangs_addition_of_the_shared_expert_is_put_off_too(group, works, asks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(mxfp4_moe, "settings", settings.Settings)
    holder = SimpleNamespace(**{mxfp4_moe.KEPT: object()})
    add = mxfp4_moe.replace_shared_add(lambda experts, routed, shared, factor: shared.add_(routed, alpha=factor))

    def forward(_, shared):
        made, routed = experts(x_of(ROWS))
        return group.all_reduce(add(holder, routed, shared, 1.5)), made

    shared = x_of(ROWS) * 0.25
    found, made = in_a_layer(lambda layer: forward(layer, shared.clone()))
    assert isinstance(found, SumInParts) and made.order == [0, 1]
    assert torch.equal(finished(found), expected(shared))
    wider = torch.cat([shared, shared], 1)[:, :WIDTH]  # lies otherwise: SGLang's own addition, of the whole
    found, made = in_a_layer(lambda layer: forward(layer, wider))
    assert made.order == ["whole"] and torch.equal(found, expected(shared))
