"""Shadow mode: what is counted, eagerly on the CPU and, marked gpu, through graph capture and replay."""

import json
import subprocess

import pytest
import torch

from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import shadow

BOUND = 0.004


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    monkeypatch.setattr(shadow, "settings", lambda: Settings(shadow="1"))
    shadow.reset()
    yield
    shadow.reset()


COMPARISON = shadow.Comparison(
    tensors=lambda ours, original, x, layer: [(ours, original)],
    identity=lambda x, layer: layer,
    shape=lambda x, layer: {"rows": x.shape[0], "heads": x.shape[1]},
    relative_l2=BOUND,
)


def shadowed(ours, original=lambda x, layer: x.clone()):
    return shadow.shadowed("test", ours, original, COMPARISON)


def values(rows=4, heads=3, device="cpu"):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, heads, 32, generator=generator).to(device)


def test_keeps_the_originals_result_or_ours(monkeypatch):
    x = values()
    assert torch.equal(shadowed(lambda x, layer: x * 2)(x, 0), x)
    monkeypatch.setattr(shadow, "settings", lambda: Settings(shadow="ours"))
    assert torch.equal(shadowed(lambda x, layer: x * 2)(x, 0), x * 2)


def test_counts_and_errors_of_equal_calls():
    function = shadowed(lambda x, layer: x * 1.001)
    x = values()
    for _ in range(3):
        function(x, 0)
    (record,) = shadow.report()
    assert record["calls"] == 3 and record["rows"] == 12 and record["bad_calls"] == 0
    assert record["relative_l2_max"] == pytest.approx(0.001, rel=1e-3)
    assert record["relative_l2_mean"] == pytest.approx(0.001, rel=1e-3)
    assert record["row_relative_l2_max"] == pytest.approx(0.001, rel=1e-3)
    assert record["absolute_error_max"] == pytest.approx(0.001 * x.abs().max().item(), rel=1e-3)
    assert record["first_bad_call"] == 0
    assert record["patch"] == "test" and record["captured"] is False and record["bound"] == BOUND


def test_mean_is_over_calls_and_worst_row_is_a_rows():
    x = values()
    factors = iter([1.003, 1.001])
    function = shadowed(lambda x, layer: x * next(factors))
    function(x, 0), function(x, 0)
    one_row = x.clone()
    one_row[2] *= 1.5
    shadowed(lambda x, layer: one_row)(x, 1)
    first, second = shadow.report()
    assert first["relative_l2_mean"] == pytest.approx(0.002, rel=1e-2)
    assert first["relative_l2_max"] == pytest.approx(0.003, rel=1e-2), "of all calls, not of the last"
    assert second["row_relative_l2_max"] == pytest.approx(0.5, rel=1e-4)
    assert second["relative_l2_max"] < 0.3 and second["bad_calls"] == 1


def test_a_call_that_is_coarse_in_all_rows_is_bad():
    """None of them is above a row's own bound."""
    x = values(64)
    shadowed(lambda x, layer: x * (1 + 1.5 * BOUND))(x, 0)
    assert shadow.report()[0]["bad_calls"] == 1


@pytest.mark.parametrize(
    "wrong", ["nothing", "one row", "a small row", "all rows a little", "a row of next to nothing"]
)
def test_a_wrong_row_does_not_hide_among_a_prompts(wrong):
    x = values(8192, heads=1)
    x[7] *= 1e-6
    x[8] *= 0.01
    y = x.clone()
    if wrong == "one row":
        y[5] = x[4] * 0.2 + x[5] * 0.98
    elif wrong == "a small row":
        y[8] *= 1 + 3 * BOUND
    elif wrong == "all rows a little":
        y *= 1 + 0.99 * BOUND
    elif wrong == "a row of next to nothing":  # what pads a graph may be
        y[7] *= 2
    shadowed(lambda x, layer: y)(x, 0)
    (record,) = shadow.report()
    assert record["relative_l2_max"] < BOUND and record["bad_calls"] == int(wrong in ("one row", "a small row"))


def massive(rows=4):
    """As a trained model's residual has it: three channels, far above all others."""
    x = values(rows, heads=16) * 0.05
    x[:, 0, 3], x[:, 5, 7], x[:, 9, 1] = 7e4, -1500.0, 40.0
    return x.bfloat16().float()


NEXT_BF16 = 1 + 2.0**-8  # of what is a little above a power of two: rounded the other way


@pytest.mark.parametrize(
    "wrong",
    [
        *("nothing", "a massive one by a rounding", "all massive ones by a rounding"),
        *("a massive one", "the last massive one", "all others are zero", "others of one row", "another row's others"),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_massive_elements_are_judged_by_themselves(wrong, rows):
    x = massive(rows)
    y = x.clone()
    if wrong == "a massive one by a rounding":
        y[0, 0, 3] *= NEXT_BF16**2
    elif wrong == "all massive ones by a rounding":
        y = torch.where(x.abs() > 1, x * NEXT_BF16, x)
    elif wrong == "a massive one":
        y[-1, 0, 3] *= 1.02
    elif wrong == "the last massive one":
        y[-1, 9, 1] *= 0.98
    elif wrong == "all others are zero":
        y = torch.where(x.abs() > 1, x, 0.0)
    elif wrong == "others of one row":
        y[-1] *= 1 + 3 * BOUND
    elif wrong == "another row's others":
        y[-1, 10:] = x[-1, 10:].flip(0)
    shadowed(lambda x, layer: y)(x, 0)
    (record,) = shadow.report()
    is_right = wrong == "nothing" or wrong.endswith("by a rounding")
    assert record["bad_calls"] == (not is_right)
    before = float((y - x).norm() / x.norm())  # what it was judged by
    if wrong in ("all others are zero", "another row's others", "the last massive one"):
        assert before < BOUND / 100
    elif is_right and wrong != "nothing":
        assert before > BOUND / 2 and record["relative_l2_max"] == 0 == record["row_relative_l2_max"]


def test_massive_elements_of_what_has_to_be_equal():
    x = massive()
    y = x.clone()
    y[2, 0, 3] *= NEXT_BF16
    shadow.record("test", [(y, x)], identity=0, shape={"rows": 4}, relative_l2=0.0)
    assert shadow.report()[0]["bad_calls"] == 1


def test_a_row_that_is_little_more_than_massive_elements():
    """Numbers where stock has zeros, far below and far above a millionth of the row."""
    x = torch.zeros(3, 512)
    x[:, 7] = 1e5
    for noise, is_bad in ((1e-6, False), (1e-1, True)):
        shadow.reset()
        shadowed(lambda x, layer, noise=noise: x + noise * torch.randn(512).sign() * (x == 0))(x, 0)
        assert shadow.report()[0]["bad_calls"] == is_bad


def test_what_is_too_great_for_a_sum_of_squares_is_not_taken_as_equal():
    x = torch.full((2, 512), 1e20)
    for factor, is_bad in ((1.0, False), (1.5, True)):
        shadow.reset()
        shadowed(lambda x, layer, factor=factor: x * factor)(x, 0)
        assert shadow.report()[0]["bad_calls"] == is_bad


def test_a_row_of_one_tensor_does_not_hide_beside_another():
    weights, ids = torch.rand(256, 6), torch.randint(0, 256, (256, 6)).float()
    found = weights.clone()
    found[9] = found[9].roll(1)
    pairs = [(found, weights), (ids, ids)]
    shadow.record("test", pairs, identity=0, shape={"rows": 256}, relative_l2=BOUND)
    (record,) = shadow.report()
    assert record["relative_l2_max"] < BOUND and record["bad_calls"] == 1


def test_first_bad_call_is_remembered():
    factors = iter([1.0, 1.01, 1.0, 1.5])
    function = shadowed(lambda x, layer: x * next(factors))
    for rows in (4, 4, 4, 4):
        function(values(rows), 0)
    (record,) = shadow.report()
    assert record["bad_calls"] == 2 and record["first_bad_call"] == 2 and record["first_bad_rows"] == 4
    (line,) = shadow.summary(shadow.report())
    assert line["first_bad"]["shape"] == {"rows": 4, "heads": 3} and line["first_bad"]["first_bad_call"] == 2
    assert "2 calls above 0.004" in shadow.describe(line)


def test_rows_of_large_eager_calls_share_a_record():
    function = shadowed(lambda x, layer: x * 2)
    for rows in (128, 129, 200, 256, 257):
        function(values(rows), 0)
    found = {r["shape"]["rows"]: r for r in shadow.report()}
    assert set(found) == {128, "129-256", "257-512"}
    assert found["129-256"]["calls"] == 3 and found["129-256"]["first_bad_rows"] == 129


def test_elements_where_the_original_is_not_finite_do_not_count():
    x = values()

    def original(x, layer):
        y = x.clone()
        y[1, 2] = float("nan")
        y[3, 0, 0] = float("inf")
        return y

    shadowed(lambda x, layer: x.clone(), original)(x, 0)
    (record,) = shadow.report()
    assert record["nonfinite_original"] == 33 and record["nonfinite_ours"] == 0
    assert record["bad_calls"] == 0 and record["relative_l2_max"] == 0


def test_ours_not_finite_where_the_original_is_makes_a_bad_call():
    def ours(x, layer):
        y = x.clone()
        y[0, 0, 5] = float("nan")
        return y

    shadowed(ours)(values(), 0)
    (record,) = shadow.report()
    assert record["nonfinite_ours"] == 1 and record["bad_calls"] == 1 and record["first_bad_call"] == 1
    assert record["relative_l2_max"] == 0, "the rest is compared as usual"


def test_what_is_left_out_is_counted_and_told():
    x = values()
    for left_out in (torch.tensor(3), None, torch.tensor(2)):
        shadow.record("test", [(x, x)], identity=0, shape={"rows": 4}, relative_l2=BOUND, left_out=left_out)
    (record,) = shadow.report()
    assert (record["calls"], record["left_out"], record["bad_calls"]) == (3, 5, 0)
    (line,) = shadow.summary([record])
    assert ", 5 results not compared: several rows of a call write there" in shadow.describe(line)
    shadow.reset()
    shadowed(lambda x, layer: x.clone())(x, 0)
    assert "not compared" not in shadow.describe(*shadow.summary(shadow.report()))


def test_zero_rows_and_zero_values():
    function = shadowed(lambda x, layer: x.clone())
    function(values()[:0], 0)
    assert shadow.report() == []
    function(torch.zeros(2, 3, 32), 0)
    (record,) = shadow.report()
    assert record["relative_l2_max"] == 0 and record["bad_calls"] == 0
    shadowed(lambda x, layer: x + 1e-3)(torch.zeros(2, 3, 32), 0)
    assert shadow.report()[0]["bad_calls"] == 1, "a difference from zero is not small"


def test_layers_are_numbered_by_first_appearance():
    function = shadowed(lambda x, layer: x.clone())
    for address in (0x7000, 0x1000, 0x7000, 0x4000):
        function(values(), address)
    assert [(r["layer"], r["calls"]) for r in shadow.report()] == [(0, 2), (1, 1), (2, 1)]


@pytest.mark.parametrize("make", [values, massive])
def test_chunks_make_no_difference(monkeypatch, make):
    x = make(50)
    y = x * 1.002
    whole = shadow.difference([(y, x)])
    monkeypatch.setattr(shadow, "CHUNK_ELEMENTS", 5 * x[0].numel() // 2)
    parts = shadow.difference([(y, x)])
    for name in whole:
        assert parts[name].item() == pytest.approx(whole[name].item(), rel=1e-6), name


def test_different_shapes_raise():
    with pytest.raises(ValueError, match="ours has shape"):
        shadowed(lambda x, layer: x[:2])(values(), 0)


def test_more_records_than_the_table_has_share_the_first_row(monkeypatch):
    monkeypatch.setattr(shadow, "MAX_RECORDS", 3)
    function = shadowed(lambda x, layer: x.clone())
    for layer in range(5):
        function(values(), layer)
    assert sorted((r["patch"], r["calls"]) for r in shadow.report()) == [("other", 3), ("test", 1), ("test", 1)]


def test_works_inside_and_outside_inference_mode():
    function = shadowed(lambda x, layer: x.clone())
    with torch.inference_mode():
        function(values(), 0)
    function(values(), 0)
    assert shadow.report()[0]["calls"] == 2


def test_report_is_plain_data():
    shadowed(lambda x, layer: x * 2)(values(), 0)
    records = json.loads(json.dumps(shadow.report()))
    assert json.loads(json.dumps(shadow.summary(records)))[0]["calls"] == 1


def test_writer_rewrites_the_report_while_calls_arrive(tmp_path, torch_python):
    """In a process of its own that is killed, as the engine's are."""
    script = f"""
import os, signal, sys, time, types, torch
from deepseek_v4_sm120.sglang_patches import shadow
written = []
def write(engine):
    with open({str(tmp_path / "out")!r}, "w") as f:
        f.write(str([r["calls"] for r in shadow.report()]))
shadow.process_report = types.SimpleNamespace(write=write)
shadow.patching = types.SimpleNamespace(active_engine=lambda: "engine")
shadow.settings = lambda: types.SimpleNamespace(shadow="1")
compare = shadow.Comparison(lambda a, b, x: [(a, b)], lambda x: 0, lambda x: {{"rows": x.shape[0]}}, 0.1)
f = shadow.shadowed("test", lambda x: x, lambda x: x, compare)
for _ in range(3):
    f(torch.ones(2, 4))
time.sleep(4 * shadow.WRITE_EVERY_S)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([*torch_python(), "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == -9, ended.stderr
    assert (tmp_path / "out").read_text() == "[3]"


@pytest.mark.gpu
def test_capture_and_replay():
    device = torch.device("cuda", torch.cuda.current_device())
    x = values(8, device=device)
    error = torch.zeros((), device=device)
    function = shadowed(lambda x, layer: x * (1 + error))
    function(x, 0)  # the engine runs a batch size eagerly before it captures it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function(x, 0)
        function(x, 1)
    torch.cuda.synchronize()
    assert [r["captured"] for r in shadow.report()] == [False], "capturing executes nothing"
    for step in range(5):
        error.fill_(0.01 if step == 3 else 0.001)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(kept, x)
    captured = [r for r in shadow.report() if r["captured"]]
    assert [r["layer"] for r in captured] == [0, 1]
    for record in captured:
        assert record["calls"] == 5 and record["bad_calls"] == 1 and record["first_bad_call"] == 4
        assert record["relative_l2_max"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.gpu
def test_massive_elements_in_replayed_graphs():
    x = massive().cuda()
    y = x.clone()
    function = shadowed(lambda x, layer: y.clone())
    function(x, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(x, 0)
    for wrong in (x, torch.where(x.abs() > 1, x * NEXT_BF16, x), torch.where(x.abs() > 1, x, 0 * x), x * 1.02):
        y.copy_(wrong)
        graph.replay()
    torch.cuda.synchronize()
    (record,) = [r for r in shadow.report() if r["captured"]]
    assert (record["calls"], record["bad_calls"], record["first_bad_call"]) == (4, 2, 3)


@pytest.mark.gpu
def test_first_call_under_capture_is_counted_as_unrecorded():
    device = torch.device("cuda", torch.cuda.current_device())
    x = values(device=device)
    function = shadowed(lambda x, layer: x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(x, 0)
    graph.replay()
    torch.cuda.synchronize()
    assert shadow.report() == []
    function(x, 0)
    torch.cuda.synchronize()
    (line,) = shadow.summary(shadow.report())
    assert line["unrecorded_calls"] == 1 and line["calls"] == 1


@pytest.mark.gpu
def test_reading_does_not_disturb_a_capture():
    """report() from another thread while this one captures in CUDA's default, global mode."""
    import threading

    device = torch.device("cuda", torch.cuda.current_device())
    x = values(device=device)
    function = shadowed(lambda x, layer: x.clone())
    function(x, 0)
    stop, reads = threading.Event(), []

    def read():
        while not stop.is_set():
            reads.append(len(shadow.report()))

    reader = threading.Thread(target=read)
    reader.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            function(x, 0)
    graph.replay()
    torch.cuda.synchronize()
    stop.set()
    reader.join()
    assert reads and sum(r["calls"] for r in shadow.report()) == 201
