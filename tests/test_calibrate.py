"""calibrate without a GPU: the decision, the profile, what each operator's file must have, attention and experts."""

import dataclasses
import json
import resource
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.calibrate import command, worker
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import nvidia_smi
from deepseek_v4_sm120.ops import index_select as index_op
from deepseek_v4_sm120.ops import mxfp4_moe as moe_op
from deepseek_v4_sm120.ops import sparse_decode as op
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.specs import index_select, mhc, mxfp4_moe, provider, sparse_decode
from deepseek_v4_sm120.specs.provider import OURS, STOCK
from tests.doctor.test_machine import rtx, smi

SHAPES = {"tp": 2, "context": 131_072, "concurrency": 8, "quick": True}


def times(**microseconds):
    cases = [{"case": name, "us": us, "error": 0.001, "how": "graph"} for name, us in microseconds.items()]
    return {"cases": cases, "wrong": None}


WRONG = {"cases": [{"case": "C4", "error": 0.3, "allowed": 0.003}], "wrong": "C4: relative error 0.3000, allowed 0.003"}


@pytest.mark.parametrize(
    ("ours", "stock", "winner", "ratio"),
    [
        (times(a=10, b=10), times(a=20, b=20), OURS, 2.0),
        (times(a=10, b=10), times(a=5, b=10), STOCK, 0.5**0.5),
        (times(a=10), {"problem": "not installed"}, OURS, None),
        (WRONG, times(a=5), STOCK, None),
        (times(a=10), WRONG, OURS, None),
        ({"problem": "no module"}, times(a=5), STOCK, None),
        (times(a=10), times(b=5), OURS, None),
    ],
)
def test_who_is_used(ours, stock, winner, ratio):
    found = command.decide("sparse_decode", {OURS: ours, STOCK: stock, "torch": times(a=900)})
    assert (found["winner"], found["stock_over_ours"]) == (winner, pytest.approx(ratio) if ratio else None)
    assert set(found["wrong"]) == {name for name, result in {OURS: ours, STOCK: stock}.items() if result is WRONG}


def test_the_profile_is_what_the_patch_table_reads(tmp_path, monkeypatch, capsys):
    results = {OURS: WRONG, STOCK: times(C4=5), "x": {"problem": "absent"}}
    operators = {"sparse_decode": command.decide("sparse_decode", results)}
    found = command.as_profile(operators, "NVIDIA RTX PRO 6000", SHAPES) | {"not_reached": ["mhc"], "not_here": {}}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found))
    monkeypatch.setattr(profile, "here", lambda sglang: profile.identity_of(found))
    told = extension.describe()
    for built, is_outdated in ((told, False), (told | {"code": "of a later build"}, True)):
        monkeypatch.setattr(profile, "build_info", lambda built=built: built)
        read = profile.consult(str(path), None)
        assert "ours: C4: relative error 0.3000" in read.against("sparse_decode")
        assert bool(read.outdated) is is_outdated and told["code"]
    command.show(found)
    text = capsys.readouterr().out
    assert "WRONG  ours: C4" in text and "not run  x: absent" in text and "stock is used" in text
    assert "mhc: not reached, so the shipped default holds" in text


def in_step(us, point, calls):
    found = zip(us, calls, strict=True)
    return [{"case": f"{point}, {n}", "us": t, "point": point, "calls": c} for n, (t, c) in enumerate(found)]


def test_a_verdict_weighs_what_a_step_calls_often():
    """Within a point times add up by their calls; points count alike."""
    ours = {"cases": in_step((10, 10), "1 rows", (1, 9)) + in_step((40, 10), "8 rows", (1, 9)), "wrong": None}
    stock = {"cases": in_step((90, 10), "1 rows", (1, 9)) + in_step((40, 10), "8 rows", (1, 9)), "wrong": None}
    found = command.decide("fp8_linear", {OURS: ours, STOCK: stock})
    assert found["stock_over_ours"] == pytest.approx((180 / 100) ** 0.5)


@pytest.mark.parametrize(
    ("stock", "verdict", "by_choice"),
    [
        (times(a=13), "ours is used; stock takes 1.30 times ours", "ours is used{}; stock takes 1.30 times ours"),
        (times(a=8), "stock is used; stock takes 0.80 times ours", "stock is used; stock takes 0.80 times ours"),
        (WRONG, "ours is used", "ours is used{}"),
        ({"problem": "not installed"}, "ours is used", "ours is used{}"),
    ],
)
def test_the_verdict_in_words(stock, verdict, by_choice):
    """Of an operator that is off by default as well."""
    results = {OURS: times(a=10), STOCK: stock}
    assert command._verdict("fp8_linear", command.decide("fp8_linear", results)) == verdict
    said = command._verdict("router_topk", command.decide("router_topk", results))
    assert said == by_choice.format(" with DSV4_SM120_SET=router_topk=on")


@pytest.mark.parametrize(
    ("way", "left_out", "ratio"),
    [
        (times(b=5), None, 2**0.5),
        (times(b=20), "takes 2.00 times as long as ours", 1.0),
        (WRONG, "C4: relative error 0.3000, allowed 0.003", 1.0),
        ({"problem": "not on this GPU"}, None, 1.0),
    ],
)
def test_a_way_of_ours_that_loses_is_left_out_and_not_the_operator(way, left_out, ratio):
    name = mxfp4_moe.OURS_MXFP8
    found = command.decide("mxfp4_moe", {OURS: times(a=10, b=10), name: way, STOCK: times(a=10, b=10)})
    assert found["winner"] == OURS and found["stock_over_ours"] == pytest.approx(ratio)
    assert found["left_out"] == ({name: left_out} if left_out else {})


def test_every_operator_has_a_file_here():
    assert {"sparse_decode", "index_select", "mxfp4_moe", "bf16_linear", "fp8_linear", "mhc"} <= set(OPS)
    for name in OPS:
        described = worker.operator(name)
        names = [p.name for p in described.providers()]
        assert names[0] == OURS and STOCK in names and len(set(names)) == len(names)
        assert all(p.name.startswith(OURS) for p in described.providers() if p.optional)
        cases = described.cases(**SHAPES)
        assert cases and len({c.name for c in cases}) == len(cases) and all(c.bytes_per_call > 0 for c in cases)
        assert isinstance(described.ERROR, str)
        assert all(described.max_error(OURS, case) <= described.max_error(STOCK, case) for case in cases)
        assert callable(described.error) and callable(described.correctness_inputs) and described.TimingInputs


def test_the_shapes_are_those_of_the_plan():
    cases = sparse_decode.cases(**SHAPES)
    assert {c.heads for c in cases} == {32} and {c.rows for c in cases} == {1, 8}
    assert {(c.page_size, c.length, c.width) for c in cases} == {(0, 0, 0), (64, 512, 512), (2, 1024, 1024)}
    assert len(sparse_decode.cases(**SHAPES | {"quick": False})) > len(cases)
    assert op.PREFILL_ROWS <= sparse_decode.CHECKED_PREFILL_ROWS <= sparse_decode.PREFILL_ROWS


def on_cpu(monkeypatch, module):
    make = module.make_inputs
    monkeypatch.setattr(module, "make_inputs", lambda shape, seed=0, device="": make(shape, seed=seed, device="cpu"))


def torch_provider(described):
    return next(p for p in described.providers() if p.name == "torch").build()


@pytest.mark.parametrize("kind", ["window", "C4", "C128 at 1K"])
def test_the_torch_provider_is_right(kind, monkeypatch):
    on_cpu(monkeypatch, sparse_decode)
    case = next(c for c in sparse_decode.cases(**SHAPES | {"context": 1024}) if c.kind == kind)
    call = torch_provider(sparse_decode)
    for inputs in sparse_decode.correctness_inputs(case):
        assert sparse_decode.error("torch", call(inputs), inputs) < 0.003


@pytest.mark.parametrize("case", index_select.cases(**SHAPES | {"context": 4096}), ids=lambda case: case.name)
def test_a_selection_is_judged_by_its_entries(case, monkeypatch):
    from deepseek_v4_sm120.reference import index_select as reference

    on_cpu(monkeypatch, index_select)
    monkeypatch.setattr(index_select, "CHECKED_PREFILL_ROWS", 9)
    for one in index_select.correctness_inputs(case):
        assert int(one.inputs.page_table.max()) < one.inputs.k_pages.shape[0]
        right, _ = reference.index_select(**one.inputs.arguments(), k=512)
        assert index_select.error(OURS, right, one) == 0.0
        assert index_select.error("torch", torch_provider(index_select)(one), one) == 0.0
        longest = int(one.inputs.lengths.argmax())
        chosen = int((right >= 0).sum())
        missing, twice, strange = right.clone(), right.clone(), right.clone()
        missing[longest, 7], twice[longest, 7], strange[longest, 7] = -1, right[longest, 8], 1 << 30
        for wrong in (missing, twice, strange):
            assert index_select.error(STOCK, wrong, one) == pytest.approx(1 / chosen)
        worst = reference.mqa_logits(**one.inputs.arguments())[longest].where(
            torch.arange(one.inputs.page_table.shape[1] * 64) < one.inputs.lengths[longest], torch.inf
        )
        lowest = int(worst.argmin())
        slot = int(one.inputs.page_table[longest, lowest // 64]) * 64 + lowest % 64
        if int(one.inputs.lengths[longest]) > 512 and slot not in right[longest]:
            swapped = right.clone()
            swapped[longest, 7] = slot
            assert index_select.error(STOCK, swapped, one) == pytest.approx(1 / chosen)


def test_the_indexer_is_asked_for_what_the_plan_calls():
    cases = index_select.cases(**SHAPES | {"context": 393_216, "quick": False})
    assert {c.entries for c in cases} == {98_304} and {c.fp4 for c in cases} == {True, False}
    assert {(c.kind, c.rows) for c in cases} >= {("decode", 1), ("decode", 8), ("verify", 16), ("prefill", 2048)}
    assert index_select.PREFILL_ROWS > index_select.CHECKED_PREFILL_ROWS > index_op.DECODE_ROWS


@pytest.mark.parametrize(("version", "handled"), [(None, True), ((0, 5, 14), False), ((0, 5, 17), True)])
def test_the_stock_indexer_of_a_release(version, handled, monkeypatch):
    monkeypatch.setattr(index_select, "sglang_version", lambda: version)
    prefill = next(c for c in index_select.cases(**SHAPES) if c.kind == "prefill")
    assert index_select._stock_handles(prefill) == handled  # 0.5.14 gathers all keys of all rows as fp32
    assert not index_select._stock_handles(index_select.Case("decode", 1, 4096, fp4=True))
    if version is None:  # no SGLang, or one that names no release, which counts as the newest
        assert index_select._stock_problem() == f"this SGLang has no {index_select.TILELANG[0]}"


@pytest.mark.parametrize(
    ("told", "numbers"),
    [("0.5.24.dev7+gabc", (0, 5, 24)), ("0.5.24rc1", (0, 5, 24)), ("0.0.0.dev1+gabc", None), ("main-abc", None)],
)
def test_a_sglang_that_names_no_release_is_none_of_the_oldest(told, numbers, monkeypatch):
    monkeypatch.setattr(provider, "package_version", lambda package, sources: told)
    assert provider.sglang_version.__wrapped__() == numbers
    for spec in (mhc, mxfp4_moe):
        monkeypatch.setattr(spec, "sglang_version", provider.sglang_version.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert mhc._is_fused_by_default() and mxfp4_moe._is_cutlass()


def test_the_experts_are_those_of_a_rank(monkeypatch):
    cases = mxfp4_moe.cases(**SHAPES)
    assert {c.inter for c in cases} == {1024} and [c.rows for c in cases] == [1, 8, 2048]
    assert cases[0].bytes_per_call == pytest.approx(6 * 13_369_344 / 2, rel=0.02)
    assert moe_op.DECODE_ROWS < mxfp4_moe.CHECKED_PREFILL_ROWS
    ways = [p for p in mxfp4_moe.providers() if p.optional]
    assert [p.name for p in ways] == [mxfp4_moe.OURS_MXFP8]
    assert all([c.rows for c in cases if way.handles(c)] == [2048] for way in ways)


def test_the_torch_experts_are_right():
    inputs = mxfp4_moe.make_inputs(mxfp4_moe.Shape(3, 256, 128, 16, routed_scaling=1.5), device="cpu")
    result = torch_provider(mxfp4_moe)(inputs)
    assert mxfp4_moe.error("torch", result, inputs) < 0.01
    assert mxfp4_moe.error("torch", result.roll(1, dims=0), inputs) > 0.5


@pytest.mark.parametrize("case", index_select.cases(**SHAPES | {"context": 4096}), ids=lambda case: case.name)
def test_what_is_timed_of_the_indexer(case, monkeypatch):
    monkeypatch.setattr(index_select, "POOL_BYTES", 4 << 20)
    calls = index_select.TimingInputs("cpu").calls(case, 2)
    one, other = (call.inputs for call in calls)
    assert one.q.shape[0] == case.rows and one.page_table.shape == (case.rows, case.columns)
    assert int(one.lengths.max()) <= case.entries <= 64 * case.columns
    assert not torch.equal(one.page_table[0], other.page_table[0]) and one.page_table.is_contiguous()
    few = dataclasses.replace(one, q=one.q[:2], weights=one.weights[:2], lengths=one.lengths[:2])
    few = dataclasses.replace(few, page_table=one.page_table[:2], q_scales=None if not case.fp4 else one.q_scales[:2])
    call = index_select.Call(few)
    assert index_select.error("torch", torch_provider(index_select)(call), call) == 0.0


def test_what_is_timed_of_the_experts(monkeypatch):
    monkeypatch.setattr(mxfp4_moe, "FLASH", dataclasses.replace(mxfp4_moe.FLASH, hidden=256))
    timing = mxfp4_moe.TimingInputs("cpu")
    calls = timing.calls(mxfp4_moe.Case(1, 128), 43)
    dealt = torch.cat([inputs.topk_ids[0] for inputs in calls])
    assert dealt[:256].unique().numel() == 256  # nobody comes again before all have been dealt
    assert int((calls[0].w13_scale == 255).sum()) == 0  # every expert's weights are there
    for rows in (8, 300):
        (inputs,) = timing.calls(mxfp4_moe.Case(rows, 128), 1)
        assert inputs.hidden.shape == (rows, 256) and inputs.topk_ids.shape == (rows, 6)
        assert all(len(set(ids)) == 6 for ids in inputs.topk_ids.tolist()) and inputs.w13 is calls[0].w13


def test_flashmla_gets_a_schedule_for_each_set_of_lengths(monkeypatch):
    used = []
    functions = {
        "get_mla_metadata": lambda: (object(), None),
        "flash_mla_with_kvcache": lambda **how: (used.append(how["tile_scheduler_metadata"]),),
    }
    monkeypatch.setattr(provider, "is_installed", lambda name: True)
    monkeypatch.setattr(sparse_decode, "unpatched", lambda module, name: functions[name])
    monkeypatch.setattr(sparse_decode, "_keywords", lambda inputs: {})
    call = next(p for p in sparse_decode.providers() if p.name == "flashmla").build()
    a, b = object(), object()
    for lengths in ((a, None), (a, None), (a, b), (a, None)):
        call(SimpleNamespace(topk_length=lengths[0], extra_topk_length=lengths[1]))
    assert used[0] is used[1] and len({id(made) for made in used}) == 3


def test_experts_in_another_layout_are_prepared_once():
    prepared = []

    class Other(mxfp4_moe.Prepared):
        def prepare(self, inputs):
            prepared.append(inputs)
            return len(prepared)

        def run(self, inputs):
            return self.layout

    one, two, call = SimpleNamespace(w13=object()), SimpleNamespace(w13=object()), Other()
    assert [call(i) for i in (one, one, two, two, one)] == [1, 1, 2, 2, 3]


@pytest.fixture
def measured(monkeypatch):
    """A run of `calibrate` without a card: what its worker said holds a key."""
    crashed = {"cases": [], "wrong": "crashed after 0 case(s): OSError: HF_TOKEN=CaNaRy https://u:CaNaRy@h"}
    monkeypatch.setattr(command, "_device", lambda: ("A card", ["1a", "2a"]))
    monkeypatch.setattr(command, "measure", lambda names, shapes, clock: {"bf16_linear": {OURS: crashed}})


def test_no_key_is_in_the_profile_or_on_the_terminal(measured, tmp_path, capsys):
    out = tmp_path / "p.json"
    assert main(["calibrate", "--out", str(out)]) == 1
    assert main(["calibrate", "--out", str(out), "--json"]) == 1
    told = capsys.readouterr()
    assert "HF_TOKEN=***" in out.read_text() and "HF_TOKEN=***" in told.out
    assert "CaNaRy" not in out.read_text() + told.out + told.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"memory_used": 1025}, "in use already: GPU 1 (1025 MiB)"),
        ({"slowdowns": ("hw_thermal_slowdown",)}, "clocks are held down: GPU 1 (hw_thermal_slowdown)"),
    ],
)
def test_what_changes_the_times_is_told_before_they_are_taken(measured, tmp_path, capsys, monkeypatch, changes, words):
    gpus = nvidia_smi.read(smi(rtx())).gpus
    found = SimpleNamespace(gpus=(gpus[0], dataclasses.replace(gpus[1], **changes)))
    monkeypatch.setattr(command.nvidia_smi, "read", lambda run: found)
    main(["calibrate", "--out", str(tmp_path / "p.json")])
    told = capsys.readouterr().err
    assert (words in told) if words else ("in use" not in told and "held down" not in told)


@pytest.mark.parametrize(("uuids", "is_told"), [(["1a", "2a"], False), (["2a", "3a"], True), (["a slice's"], True)])
def test_a_server_on_other_cards_is_let_be(measured, tmp_path, capsys, monkeypatch, uuids, is_told):
    """With CUDA_VISIBLE_DEVICES, whose numbers are CUDA's own: the cards that are measured are looked at."""
    gpus = nvidia_smi.read(smi(rtx(4))).gpus
    known = [dataclasses.replace(gpu, uuid=f"GPU-{gpu.index}a", memory_used=90_000 * (gpu.index == 3)) for gpu in gpus]
    monkeypatch.setattr(command.nvidia_smi, "read", lambda run: SimpleNamespace(gpus=tuple(known)))
    monkeypatch.setattr(command, "_device", lambda: ("A card", uuids))
    main(["calibrate", "--out", str(tmp_path / "p.json")])
    assert ("in use already: GPU 3 (90000 MiB)" in capsys.readouterr().err) is is_told


TORCH = """
import types
def is_available(): return CARDS > 0
def device_count(): return CARDS
def get_device_properties(i): return types.SimpleNamespace(name=f"RTX PRO {6 - i}000", uuid=f"{i}a")
"""


def test_cards_are_told_by_torch(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch/cuda.py").write_text(f"CARDS = 2{TORCH}")
    assert command._device() == ("RTX PRO 6000", ["0a", "1a"])
    (tmp_path / "torch/cuda.py").write_text(f"CARDS = 0 {TORCH}")  # another size: no bytecode of before
    with pytest.raises(CommandError, match="torch sees no CUDA device"):
        command._device()


def test_what_was_measured_is_not_lost_with_the_file(measured, tmp_path, capsys, monkeypatch):
    """Nor is the profile of the run before: with half a one no server starts."""
    out = tmp_path / "p.json"
    out.write_text("of the run before")
    monkeypatch.setattr(command, "check_out", lambda given: None)  # full since
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # Python ignores its signal: a write fails
        assert main(["calibrate", "--out", str(out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capsys.readouterr()
    assert json.loads(told.out)["operators"]["bf16_linear"] and "cannot be written: File too large" in told.err
    assert out.read_text() == "of the run before" and [*tmp_path.iterdir()] == [out]


def test_a_link_to_the_profile_stays_one(measured, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "p.json")
    assert main(["calibrate", "--out", str(tmp_path / "link")]) == 1
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "p.json").read_text())["format"] == 1
