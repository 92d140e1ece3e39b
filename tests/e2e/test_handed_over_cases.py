"""Cases of the stage `features` in which SGLang hands weights over: where their weights are, who waits for whom, and
the plugin without which SGLang does not start with what is presharded."""

import ast
import concurrent.futures
import copy
import importlib.util
import json
import math
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bench import features as page
from deepseek_v4_sm120.sglang_patches.adapters import handed_over
from tests.e2e import features_stage as stage
from tests.e2e.features_engine import Rounds
from tests.e2e.test_features_stage import BASE, FEATURE, answer, found, judge, step
from tests.patching.test_wheel_wo_a import definition, source
from tests.patching.wheels import fetch


def cases_of_the_stage():
    make = lambda name, options, **more: SimpleNamespace(name=name, options=options, **more)  # noqa: E731
    return {case.name.removeprefix(stage.PREFIX): case for case in stage.cases(make, lambda is_stock: {})}


def given(name, arguments):
    words = stage.options(cases_of_the_stage()[name], arguments)
    found = dict(word.split("=", 1) for word in words if word != "--set")
    return {name: json.loads(value) for name, value in found.items()}


def test_where_an_engine_has_its_weights(tmp_path):
    arguments = SimpleNamespace(cards=1, work=tmp_path)
    whole = str(tmp_path / "features_checkpoint")
    folder_of = lambda name: json.loads(given(name, arguments)["model_loader_extra_config"])["presharded_path"]  # noqa: E731
    assert given("radix", arguments) == {}
    assert given("loaded", arguments) == given("offloaded", arguments) == {"model_path": whole}
    assert given("sharded", arguments) == {"model_path": str(tmp_path / "features_loaded_stock_saved")}
    assert given("sharded_stock", arguments) == given("sharded_off", arguments) == given("sharded", arguments)
    own = folder_of("presharded_ours")
    assert own == folder_of("presharded_ours_by_ours") == folder_of("presharded_ours_by_sglang")
    assert folder_of("presharded_sglangs") == folder_of("presharded_sglangs_by_ours") != own
    assert folder_of("presharded") != folder_of("presharded_stock")
    cases = cases_of_the_stage()
    assert "plugin" in stage.environment(cases["presharded_ours_by_sglang"], arguments)["PYTHONPATH"]
    assert "PYTHONPATH" not in stage.environment(cases["presharded"], arguments)
    assert stage.environment(cases["sharded"], arguments)[stage.CHECKPOINT_AT] == whole
    assert not cases["loaded_stock"].patched and cases["sharded"].patched
    assert stage.SET not in cases["presharded_sglangs"].environment
    assert "wo_a=off,mxfp4_moe=off" in cases["loaded"].environment[stage.SET]
    assert "wo_a" not in cases["sharded"].environment[stage.SET]


def test_what_loads_waits_for_what_writes(tmp_path):
    cases, ended = cases_of_the_stage(), threading.Event()
    arguments = SimpleNamespace(cards=1, work=tmp_path, deadline=time.monotonic() + 60)
    arguments.ended = {"features_loaded_stock": ended}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        said = pool.submit(stage.why_not, cases["sharded"], arguments)
        assert not concurrent.futures.wait([said], 0.1).done
        (tmp_path / "features_loaded_stock_saved").mkdir()
        ended.set()
        assert said.result(10) == "loaded_stock has written nothing whole to load"
    (tmp_path / "features_loaded_stock_saved/config.json").write_text("{}")
    assert stage.why_not(cases["sharded"], arguments) is None
    arguments.ended, ready = {}, tmp_path / "features_presharded_ours_presharded/TP-1-sig-0/READY"  # of an earlier call
    assert "presharded_ours" in stage.why_not(cases["presharded_ours_by_sglang"], arguments)
    ready.parent.mkdir(parents=True)
    ready.write_text("")
    assert stage.why_not(cases["presharded_ours_by_sglang"], arguments) is None
    assert stage.why_not(cases["held_stock"], arguments) is None
    names = list(stage.ENGINES)  # who waits has taken a place: who writes must have had its before
    assert all(names.index(engine.after) < i for i, engine in enumerate(stage.ENGINES.values()) if engine.after)


def test_a_checkpoint_is_made_once(tmp_path):
    maker = "import sys; open(sys.argv[1] + '/model.safetensors.index.json', 'x')"
    (tmp_path / "make_weights.py").write_text(maker)
    (tmp_path / "config.json").write_text('{"n_routed_experts": 256, "hidden_size": 4096}')
    arguments = SimpleNamespace(work=tmp_path / "work", harness=tmp_path)
    for _ in range(2):
        stage.write_checkpoint(tmp_path, arguments)
    config = json.loads((tmp_path / "work/features_checkpoint/config.json").read_text())
    assert config == {"n_routed_experts": 16, "hidden_size": 4096}


@pytest.mark.parametrize("said", [(True, ""), (False, "no weight_loader")])
def test_weights_are_saved_and_loaded_once_more(said, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv(stage.CHECKPOINT_AT, "the checkpoint")
    rounds, asked = object.__new__(Rounds), []
    rounds.case = SimpleNamespace(options=SimpleNamespace(out=tmp_path, name="features_it"))
    rounds.found = {"asked": {"model_path": str(tmp_path)}}
    rounds.do_alone = lambda: {"answers": {}}
    rounds.engine = SimpleNamespace(
        save_sharded_model=lambda path, **_: Path(path, "model-rank-0-part-0.safetensors").write_text(""),
        update_weights_from_disk=lambda path, **more: asked.append((path, more)) or said,
    )
    (check,) = rounds.do_save()["checks"]
    assert check["ok"] and stage.is_whole(tmp_path / "features_it_saved")
    if said[0]:
        assert rounds.do_reload() == {"answers": {}}
    else:
        with pytest.raises(RuntimeError, match="no weight_loader"):
            rounds.do_reload()
    assert asked == [("the checkpoint", {"load_format": "auto"})]


def test_the_page_says_what_each_is_held_against():
    usual = (stage.BASE, stage.TEXT_BASE)
    others = [feature for feature in stage.FEATURES if feature.against not in (*usual, feature.engine)]
    assert {feature.against for feature in others} == page.WITHOUT.keys()
    line = {"engine": "loaded", "against": "loaded", "same": "bits"}
    assert page.beside(line) == "itself: each prompt alone, and once more"
    assert page.beside(line | {"engine": "held"}).endswith("wo_a and mxfp4_moe off")


def test_what_ours_say_is_what_the_stage_looks_for(monkeypatch):
    told = []
    monkeypatch.setattr(handed_over, "process", handed_over.Process())
    monkeypatch.setattr(handed_over.report, "warn_once", told.append)
    monkeypatch.setattr(handed_over.report, "add_note", lambda *_: None)
    loader = type("ShardedStateLoader", (), {"load_model": lambda self: handed_over.are_sglangs("wo_a")})
    loader.load_model = handed_over.replace_load_model(loader.load_model)
    assert loader().load_model()
    assert re.search(stage.handed_over("ShardedStateLoader")[0], told[0])
    offloader = SimpleNamespace(get_offloader=type("OffloaderV1", (), {}))
    monkeypatch.setitem(sys.modules, handed_over.OFFLOADER, offloader)
    assert handed_over.are_sglangs("mxfp4_moe")
    assert re.search(stage.handed_over("--cpu-offload-gb")[1], told[1])
    monkeypatch.setattr(handed_over.process, "holds_for_others", True)
    assert handed_over.are_sglangs("wo_a") and re.search(stage.handed_over("--weight-cache-mode")[0], told[2])


# ---- what differs from run to run


ONCE_MORE = found(
    step(x=answer("a"), y=answer("b", logprob=-1.0)),
    step("again", x=answer("a"), y=answer("z", logprob=-1.125)),
)


@pytest.mark.parametrize(
    ("x", "y", "state", "why"),
    [
        (answer("a"), answer("v", logprob=-1.25), "same bits", "1 of 2 answers are up to 0.25 off, it_stock"),
        (answer("a"), answer("v", logprob=-1.5), "differs", "asked twice, 0.125 off itself there"),
        (answer("a"), answer("v", logprob=math.nan), "differs", "inf"),
        (answer("w"), answer("b"), "differs", "1 of 2 answers (round x)"),
    ],
)
def test_what_differs_from_run_to_run_is_asked_for_no_bits(x, y, state, why):
    feature = replace(FEATURE, steady_in="it_stock")
    told = judge(feature, found(step(x=x, y=y)), base=ONCE_MORE, stock=(ONCE_MORE, ""))
    assert told["state"] == state and why in told["detail"], told
    assert judge(feature, BASE)["state"] == "not run", "nothing says what differs from run to run"
    y_alone = found(step(y=answer("v")))
    assert judge(feature, y_alone, base=ONCE_MORE, stock=(ONCE_MORE, ""))["state"] == "did not act"


def test_a_yardstick_is_no_defect_of_ours():
    feature = replace(FEATURE, against="it", yardstick=True)
    told = judge(feature, ONCE_MORE)
    assert told["state"] == stage.BY_ITSELF and not stage.STATES[told["state"]] and "0.125" in told["detail"]
    broken = copy.deepcopy(ONCE_MORE)
    broken["steps"][0]["checks"] = [{"what": "a file", "ok": False}]
    assert judge(feature, broken)["state"] == "differs"


def test_stock_that_is_not_steady_says_nothing_of_a_difference():
    feature = replace(FEATURE, stock=("it_stock", stage.BASE))
    mine = found(step(x=answer("a"), y=answer("c")))
    assert (
        judge(feature, mine, base=ONCE_MORE, stock=(found(step(x=answer("a"), y=answer("s"))), ""))["state"]
        == "differs"
    )
    turned = found(step(x=answer("s"), y=answer("s")))
    assert judge(feature, mine, base=ONCE_MORE, stock=(turned, ""))["state"] == "differs in stock too"


# ---- the plugin that lets SGLang load what is presharded

RELEASES = ("0.5.17", "0.5.23")  # that the stage runs


@pytest.fixture
def plugin():
    path = stage.PRESHARDED_PLUGIN / "cleared_rotations.py"
    spec = importlib.util.spec_from_file_location("cleared_rotations", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", RELEASES)
def test_the_plugins_places_are_there(plugin, version, monkeypatch):
    """And SGLang still does not clear them itself, or the plugin, and its lines, may go."""
    wheel = fetch(version)
    module, _, name = plugin.SIGNATURE.partition(".PreshardedModelLoader.")
    assert definition(wheel, f"PreshardedModelLoader.{name}", module) is not None
    assert "precompute_freqs_cis" not in source(wheel, module)
    (place,) = [place for place in plugin.PLACES if tree_or_none(wheel, place)]
    cached = definition(wheel, plugin.TABLES[0], place)
    assert [ast.unparse(decorator) for decorator in cached.decorator_list] == ["lru_cache(2)"]
    made, cleared = ModuleType(place), []
    made.precompute_freqs_cis = SimpleNamespace(cache_clear=lambda: cleared.append(place))
    monkeypatch.setattr(plugin, "is_there", lambda name: name == place)
    monkeypatch.setitem(sys.modules, place, made)
    assert plugin.forget("a signature", "a loader") is None and cleared == [place]


def tree_or_none(wheel, module):
    try:
        return source(wheel, module)
    except KeyError:
        return None
