"""The stage `features` without a GPU: its verdicts on made answers and logs, and the real scripts around an engine that
stands in."""

import copy
import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import features as page
from bench import measured
from tests.e2e import features_stage as stage
from tests.e2e import test_scripts
from tests.e2e.features_engine import LENGTHS, Rounds, Weights
from tests.e2e.made_sglang import NO_TORCH
from tests.e2e.test_scripts import machine, script  # noqa: F401

# ---- verdicts


def answer(bits="a", ids=(1, 2), logprob=-1.0, **counts):
    return {"digest": bits, "ids": list(ids), "logprobs": [logprob], **counts}


def step(name="round", kind="round", checks=(), **answers):
    return {"step": name, "kind": kind, "answers": answers, "checks": list(checks)}


def found(*steps, ended=True, **resolved):
    return {"steps": list(steps), "ended": ended, "asked": dict(resolved), "resolved": dict(resolved)}


BASE = found(step(x=answer("a"), y=answer("b")))
FEATURE = stage.Feature("it", "it")


def judge(feature, mine, base=BASE, log="", stock=(None, ""), **outcome):
    read = {"it": (copy.deepcopy(mine), log), "it_stock": stock, stage.BASE: (base, ""), stage.TEXT_BASE: (base, "")}
    return stage.verdict(feature, {"exit": 0, **outcome}, lambda name: read[name])


def test_the_same_bits_and_others():
    same = judge(FEATURE, BASE)
    assert (same["state"], same["answers"], same["differ"]) == ("same bits", 2, 0)
    other = judge(FEATURE, found(step(x=answer("a"), y=answer("c", logprob=-1.5))))
    assert (other["state"], other["differ"]) == ("differs", 1) and "round y" in other["detail"]
    assert "0.5" in other["detail"]


def test_text_is_compared_by_its_tokens():
    feature = replace(FEATURE, same="text", against=stage.TEXT_BASE)
    mine = found(step(x={"ids": [1, 2]}, y={"ids": [1, 2]}))
    assert judge(feature, mine)["state"] == "same text"
    mine["steps"][0]["answers"]["y"]["ids"] = [1, 3]
    assert judge(feature, mine)["state"] == "differs"


@pytest.mark.parametrize("lost", ["digest", "logprobs"])
def test_an_answer_without_its_bits_is_not_of_the_same_bits(lost):
    mine, ids = found(step(x=answer("a"), y=answer("b"))), found(step(x=answer("a"), y=answer("b", ids=(1, 3))))
    del mine["steps"][0]["answers"]["y"][lost]
    assert (judge(FEATURE, mine)["state"] == "same bits") == (lost == "logprobs")
    assert judge(FEATURE, ids)["state"] == "differs"


def test_an_engine_beside_itself():
    """Its first round is what the others are held against, and it is not compared with itself."""
    feature = replace(FEATURE, against="it")
    alone = step("alone", x=answer("a"))
    assert judge(feature, found(step(x=answer("a")), alone))["answers"] == 1
    assert judge(feature, found(step(x=answer("b")), alone))["state"] == "differs"
    assert judge(feature, found(step(x=answer("b"))))["state"] == "did not act"


def test_only_the_steps_that_count_and_what_was_asked_alike():
    feature = replace(FEATURE, steps=("flushed",))
    mine = found(step(x=answer("z")), step("flushed", x=answer("a")), step("long", "long", x=answer("z")))
    assert judge(feature, mine)["state"] == "same bits"


@pytest.mark.parametrize(
    ("change", "log", "missing"),
    [
        ({"acts": ("pool is full",)}, "the pool is full", None),
        ({"acts": ("pool is full",)}, "", "pool is full"),
        ({"lacks": ("Capture",)}, "Capture begins", "Capture"),
        ({"counts": ("cached",)}, "", "no answer counts cached"),
    ],
)
def test_what_did_not_act_is_no_success(change, log, missing):
    said = judge(replace(FEATURE, **change), BASE, log=log)
    assert said["state"] == ("same bits" if missing is None else "did not act")
    assert missing is None or missing in said["detail"]


@pytest.mark.parametrize(
    ("theirs", "state"),
    [
        ((None, ""), "did not act"),
        ((found(BASE["steps"][0], ended=False), ""), "did not act"),
        ((found(step(x=answer("c", cached=256))), ""), "did not act"),
        ((found(step(x=answer("c", cached=0))), ""), "did not act in stock either"),
    ],
)
def test_where_stock_lacks_the_same_it_is_not_ours(theirs, state):
    said = judge(replace(FEATURE, counts=("cached",)), BASE, stock=theirs)
    assert (said["state"], said["detail"]) == (state, "no answer counts cached")


def test_counts_are_of_all_answers():
    mine = found(step(x=answer("a", cached=0), y=answer("b", cached=256)))
    assert judge(replace(FEATURE, counts=("cached",)), mine)["state"] == "same bits"


@pytest.mark.parametrize(
    ("told", "state"), [({"cached": 0}, "same bits"), ({"cached": 256}, "did not act"), ({}, "did not act")]
)
def test_a_flushed_cache_has_nothing_for_any_answer(told, state):
    mine = found(step(x=answer("a", **told), y=answer("b", cached=0)))
    assert judge(replace(FEATURE, not_counted=("cached",)), mine)["state"] == state


def test_sglang_may_turn_it_off():
    mine = found(BASE["steps"][0], enable_mixed_chunk=True)
    feature = replace(FEATURE, as_asked=("enable_mixed_chunk", "nobody_asked"))
    assert judge(feature, mine)["state"] == "same bits"
    mine["resolved"]["enable_mixed_chunk"] = False
    assert judge(feature, mine)["state"] == "turned off by SGLang"
    said = judge(replace(FEATURE, off="is incompatible"), BASE, log="W it is incompatible with that\n")
    assert (said["state"], said["detail"]) == ("turned off by SGLang", "W it is incompatible with that")


@pytest.mark.parametrize(
    ("log", "state"),
    [
        ("capture ends\nW it is incompatible with that\n", "same bits"),
        ("W it is incompatible with that\n", "turned off by SGLang"),
        ("", "did not act"),
    ],
)
def test_what_sglang_turns_off_for_a_draft_model_alone_is_on(log, state):
    feature = replace(FEATURE, acts=("capture ends",), off="is incompatible")
    assert judge(feature, BASE, log=log)["state"] == state


def test_a_check_that_is_not_so_is_a_defect():
    bad = step("pause", checks=[{"what": "it was paused", "ok": False}])
    assert judge(FEATURE, found(BASE["steps"][0], bad))["state"] == "differs"
    for steps, state in ((("pause", "round"), "differs"), (("round",), "same bits")):  # another feature's is its own
        assert judge(replace(FEATURE, steps=steps), found(BASE["steps"][0], bad))["state"] == state


LOG = """[2026] INFO something
Traceback (most recent call last):
  File "x.py", line 3, in f
    AssertionError()
AssertionError: Marlin MoE backend requires a quant method exposing that
[2026] died
RuntimeError: Rank 0 scheduler died
"""


def test_failures_refusals_and_stock():
    assert judge(FEATURE, None, log=LOG, exit=-9) == {
        "state": "fails",
        "detail": "AssertionError: Marlin MoE backend requires a quant method exposing that",
    }
    refuses = replace(FEATURE, refusal="Marlin MoE backend requires")
    assert judge(refuses, None, log=LOG, exit=-9)["state"] == "refused"
    limit = {"exit": "stopped at the limit"}
    assert judge(refuses, None, **limit)["state"] == "fails"
    assert judge(FEATURE, None, **limit, by_stage=True)["state"] == "not run"
    assert judge(FEATURE, None, not_run="no xgrammar") == {"state": "not run", "detail": "no xgrammar"}


def test_stock_that_fails_too_is_no_defect_of_ours(monkeypatch):
    monkeypatch.setitem(stage.ENGINES, "it_stock", stage.Engine(stock_of="it"))
    assert judge(FEATURE, None, log=LOG, exit=1, stock=(None, LOG))["state"] == "fails in stock too"
    assert judge(FEATURE, None, log=LOG, exit=1, stock=(None, ""))["state"] == "fails"  # it did not run
    other = judge(FEATURE, None, log=LOG, exit=1, stock=(None, "ValueError: another"))
    assert other["state"] == "fails" and other["detail"].startswith("AssertionError: Marlin")
    assert other["detail"].endswith("; stock: ValueError: another")
    assert judge(FEATURE, None, log=LOG, exit=1, stock=(found(), "up"))["state"] == "fails"


def test_an_engine_that_ended_later_has_what_it_had_done():
    feature = replace(FEATURE, steps=("round",))
    assert judge(feature, found(BASE["steps"][0], ended=False), exit=-9)["state"] == "same bits"
    assert judge(FEATURE, found(BASE["steps"][0], ended=False), log=LOG, exit=-9)["state"] == "fails"


# ---- the definitions


def test_every_feature_has_its_engine_and_every_engine_a_feature():
    beside = {name for feature in stage.FEATURES for name in (feature.against, *feature.stock)}
    assert {feature.engine for feature in stage.FEATURES} | beside == {
        name for name, engine in stage.ENGINES.items() if not engine.stock_of
    }
    assert len({feature.what for feature in stage.FEATURES}) == len(stage.FEATURES)
    for feature in stage.FEATURES:
        engine = stage.ENGINES[feature.engine]
        assert set(feature.steps) <= set(engine.steps), feature.what
        against = stage.ENGINES[feature.against]
        assert (engine.phases == against.phases) and (feature.same == "text") == (engine.phases == stage.FREE)
    sets = {word.partition("=")[0] for engine in stage.ENGINES.values() for word in engine.options}
    asked = {name for feature in stage.FEATURES for name in feature.as_asked}
    assert asked <= sets | {"chunked_prefill_size", "load_format"}


def test_cards_are_taken_in_turn_and_what_is_missing_is_said(monkeypatch, tmp_path):
    make = lambda name, options, **more: SimpleNamespace(name=name, options=options, **more)  # noqa: E731
    cases = {case.name.removeprefix(stage.PREFIX): case for case in stage.cases(make, lambda is_stock: {})}
    arguments = SimpleNamespace(cards=2, work=tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8a5c")
    named = [stage.environment(case, arguments).get("CUDA_VISIBLE_DEVICES") for case in cases.values()]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cards = [stage.environment(case, arguments).get("CUDA_VISIBLE_DEVICES") for case in cases.values()]
    assert abs(cards.count("0") - cards.count("1")) <= 1 and cards.count(None) == sum(
        engine.cards == 2 for engine in stage.ENGINES.values()
    )
    assert named == [{"0": "5", "1": "GPU-8a5c"}.get(card) for card in cards]
    monkeypatch.setattr(stage.importlib.util, "find_spec", lambda name: None if name == "xgrammar" else object())
    assert stage.why_not(cases["radix"], arguments) is None and stage.why_not(cases["two"], arguments) is None
    assert "xgrammar" in stage.why_not(cases["grammar"], arguments)
    arguments.cards = 1
    assert "2 cards" in stage.why_not(cases["two"], arguments)
    arguments.cards = 2
    assert stage.why_not(cases["disaggregated"], arguments) is None
    monkeypatch.setattr(stage.importlib.util, "find_spec", lambda name: None)
    assert stage.why_not(cases["disaggregated"], arguments) == "the harness lacks nixl"
    assert stage.why_not(cases["lora_stock"], arguments) is None
    (tmp_path / "features_lora_features.json").write_text('{"ended": true, "steps": []}')
    assert stage.why_not(cases["lora_stock"], arguments) == "ours did not fail"
    (tmp_path / "features_hicache_features.json").write_text('{"ended": true, "steps": []}')
    assert stage.why_not(cases["hicache_stock"], arguments) is None  # no answer of ours counts what it must
    assert "SET" not in " ".join(cases["lora_stock"].environment) and not cases["lora_stock"].patched


def test_weights_have_the_names_and_shapes_of_a_checkpoint(tmp_path):
    config = {"hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "head_dim": 128}
    config |= {"o_groups": 2, "o_lora_rank": 128, "q_lora_rank": 128, "hc_mult": 4, "compress_ratios": [0, 0, 4, 128]}
    (tmp_path / "flash6h").mkdir()
    (tmp_path / "flash6h/config.json").write_text(json.dumps(config))
    made = Weights(SimpleNamespace(models=tmp_path, variant="flash6h"), 3)
    for kind in Weights.KINDS:
        zero, one = (dict(made.tensors(kind, which)) for which in (0, 1))
        assert zero.keys() == one.keys() and made.tensors(kind, 0) == made.tensors(kind, 0)
        assert any(not (a.view(-1).float() == b.view(-1).float()).all() for a, b in zip(zero.values(), one.values()))  # noqa: B905
    experts, wo_a = dict(made.tensors("experts", 0)), dict(made.tensors("wo_a", 0))
    assert len(experts) == 3 * 3 * 2 and tuple(experts["layers.2.ffn.experts.0.w2.scale"].shape) == (256, 4)
    assert tuple(wo_a["layers.3.attn.wo_a.weight"].shape) == (256, 256)
    assert tuple(dict(made.tensors("compressor", 0))["layers.2.attn.compressor.wkv.weight"].shape) == (256, 256)


@pytest.mark.parametrize("has_sessions", [False, True])
def test_tensors_are_given_in_a_session_where_sglang_has_them(has_sessions):
    done, rounds = [], object.__new__(Rounds)

    def does(name, answer=(True, "")):
        return lambda *given: done.append(name) or answer

    rounds.engine = SimpleNamespace(update_weights_from_tensor=does("tensors"))
    if has_sessions:
        rounds.engine.begin_weight_update, rounds.engine.end_weight_update = does("begin"), does("end")
    rounds.weights = SimpleNamespace(tensors=lambda kind, which: [])
    rounds.digests = does("asked", ["a"])
    rounds.weights_from_tensors()
    once = ["begin", "tensors", "end", "asked"] if has_sessions else ["tensors", "asked"]
    assert done == once * 3 * len(Weights.KINDS)
    if has_sessions:
        rounds.engine.end_weight_update = does("end", (False, "no session"))
        with pytest.raises(RuntimeError, match="no session"):
            rounds.weights_from_tensors()


@pytest.mark.parametrize("name", ["retracted", "eagle_retracted"])
def test_a_full_pool_is_asked_by_requests_that_do_not_ignore_an_end_which_there_is_not(name):
    """From 0.5.22 on SGLang admits no more of those that ignore it than will fit."""
    engine, asked, rounds = stage.ENGINES[name], [], object.__new__(Rounds)
    assert engine.steps == ("full",) and engine.config["eos_token_id"] > 129280
    rounds.case = SimpleNamespace(options=SimpleNamespace(forced=False), vocabulary=9)
    rounds.case.harness = SimpleNamespace(ids=lambda n, vocabulary, seed: [1] * n)
    rounds.engine = SimpleNamespace(generate=lambda **given: asked.append(given) or [ANSWERED] * len(LENGTHS))
    assert rounds.do_full()["kind"] == rounds.do_long()["kind"] == "long"
    full, long = (given["sampling_params"] for given in asked)
    assert full == long | {"ignore_eos": False} and asked[0]["input_ids"] == asked[1]["input_ids"]


# ---- the scripts around an engine that stands in

ANSWERED = {"output_ids": [1], "meta_info": {}}

HARNESS = test_scripts.HARNESS.replace(
    '    p.add_argument("--radix", action="store_true")\n',
    '    p.add_argument("--radix", action="store_true")\n'
    '    p.add_argument("--eager", action="store_true")\n'
    '    p.add_argument("--load-format", default="dummy")\n'
    '    p.add_argument("--models", default=os.environ["MODELS"])\n',
).replace(
    '    return {"name": a.name, "patch": a.patch, "set": " ".join(a.set)}, model\n',
    "    import json\n"
    "    given = dict(word.split('=', 1) for word in a.set)\n"
    "    given = {name: json.loads(value) for name, value in given.items()}\n"
    "    model = os.path.join(a.models, a.variant)\n"
    "    os.makedirs(model, exist_ok=True)\n"
    "    open(os.path.join(model, 'config.json'), 'w').write('{}')\n"
    "    given = {'name': a.name, 'patch': a.patch, 'radix': a.radix, 'load_format': a.load_format, **given}\n"
    "    return given, model\n",
)

SGLANG = """
import asyncio, os, sys, time, types
__version__ = "0.0.0.fake"
class Manager:
    def __init__(self):
        self.paused, self.aborted = asyncio.Event(), False
        self.paused.set()
    async def pause_generation(self, request):
        assert request.mode in ("in_place", "retract")
        self.paused.clear()
    async def continue_generation(self, request):
        self.paused.set()
    def abort_request(self, abort_all):
        self.aborted = abort_all
class Engine:
    def __init__(self, name, patch, radix, **more):
        sys.modules["__main__"].SETTLE_S = 0.0
        self.name, self.given, self.radix = name, more, radix
        self.turned = more.get("load_format") == "sharded_state"
        if more.get("enable_lora"):
            print("Traceback (most recent call last):\\nAssertionError: Marlin MoE backend requires a quant method exposing get_marlin_quant_info, got X", flush=True)
            os._exit(7)
        if more.get("disaggregation_mode") == "prefill" and os.environ.get("PREFILL") == "fails":
            print("Traceback (most recent call last):\\nValueError: no NIXL here", flush=True)
            os._exit(7)
        if more.get("enable_pdmux"):
            print("Traceback (most recent call last):\\nAttributeError: no attribute 'forward_split_prefill'", flush=True)
            os._exit(7)
        self.loop, self.tokenizer_manager, self.seen = asyncio.new_event_loop(), Manager(), set()
        print("Capture target decode CUDA graph begin")
        if patch and more.get("load_format") == "sharded_state":
            assert len(os.listdir(more["model_path"])) == 2
            for name in ("wo_a", "mxfp4_moe"):
                print(f"{name}: SGLang's own, as ShardedStateLoader loads weights as SGLang's own layers have made them")
    def get_server_info(self):
        return {**self.given, "enable_mixed_chunk": False}
    async def async_generate(self, input_ids, sampling_params, **more):
        n, found = sampling_params["max_new_tokens"], []
        if n > 100:
            await asyncio.sleep(0.5)
            await self.tokenizer_manager.paused.wait()
        aborted, self.tokenizer_manager.aborted = self.tokenizer_manager.aborted, False
        mode, rooms = self.given.get("disaggregation_mode"), more.get("bootstrap_room")
        aborted |= mode == "prefill" and os.environ["PREFILL"] == "aborts"
        if mode is not None:
            n = self.disaggregated(mode, n, input_ids, rooms, more["bootstrap_port"])
        for prompt in input_ids:
            key = (len(prompt), prompt[0])
            cached = 256 if self.radix and key in self.seen else 0
            self.seen.add(key)
            ids = [7 if "regex" in sampling_params else len(prompt)] * n
            meta = {"finish_reason": {"type": "abort" if aborted else "length"}, "cached_tokens": cached}
            meta |= {"num_retractions": 0, "spec_verify_ct": n if "speculative_algorithm" in self.given else None}
            if more.get("return_logprob"):
                off = (self.name == "features_eager" or self.turned) and len(prompt) == 9
                meta["output_token_logprobs"] = [[-1.0 - off, i, None] for i in ids]
            if "min_p" in sampling_params:
                left_out = 9.0 if self.name == "features_eagle_min_p" and len(prompt) == 120 else 1.0
                meta["output_top_logprobs"] = [[[-1.0, i, None]] for i in ids]
                meta["output_token_logprobs"][1][0] -= left_out
            found.append({"output_ids": ids, "meta_info": meta})
        return found
    def disaggregated(self, mode, n, input_ids, rooms, port):
        # what the prefill process puts under a room, the other takes away
        places = [f"{os.environ['ROOMS']}/{port}_{room}" for room in rooms]
        assert len(set(rooms)) == len(input_ids) and not self.seen & set(rooms)
        self.seen |= set(rooms)
        if mode == "prefill":
            assert self.given["disaggregation_bootstrap_port"] == port and self.given["base_gpu_id"] == 0
            print(f"[2026] Prefill batch, #new-seq: {len(rooms)}, #inflight-req: 0, ")
            for place, prompt in zip(places, input_ids):
                with open(place + ".part", "w") as file:
                    file.write(str(len(prompt)))
                os.replace(place + ".part", place)
            return 1
        assert self.given["base_gpu_id"] == 1
        if os.environ.get("PREFILL") == "here":
            print("[2026] Prefill batch, #new-seq: 1, ")
        for place, prompt in zip(places, input_ids):
            until = time.monotonic() + 30
            while not os.path.exists(place) and time.monotonic() < until:
                time.sleep(0.01)
            assert open(place).read() == str(len(prompt))
            os.remove(place)
        print("[2026] Decode batch, #running-req: 1, #transfer-req: 0, ")
        return n
    def generate(self, **asked):
        return self.loop.run_until_complete(self.async_generate(**asked))
    def save_sharded_model(self, path, pattern, max_size):
        open(path + "/model-rank-0-part-0.safetensors", "w").close()
    def update_weights_from_disk(self, path, load_format):
        assert os.path.exists(path + "/model.safetensors.index.json")
        return True, ""
    def flush_cache(self):
        self.seen.clear()
        return types.SimpleNamespace(success=True)
    def freeze_gc(self):
        pass
    def shutdown(self):
        pass
"""  # noqa: E501
IO_STRUCT = """
import types
PauseGenerationReqInput = ContinueGenerationReqInput = lambda **given: types.SimpleNamespace(**given)
"""


def put(tmp_path):
    files = {"harness/run_engine.py": HARNESS, "site/sglang/__init__.py": SGLANG, "site/torch_memory_saver.py": ""}
    files |= {f"site/sglang/srt/{name}__init__.py": "" for name in ("", "managers/")}
    files["site/sglang/srt/managers/io_struct.py"] = IO_STRUCT
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    maker = "import sys; open(sys.argv[1] + '/model.safetensors.index.json', 'x')"
    (tmp_path / "harness/make_weights.py").write_text(maker)


def test_the_stage(machine, tmp_path):  # noqa: F811
    put(tmp_path)
    names = [
        "base",
        "text",
        "radix",
        "eager",
        "mixed",
        "eagle",
        "eagle_min_p",
        "lora",
        "multiplexed",
        "multiplexed_stock",
        "two",
    ]
    names += ["loaded", "loaded_stock", "sharded", "sharded_off", "sharded_stock", "presharded_ours_by_ours"]
    only = ["--only", *(stage.PREFIX + name for name in [*names, "lora_stock"])]
    ended = machine("features", "--jobs", "4", *only, MODELS=str(tmp_path / "models"))
    assert ended.returncode == 1, ended.stdout + ended.stderr  # four defects
    path = machine.out / "stage_features.json"
    assert path.exists(), ended.stdout + ended.stderr
    told = json.loads(path.read_text())
    lines = {line["feature"]: line for line in told["features"]}
    states = {name: line["state"] for name, line in lines.items()}
    assert states == {
        "prefix cache (the default)": "same bits",
        "flush_cache": "same bits",
        "pause in place and resume": "same bits",
        "pause with retraction and resume": "did not act",
        "abort of all": "same bits",
        "mixed chunks": "turned off by SGLang",
        "CUDA graphs off": "differs",
        "others that sample with min_p": "same text",
        "EAGLE 3/1/4": "same text",
        "EAGLE + others that sample with min_p": "differs",
        "TP2, each prompt alone and all at once": "not run",
        "wo_a=off,mxfp4_moe=off, asked twice (the next lines' yardstick)": "same bits",
        "SGLang alone, asked twice (a yardstick, too)": "same bits",
        "--load-format sharded_state, beside the same with wo_a=off,mxfp4_moe=off": "same bits",
        "--load-format sharded_state, beside the checkpoint that it was saved from": "differs in stock too",
        "the same, then update_weights_from_disk": "differs",
        "presharded, mended: ours loads what ours wrote": "not run",
        "LoRA of the experts": "refused",
        "--enable-pdmux": "fails in stock too",
    }, ended.stdout
    assert lines["flush_cache"]["answers"] == len(LENGTHS) and "round 9" in lines["CUDA graphs off"]["detail"]
    assert "forward_split_prefill" in lines["--enable-pdmux"]["detail"]
    (said,) = lines["EAGLE + others that sample with min_p"]["detail"].split("; ")
    assert said == "min_p: prompt 120: no token below min_p, the farthest 9"
    assert "reproducible=on" in told["cases"]["features_radix"]["command"]
    assert (tmp_path / "models/flash6h/tokenizer.json").exists()
    table = script("collect").results([told], "c0ffee")["e2e_features_sglang_0.0.0.fake.json"]
    unmet = {row["case"].removeprefix("feature: ") for row in table["rows"] if row["met"] is False}
    assert unmet == {name for name, state in states.items() if stage.STATES[state]} and len(unmet) == 4
    shown = page.page({"e2e_features_sglang_0.0.0.fake": table | {"device": "an H200"}})
    assert "## SGLang 0.0.0.fake" in shown and "| **differs** |" in shown
    assert re.search(
        r"\| LoRA of the experts \| `enable_lora=true .*` \| .* \| refused \| SGLang: AssertionError", shown
    )
    assert "commit" in shown and "No release has run" not in shown


@pytest.mark.parametrize(
    ("prefill", "state", "why"),
    [
        ("there", "same bits", ""),
        ("here", "did not act", "Prefill batch"),
        ("aborts", "differs", "'abort'"),
        ("fails", "fails", "ValueError: no NIXL here"),
    ],
)
def test_prefill_in_a_process_of_its_own(machine, tmp_path, prefill, state, why):  # noqa: F811
    put(tmp_path)
    (tmp_path / "site/nixl.py").write_text("")
    (tmp_path / "rooms").mkdir()
    (tmp_path / "site/torch/__init__.py").write_text(NO_TORCH.replace("lambda: 0", "lambda: 2"))  # cards
    names = ["--only", *(stage.PREFIX + name for name in ("base", "text", "disaggregated", "disaggregated_eagle"))]
    more = {"MODELS": str(tmp_path / "models"), "ROOMS": str(tmp_path / "rooms"), "PREFILL": prefill}
    ended = machine("features", "--jobs", "4", *names, **more)
    path = machine.out / "stage_features.json"
    assert path.exists(), ended.stdout + ended.stderr
    lines = {line["engine"]: line for line in json.loads(path.read_text())["features"]}
    alone, eagle = lines["disaggregated"], lines["disaggregated_eagle"]
    assert alone["state"] == state and why in alone.get("detail", ""), ended.stdout
    assert eagle["state"] == state.replace("bits", "text"), ended.stdout
    assert alone["flags"].endswith('; the other process: disaggregation_mode="prefill" base_gpu_id=0')
    assert not os.listdir(tmp_path / "rooms")
    log = (tmp_path / "work/features_disaggregated.log").read_text()
    assert log.count("[prefill] ") > (3 if state == "same bits" else 0)


@pytest.mark.parametrize(
    ("ends", "ok"), [(["length", "length"], True), (["length"], False), ([], False), (["length", "abort"], False)]
)
def test_every_prompt_was_prefilled_by_the_other_process(ends, ok):
    rounds = object.__new__(Rounds)
    rounds.ends = ends
    assert [check["ok"] for check in rounds.were_prefilled(2)] == [ok]


def test_calls_are_put_together(tmp_path):
    """What ran stands above what a later call did not ask or reach."""
    line = {"feature": "flush_cache", "engine": "radix", "state": "same bits", "answers": 8, "differ": 0}
    lines = [line, line | {"state": "not run", "detail": "its engine was not asked for"}]
    for order in (lines, lines[::-1]):
        assert script("collect").merged_features(order) == [line]


@pytest.mark.parametrize(
    ("theirs", "state"),
    [(found(step(x=answer("s"), y=answer("t"))), "differs in stock too"), (BASE, "differs"), (None, "differs")],
)
def test_where_stock_differs_as_well_it_is_not_ours(theirs, state):
    feature = replace(FEATURE, stock=("it_stock", stage.BASE))
    mine = found(step(x=answer("a"), y=answer("c")))
    assert judge(feature, mine, stock=(theirs, ""))["state"] == state
    mine["steps"][0]["checks"] = [{"what": "a file", "ok": False}]
    assert judge(feature, mine, stock=(theirs, ""))["state"] == "differs"


def test_what_is_a_defect_is_a_missed_bar():
    line = {"feature": "f", "engine": "base"}
    missed = {
        state
        for state in stage.STATES
        if any(row["met"] is False for row in script("collect").feature_rows([line | {"state": state}]))
    }
    assert missed == {"did not act", "differs", "fails"}
    told = line | {"state": "same bits", "answers": 2, "differ": 1}
    assert [row["met"] for row in script("collect").feature_rows([told])] == [True, None, None, False]
    (row,) = script("collect").feature_rows([line | {"state": "not run"}])
    assert row["met"] is None  # it has shown nothing, and is no success


def test_the_page_without_results_says_what_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    shown = page.page(page.results())
    assert "No release has run yet" in shown and all(feature.what in shown for feature in stage.FEATURES)
    monkeypatch.setattr(page, "PAGE", tmp_path / "features.md")
    monkeypatch.setattr(measured, "REPO", tmp_path)
    assert page.main(["--check"]) == 1 and page.main([]) == 0 and page.main(["--check"]) == 0
    assert os.listdir(tmp_path) == ["features.md"]


def test_a_place_of_the_machine_is_not_quoted():
    log = "Traceback (most recent call last)\nRuntimeError: no match at /tmp/some/where/site/sglang/kernels/a.cuh:112\n"
    assert stage.quote(log) == "RuntimeError: no match at sglang/kernels/a.cuh:112"
