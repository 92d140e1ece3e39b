"""The hyper-connections on a GPU against the float64 reference: forms, row counts, hostile rows, bits."""

from __future__ import annotations

import pytest
import torch

from deepseek_v4_sm120.ops import fp8_linear, mxfp4_moe
from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.mhc import FLASH_HIDDEN, MANY_ROWS, mhc, mhc_head, mhc_post, mhc_pre
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.reference import mhc as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.bounds import MHC, MHC_COEFFICIENTS
from deepseek_v4_sm120.specs.fp8_linear import make_weight, make_x
from deepseek_v4_sm120.specs.mhc import Inputs, Shape, leave_additions, make_inputs

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 8, 16, 17, 33, 64, 65, 100, 128, 129, 256, 1000)


def check_boundary(inputs: Inputs, found, *, coefficients: float = MHC_COEFFICIENTS) -> None:
    """Each part from what the operator itself made before it, so that errors do not hide behind each other."""
    streams, post, comb, y = found
    assert relative_error(streams, reference.mhc_post(**inputs.post_only())) < MHC.truth
    more = {name: getattr(inputs, name) for name in ("fn", "scale", "base", "norm_weight")}
    true_y, true_post, true_comb = reference.mhc_pre(streams, **more)
    assert float(true_y.abs().max()) > 0
    assert relative_error(post, true_post) < coefficients
    assert relative_error(comb, true_comb) < coefficients
    assert relative_error(y, true_y) < MHC.truth
    row_errors = (y.double() - true_y).norm(dim=1) / true_y.norm(dim=1).clamp_min(1e-30)
    assert float(row_errors.max()) < 2 * MHC.truth


def equal(one, other) -> bool:
    """To the bit, NaN included."""
    return all(
        torch.equal(
            a.view(torch.int16 if a.element_size() == 2 else torch.int32),
            b.view_as(a).view(torch.int16 if a.element_size() == 2 else torch.int32),
        )
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("rows", ROWS)
def test_a_boundary_against_the_reference(rows, device):
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    found = mhc(**inputs.boundary())
    check_boundary(inputs, found)
    assert equal(found, mhc(**inputs.boundary()))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 129, 257, 1000, 2111])
def test_the_kernel_for_many_rows_has_the_same_bits(rows, device):
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    found = mhc(**inputs.boundary(), kernels="many")
    check_boundary(inputs, found)
    assert equal(found, mhc(**inputs.boundary(), kernels="split"))
    assert all(equal(found, mhc(**inputs.boundary(), kernels="many")) for _ in range(5))


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 16, 17, 31, 48, 64, 65, 127, 128])
def test_one_launch_has_the_same_bits(rows, device):
    """Each form, several times."""
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    last = {name: getattr(inputs, name) for name in ("f", "post", "comb")}
    forms = {
        "boundary": lambda **way: mhc(**inputs.boundary(), **way),
        "unnormed": lambda **way: mhc(**{**inputs.boundary(), "norm_weight": None}, **way),
        "pre": lambda **way: mhc_pre(**inputs.pre(), **way),
        "head": lambda **way: (mhc_head(**inputs.head(), **way),),
        "last": lambda **way: mhc_head(**inputs.head(), **last, norm_weight=inputs.norm_weight, **way),
    }
    fused_rows = extension.load().mhc_fused_rows
    assert rows <= fused_rows
    for name, call in forms.items():
        poison = [torch.full((size,), float("nan"), device=device) for size in (1 << 19, 1 << 21, 1 << 22)]
        del poison  # what a call allocates next, and does not write, shows
        expected = call(kernels="split")
        assert all(equal(call(), expected) for _ in range(3)), name
    with pytest.raises(RuntimeError, match="these kernels do not take"):
        mhc(**make_inputs(Shape(fused_rows + 1), device=device).boundary(), kernels="fused")


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64, 128])
def test_behind_a_plain_kernel_and_behind_a_call(rows, device):
    """Weights come before the streams or after them; sums are made of either in the order they come."""
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    expected = mhc(**inputs.boundary(), kernels="split")
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(20):
            torch.mul(inputs.f, 1.0, out=inputs.f)
            found += [mhc(**inputs.boundary()) for _ in range(2)]
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(equal(one, expected) for one in found)


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 9, 16, 17, 33, 64])
def test_the_last_addition_of_f_is_made_by_the_boundary(rows, device):
    """The bits of a launch that adds and a boundary behind it: alone, call behind call, and in graphs behind wo_b."""
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    ((parts, _),), _ = leave_additions("unmerged", [inputs.f], rows)
    ((f, left),), _ = leave_additions("routed", [inputs.f], rows)
    for place, number in enumerate((float("nan"), float("inf"), -0.0, 1e-42, 3e38)):
        parts[place % 4, rows // 2, place::97] = left["routed"][rows // 2, place::89] = number
    added = mxfp4_moe.add_shared(f.clone(), left["routed"], scaling=left["scaling"])
    for term, further, whole in ((parts, {}, fp8_linear.merge(parts)), (f, left, added)):
        given = inputs.boundary() | {"f": term}
        expected = mhc(**inputs.boundary() | {"f": whole}, kernels="split")
        poison = [torch.full((size,), float("nan"), device=device) for size in (1 << 19, 1 << 21, 1 << 22)]
        del poison
        assert all(equal(mhc(**given, **further), expected) for _ in range(5))
    torch.cuda.synchronize()
    assert not any(bool(words.any()) for words in exchange_of(device))
    with pytest.raises(ValueError, match="needs a boundary of few rows"):
        mhc(**inputs.boundary() | {"f": parts}, kernels="split")


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
def test_a_product_whose_parts_the_boundary_adds(rows, device):
    """wo_b of one card, launched programmatically, other rows in each of a graph's calls."""
    weight, scale = make_weight(1, FLASH_HIDDEN, 8192, torch.Generator(device).manual_seed(1))
    x = [make_x(rows, 1, 8192, torch.Generator(device).manual_seed(i))[:, 0] for i in range(8)]
    inputs = make_inputs(Shape(rows), seed=rows, device=device)

    def boundary(f):
        return mhc(**inputs.boundary() | {"f": f})

    expected = [boundary(fp8_linear.fp8_linear(one, weight[0], scale[0])) for one in x]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = [boundary(fp8_linear.fp8_linear_unmerged(one, weight[0], scale[0])) for _ in range(5) for one in x]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(equal(one, expected[i % len(x)]) for i, one in enumerate(found))


def exchange_of(device) -> list[torch.Tensor]:
    words = op._exchange(device.index or 0)
    return [words._store, *words._by_stream.values()]


def test_a_call_leaves_its_words_zero(device):
    """Also sums that are exactly zero, and rows of NaN, come and are taken away."""
    for rows in (1, 33, 128):
        inputs = make_inputs(Shape(rows), seed=rows, device=device)
        inputs.streams[rows // 2] = float("nan")
        inputs.fn[3].zero_()
        inputs.f[0].zero_()
        inputs.streams[0].zero_()
        assert equal(mhc(**inputs.boundary()), mhc(**inputs.boundary(), kernels="split"))
        mhc_head(**inputs.head())
    torch.cuda.synchronize()
    assert not any(bool(words.any()) for words in exchange_of(device))


def test_many_replays_among_eager_calls(device):
    """Two graphs, replayed on two streams while a third calls eagerly; captured calls have words of their own."""
    inputs = [make_inputs(Shape(rows), seed=rows, device=device) for rows in (1, 16, 64)]
    expected = [mhc(**one.boundary(), kernels="split") for one in inputs]
    mhc(**inputs[0].boundary())
    torch.cuda.synchronize()
    graphs, kept = [], []
    for one in inputs[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            kept.append([mhc(**one.boundary()) for _ in range(20)])
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    torch.cuda.synchronize()
    eager = []
    for _ in range(30):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager.append(mhc(**inputs[2].boundary()))
    torch.cuda.synchronize()
    assert all(equal(found, expected[2]) for found in eager)
    assert all(equal(found, expected[i]) for i in range(2) for found in kept[i])
    assert not any(bool(words.any()) for words in exchange_of(device))


def test_many_rows(device):
    inputs = make_inputs(Shape(8192), seed=3, device=device)
    found = mhc(**inputs.boundary())
    check_boundary(inputs, found)
    few = {name: value[-100:] if value.shape[0] == 8192 else value for name, value in inputs.boundary().items()}
    assert equal([part[-100:] for part in found], mhc(**few))
    assert MANY_ROWS < 8192


def test_hidden_of_pro(device):
    inputs = make_inputs(Shape(37, hidden=7168), seed=5, device=device)
    check_boundary(inputs, mhc(**inputs.boundary()))


@pytest.mark.parametrize("rows", [1, 9, 64, 300])
def test_pre_post_and_head(rows, device):
    inputs = make_inputs(Shape(rows), seed=rows, device=device)
    streams, post, comb, y = mhc(**inputs.boundary())
    assert equal([mhc_post(**inputs.post_only())], [streams])
    assert equal([mhc_post(**{**inputs.post_only(), "post": inputs.post.unsqueeze(-1)})], [streams])
    assert equal(mhc_pre(**{**inputs.pre(), "streams": streams}), [post, comb, y])
    head = {**inputs.head(), "streams": streams}
    plain = mhc_head(**head)
    assert relative_error(plain, reference.mhc_head(**head)) < MHC.truth
    normed = mhc_head(**head, norm_weight=inputs.norm_weight)
    assert relative_error(normed, reference.mhc_head(**head, norm_weight=inputs.norm_weight)) < MHC.truth
    last = {name: getattr(inputs, name) for name in ("f", "post", "comb")}
    assert equal(mhc_head(**inputs.head(), **last), [streams, plain])
    unnormed = {name: value for name, value in inputs.pre().items() if name != "norm_weight"}
    assert relative_error(mhc_pre(**unnormed)[2], reference.mhc_pre(**unnormed)[0]) < MHC.truth


def rows_of(inputs: Inputs, chosen: list[int]) -> dict:
    names = ("f", "streams", "post", "comb")
    return {**inputs.boundary(), **{name: getattr(inputs, name)[chosen] for name in names}}


def test_a_row_alone_equals_the_row_among_others(device):
    inputs = make_inputs(Shape(256), seed=4, device=device)
    together = mhc(**inputs.boundary())
    for chosen in ([0], [77], [255], [3, 90], list(range(60, 69)), list(range(130)), list(range(255, -1, -1))):
        assert equal(mhc(**rows_of(inputs, chosen)), [part[chosen] for part in together]), chosen


@pytest.mark.parametrize("kernels", op.KERNELS)
def test_a_bad_row_keeps_to_itself(kernels, device):
    inputs = make_inputs(Shape(128), seed=6, device=device)
    clean = mhc(**inputs.boundary(), kernels=kernels)
    inputs.streams[5, 2, 100] = float("nan")
    inputs.f[40] = float("inf")
    inputs.post[77] = float("nan")
    inputs.comb[127, 1, 2] = float("inf")
    bad, good = [5, 40, 77, 127], [row for row in range(128) if row not in (5, 40, 77, 127)]
    found = mhc(**inputs.boundary(), kernels=kernels)
    assert equal([part[good] for part in found], [part[good] for part in clean])
    assert not bool(torch.isfinite(found[3][bad].float()).all(1).any())


@pytest.mark.parametrize("x_scale", [1e-6, 1e-3, 30.0, 1e4, 1e12])
@pytest.mark.parametrize("mix_scale", [1.0, 50.0])
def test_extreme_scales(x_scale, mix_scale, device):
    """Tiny streams meet rms_eps, great ones fp32's range of squares; great logits saturate softmax and sigmoid."""
    inputs = make_inputs(Shape(33, x_scale=x_scale, mix_scale=mix_scale), seed=8, device=device)
    found = mhc(**inputs.boundary())
    assert all(bool(torch.isfinite(part.float()).all()) for part in found)
    check_boundary(inputs, found, coefficients=MHC_COEFFICIENTS * max(1.0, mix_scale / 2))


def test_zero_rows_and_zero_streams(device):
    inputs = make_inputs(Shape(0), device=device)
    assert [part.shape[0] for part in mhc(**inputs.boundary())] == [0, 0, 0, 0]
    assert mhc_post(**inputs.post_only()).shape == (0, 4, 4096)
    inputs = make_inputs(Shape(3), device=device)
    inputs.streams.zero_()
    inputs.f.zero_()
    streams, _, comb, y = mhc(**inputs.boundary())
    assert not streams.any() and not y.any()
    assert float((comb.sum(1) - 1).abs().max()) < 1e-4


def test_strided_arguments(device):
    inputs = make_inputs(Shape(20), seed=2, device=device)
    expected = mhc(**inputs.boundary())
    wide = torch.full((20, 5000), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 8 : 8 + 4096] = inputs.f
    deep = torch.full((20, 6, 4096), float("nan"), dtype=torch.bfloat16, device=device)
    deep[:, 1:5] = inputs.streams
    strided = {**inputs.boundary(), "f": wide[:, 8 : 8 + 4096], "streams": deep[:, 1:5]}
    for kernels in op.KERNELS:
        assert equal(mhc(**strided, kernels=kernels), expected)


@pytest.mark.parametrize("rows", [1, 24, 128, 200, 1500])
def test_a_captured_call_follows_its_inputs(rows, device):
    inputs = make_inputs(Shape(rows), seed=1, device=device)
    mhc(**inputs.boundary())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain = mhc(**inputs.boundary())
        again = mhc(inputs.f, *chain[:3], inputs.fn, inputs.scale, inputs.base, norm_weight=inputs.norm_weight)
    for seed in range(3):
        fresh = make_inputs(Shape(rows), seed=10 + seed, device=device)
        for name in ("f", "streams", "post", "comb"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        graph.replay()
        first = mhc(**inputs.boundary())
        assert equal(chain, first)
        second = mhc(inputs.f, *first[:3], inputs.fn, inputs.scale, inputs.base, norm_weight=inputs.norm_weight)
        assert equal(again, second)


def test_past_two_gib(device):
    rows = 70_000  # 2.3 GB of streams
    inputs = make_inputs(Shape(64), seed=9, device=device)
    index = torch.arange(rows, device=device) % 64
    names = ("f", "streams", "post", "comb")
    wide = {**inputs.boundary(), **{name: getattr(inputs, name)[index] for name in names}}
    expected = mhc(**inputs.boundary())
    found = mhc(**wide)
    assert equal([part[-64:] for part in found], [part[index[-64:]] for part in expected])


@pytest.mark.parametrize("rows", [(4, 1200), (1200, 700), (64, 1), (128, 127), (128, 700)])
def test_calls_on_two_streams(rows, device):
    """From the second pair on: two kernels whose blocks wait for each other, side by side."""
    both = [make_inputs(Shape(count), seed=count, device=device) for count in rows]
    expected = [mhc(**inputs.boundary(), kernels="split") for inputs in both]
    streams = [torch.cuda.Stream(device) for _ in both]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for inputs, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(mhc(**inputs.boundary()))
    torch.cuda.synchronize()
    assert all(equal(parts, expected[i % 2]) for i, parts in enumerate(found))


@pytest.mark.parametrize("late_us", [0, 20, 1000, 10000])
def test_a_programmatic_launch_behind_another_streams_event(late_us, device):
    """What docs/programmatic_launch.md says of eager launches: the event counts, not the kernel in front alone."""
    inputs = make_inputs(Shape(1076), seed=late_us, device=device).post_only()
    other, side = torch.randn_like(inputs["f"]), torch.cuda.Stream(priority=-1)
    want = mhc_post(**inputs | {"f": inputs["f"] + other})
    for _ in range(10):
        main, f = torch.cuda.current_stream(), inputs["f"].clone()
        torch.cuda._sleep(20_000_000)  # the card is behind the host
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1800 * late_us)
            f.add_(other)
        done = side.record_event()
        mhc_post(**inputs)  # which lets the next begin early
        main.wait_event(done)
        found = mhc_post(**inputs | {"f": f})
        assert torch.equal(found, want)
