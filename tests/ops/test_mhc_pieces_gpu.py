"""A boundary of rows in pieces on a GPU: the whole's bits; each piece behind its own wait, for sums that come late on
another stream; and memory that is used again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops.mhc import mhc, mhc_post
from deepseek_v4_sm120.ops.shared import cuda_tensors
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum_in_pieces as adapter
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs

pytestmark = pytest.mark.gpu

LATE = 40_000_000  # cycles, about 20 ms: a hundred times what all the rest takes


def same(one, other) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def poison(device) -> None:
    """What is allocated next, and is not written, shows."""
    rubbish = [torch.full((1 << power,), float("nan"), device=device) for power in (20, 22, 24)]
    del rubbish


@pytest.mark.parametrize(
    "sizes",
    [(1024, 1076), (2048, 2048, 2048, 2048), (1, 299), (128, 129, 256, 257), (5,), (3, 0, 4)],
    ids=lambda sizes: "+".join(map(str, sizes)),
)
def test_pieces_have_the_wholes_bits(sizes, device):
    """Whichever kernels take a piece, and however many multiprocessors others hold."""
    inputs = make_inputs(Shape(sum(sizes)), seed=sum(sizes), device=device)
    whole, f = mhc(**inputs.boundary()), inputs.f.split(sizes)
    sms = cuda_tensors.num_sms(device.index or 0)
    for held in (0, adapter.SUM_SMS, sms - 40, sms):
        poison(device)
        assert same(whole, mhc(**{**inputs.boundary(), "f": f}, held_sms=held)), held
    apart = tuple(piece.clone() for piece in f)
    assert same(whole, mhc(**{**inputs.boundary(), "f": apart}))


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(
    "sizes", [(1024, 1076), (1, 299), (128, 129), (5,)], ids=lambda sizes: "+".join(map(str, sizes))
)
def test_pieces_of_a_buffer_of_parts_have_the_wholes_bits(sizes, parts, device):
    """By the kernel that reads the columns where they lie, and by those that need a copy."""
    rows = sum(sizes)
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    whole = mhc(**inputs.boundary())
    buffer = inputs.f.view(rows, parts, -1).transpose(0, 1).contiguous()
    sms = cuda_tensors.num_sms(device.index or 0)
    for held in (0, adapter.SUM_SMS, sms - 40, sms):
        poison(device)
        assert same(whole, mhc(**{**inputs.boundary(), "f": buffer.split(sizes, dim=1)}, held_sms=held)), held


class Work:
    """A piece's sum on a stream beside the current one, as torch's: it begins behind what the current stream has, adds
    the other rank's rows late, and who waits makes the current stream wait."""

    def __init__(self, side, piece, other):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            piece.add_(other)
            self.done = torch.cuda.Event(enable_timing=True)
            self.done.record()
        self.piece = piece, other  # torch keeps them until somebody has waited

    def wait(self):
        torch.cuda.current_stream().wait_event(self.done)


def started(side, pieces, others) -> list[Work]:
    return [Work(side, piece, other) for piece, other in zip(pieces, others, strict=True)]


def test_each_piece_waits_for_its_own_late_sum(device):
    rows = 4096
    inputs, side = make_inputs(Shape(rows), seed=1, device=device), torch.cuda.Stream(device)
    other = make_inputs(Shape(rows), seed=2, device=device).f
    whole = mhc(**{**inputs.boundary(), "f": inputs.f + other})
    sizes = (1024, 1024, 2048)

    def run(waits):
        f, behind = inputs.f.clone(), []
        works = started(side, f.split(sizes), other.split(sizes))

        def ready(number):
            behind.append(torch.cuda.Event(enable_timing=True))
            behind[-1].record()
            if waits:
                works[number].wait()

        found = mhc(**{**inputs.boundary(), "f": f.split(sizes)}, ready=ready, held_sms=adapter.SUM_SMS)
        torch.cuda.synchronize()
        return found, works, behind

    run(True)  # compiled, loaded, allocated
    found, works, behind = run(True)
    assert same(whole, found)
    for number in (1, 2):
        ahead = behind[number].elapsed_time(works[number].done)
        assert ahead > 0, f"the boundary of piece {number - 1} ended {-ahead} ms behind the sum of piece {number}"
    found, _, _ = run(False)
    assert not same(whole, found), "a sum that nobody waits for must show, or this test shows nothing"


@pytest.fixture
def coordinator(device, monkeypatch):
    """Whose torch sums on a stream beside; `other` is what the other rank has, piece by piece."""
    side, group = torch.cuda.Stream(device), SimpleNamespace(device_group="cards", other=[])

    def all_reduce(piece, *, group, async_op):
        return Work(side, piece, made.other.pop(0))

    made = group
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return made


def test_sums_that_are_looked_at_and_memory_that_is_used_again(device, coordinator):
    """The post behind the last layer is launched programmatically right behind the wait. What nobody holds any longer
    goes to whoever allocates next, behind the sums in the order of the stream."""
    rows, sizes = 2048, (1024, 1024)
    inputs = make_inputs(Shape(rows), seed=3, device=device)
    other = make_inputs(Shape(rows), seed=4, device=device).f
    whole = mhc(**{**inputs.boundary(), "f": inputs.f + other})
    streams = mhc_post(inputs.f + other, inputs.streams, inputs.post, inputs.comb)
    for _ in range(10):
        f = inputs.f.clone()
        coordinator.other += other.split(sizes)
        owed = adapter.SumInPieces(coordinator, f.split(sizes), f)
        del f
        post = mhc_post(owed.run(), inputs.streams, inputs.post, inputs.comb)
        coordinator.other += other.split(sizes)
        parts = []
        for piece in inputs.f.split(sizes):  # as a product makes them
            parts.append(adapter.SumInPieces(coordinator, (piece.clone(),)))
        joined = adapter.SumInPieces.joined(parts)
        del parts, owed
        f, beside = joined.for_boundary()
        found = mhc(**{**inputs.boundary(), "f": f}, **beside)
        del f, beside, joined
        poison(device)
        assert same((streams,), (post,)) and same(whole, found)
