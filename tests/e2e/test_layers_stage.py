"""What collect.py says of an engine's layers, and how stock's are recorded. What judges them: tests/layers."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "layers_plugin"), str(HERE / "sm120_plugin")]
import as_sm120  # noqa: E402
import experts_stage  # noqa: E402
import layer_inputs  # noqa: E402
import layers_compare  # noqa: E402
import layers_rows  # noqa: E402
import layers_stage  # noqa: E402

from deepseek_v4_sm120.commands.layers import record, verdict  # noqa: E402
from deepseek_v4_sm120.commands.layers.command import INDEX_FP4  # noqa: E402


def test_the_plugin_records_as_ours_is(tmp_path):
    """By the names of the same functions."""
    from deepseek_v4_sm120.sglang_patches.rows.layers import LAYERS

    found = layer_inputs.hooks(tmp_path)
    assert set(found) == {target.where.replace(":", ".") for target in LAYERS.targets}
    noted = []

    def forward(self, x, positions):
        noted.append((self, x, positions))
        return 3

    attention = found["sglang.srt.models.deepseek_v4.MQALayer.forward"]
    assert attention(forward, "layer", x=1, positions=2) == 3 and noted == [("layer", 1, 2)]


def test_an_index_cache_in_fp4_is_asked_for_and_judged_as_one(tmp_path, monkeypatch):
    """SGLang's arguments refuse it on Hopper: the engine has the plugin that lets it pass."""
    monkeypatch.setenv("PYTHONPATH", "others")
    monkeypatch.delenv("E2E_JIT_SHELF", raising=False)
    _, _, asked = layers_stage.CASES["layers_fp4_index"]
    assert f"{INDEX_FP4}=true" in asked
    environment = layers_stage.environment("layers_fp4_index", tmp_path)
    assert environment["PYTHONPATH"].split(":") == [str(experts_stage.PLUGIN), "others"]
    assert set(environment[experts_stage.VARIABLE].split(",")) <= set(as_sm120.CHOICES)
    assert experts_stage.VARIABLE not in layers_stage.environment("layers_ours", tmp_path)
    hook = SimpleNamespace(is_gfx95_supported=lambda: False)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", SimpleNamespace(serving_hook=hook))
    as_sm120.CHOICES["fp4_cache"]()
    assert hook.is_gfx95_supported()
    judged = []

    def judge(*_, index_fp4):
        judged.append(index_fp4)
        return SimpleNamespace(finish=list, tokens=[])

    monkeypatch.setattr(record.Sent, "missing", lambda self: [])
    for name, value in (("Checkpoint", lambda folder: SimpleNamespace(config={})), ("Judge", judge)):
        monkeypatch.setattr(layers_compare, name, value)
    for fp4 in (True, False):
        place = tmp_path / str(fp4) / "record"
        place.mkdir(parents=True)
        (place / record.SENT).write_text(json.dumps({"requests": [{"input_ids": [1], "output_ids": [2]}]}))
        (place / record.FACTS).write_text(json.dumps({INDEX_FP4: fp4}))
        monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path), str(place.parent), str(tmp_path / "out")])
        monkeypatch.setattr(record, "read", lambda folder: [])
        layers_compare.main()
    assert judged == [True, False]


def rows_of(case, name="layers_ours", **others):
    """Of a case that has groups, those of the modes that it must have shown, too."""
    modes = verdict.DRAFTED if "eagle" in name else verdict.PLAIN
    groups = case.get("groups", [])
    case = case | {"groups": groups + [group() | {"mode": mode} for mode in modes] if groups else []}

    def row(case, impl, metric, value, bar, issue):
        met = None if bar is None else value is not None and value <= bar
        return {"case": case, "impl": impl, "metric": metric, "value": value, "bar": bar, "met": met, "issue": issue}

    base = {"exit": 0, "compared": 0, "patched": True, "groups": []}
    return layers_rows.rows(row, [{"cases": {name: base | case}}, {"cases": {k: base | v for k, v in others.items()}}])


def group(**faults):
    seen = {name: {"share": share, "chance": 0.01, "reach": 0.01, "strength": 0.1} for name, share in faults.items()}
    return {
        "what": "attention",
        "mode": "decode",
        "rows": 3,
        "outliers": 0,
        "worst": 0.1,
        "error": 0.02,
        "faults": seen,
    }


def test_the_rows_tell_a_fault_and_a_case_that_broke():
    assert all(row["met"] is not False for row in rows_of({"groups": [group(a=0.1, b=-0.2)]}))
    missed = [row["metric"] for row in rows_of({"groups": [group(a=0.1, b=0.9)]}) if row["met"] is False]
    assert missed == ["greatest share of 2 known faults"]
    assert [row["met"] for row in rows_of({"compared": None})] == [False, False]
    assert [row["metric"] for row in rows_of({}) if row["met"] is False] == ["kinds of passes that nobody saw"]
    elsewhere = group() | {"outliers": 3, "error": None}  # all rows are more than OUTLIER off, or no numbers
    missed = [row["metric"] for row in rows_of({"groups": [elsewhere]}) if row["met"] is False]
    assert missed == ["rows of another choice (experts, entries)"]
    for what, mode, most in (
        ("x", "target, decode", 0),
        (verdict.BEGUN, "draft, extend", 0),
        ("x", "draft, extend", 2),
    ):
        tokens = [{"what": what, "mode": mode, "rows": 100, "off": off} for off in (most, most + 1)]
        assert [row["met"] for row in rows_of({"tokens": tokens}) if "wrong ones" in row["metric"]] == [True, False]
    weak = group(a=0.9)
    weak["faults"]["a"]["strength"] = verdict.STRONG / 2
    assert all(row["met"] is not False for row in rows_of({"groups": [weak]}))
    planted = layers_rows.PLANTED["layers_eagle314_blind"]
    seen = rows_of({"groups": [group(**{planted: 0.4})]}, "layers_eagle314_blind")
    assert [row["metric"] for row in seen if row["met"] is False] == [
        f"share of the fault that is there, {planted}, off 1"
    ]
    stock = {"patched": False, "groups": [group(a=0.9) | {"error": 0.01}]}
    found = rows_of({"groups": [group(a=0.1)]}, layers_stock=stock)
    missed = [(row["metric"], row["value"]) for row in found if row["met"] is False and row["impl"].startswith("ours")]
    assert missed == [("relative error, of stock's", 2)]
    hidden = group(**{planted: 1.0})
    hidden["faults"][planted]["reach"] = 1.0
    assert any(row["met"] is False for row in rows_of({"groups": [hidden]}, "layers_eagle314_blind"))
    unseen = rows_of({"groups": [group(a=0.1)]}, "layers_eagle314_blind")
    assert [row["metric"] for row in unseen if row["met"] is False] == ["a planted fault that was not told"]
