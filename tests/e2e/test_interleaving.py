"""The interleaving measurement without a GPU: its arithmetic, and the real control flow over a stand-in engine."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.made_sglang import ANY_HARNESS

HERE = Path(__file__).resolve().parent

HARNESS = (
    ANY_HARNESS
    + """
def parse(argv):
    p = argparse.ArgumentParser()
    p.add_argument("mode")
    for name in ("variant", "context", "chunk", "max-total-tokens", "out", "patch"):
        p.add_argument("--" + name)
    p.add_argument("--free", action="store_true")
    p.add_argument("--graph-bs", type=int, nargs="+")
    p.add_argument("--set", action="append")
    return p.parse_args(argv)
def engine_args(a):
    return {"patch": a.patch, "chunk": int(a.chunk)}, "model"
"""
)
# one scheduler: a chunk takes 20 ms, a decode step 2 ms, and prefill always comes first but for the interval
SGLANG = """
import asyncio, os
class Engine:
    def __init__(self, patch, chunk, swa_full_tokens_ratio):
        self.chunk, self.loop, self.queues, self.left, self.task = chunk, asyncio.new_event_loop(), {}, 0, None
        chosen = dict(item.split("=") for item in os.environ.get("DSV4_SM120_SET", "").split(",") if item)
        assert not patch or chosen["mhc"] == "off"  # the interval alone
        self.interval = int(chosen["prefill_decode_interval_0_5_17"]) if patch else 0
        if os.environ.get("FAKE_CRASH"):
            raise SystemExit("the fake engine does not start")
    async def scheduler(self):
        rest = 0
        while True:
            if self.left > 0 and not rest:
                await asyncio.sleep(0.02)
                self.left -= self.chunk
                rest = self.interval
                if self.left <= 0:
                    self.long.put_nowait(1)
                continue
            rest = max(0, rest - 1)
            await asyncio.sleep(0.002)
            for queue in list(self.queues.values()):
                queue.put_nowait(1)
    def generate(self, input_ids, sampling_params):
        pass
    async def async_generate(self, input_ids, sampling_params, stream):
        self.task = self.task or asyncio.ensure_future(self.scheduler())
        queue = asyncio.Queue()
        if len(input_ids) > 1000:
            self.left, self.long = len(input_ids), queue
        else:
            self.queues[input_ids[0]] = queue
        async def chunks():
            for n in range(1, sampling_params["max_new_tokens"] + 1):
                await queue.get()
                yield {"meta_info": {"completion_tokens": n}}
        return chunks()
    def shutdown(self):
        pass
"""


def script():
    spec = importlib.util.spec_from_file_location("e2e_interleaving", HERE / "interleaving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path, stage_python):
    for name, text in {"harness/run_engine.py": HARNESS, "site/sglang/__init__.py": SGLANG}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch/sitecustomize.py").touch()
    (tmp_path / "patch/deepseek_v4_sm120").mkdir()
    (tmp_path / "patch/deepseek_v4_sm120/__init__.py").write_text('OPS = ("sparse_decode", "mhc")\n')

    def call(*more, **environment):
        python, children = stage_python()
        line = [*python, str(HERE / "interleaving.py"), "--harness", str(tmp_path / "harness"), *more]
        line += ["--patch", str(tmp_path / "patch"), "--out", str(tmp_path / "out")]
        path = os.environ | {"PYTHONPATH": str(tmp_path / "site")} | children | environment
        return subprocess.run(line, env=path, capture_output=True, text=True, timeout=120)

    call.out = tmp_path / "out"
    return call


def test_a_frozen_stream_shows_and_an_interval_thaws_it(run):
    ended = run("--only", "stock", "interval 8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = json.loads((run.out / "interleaving.json").read_text())
    found = {(r["impl"], r["metric"]): r["value"] for r in table["rows"]}
    frozen, thawed = (found[name, "tokens/s of a stream while it prefills"] for name in ("stock", "interval 8"))
    assert frozen < 30 < thawed
    worst = "ITL while it prefills, greatest, ms"
    assert found["stock", worst] > 100 > found["interval 8", worst]


def test_streams_that_end_too_early_are_no_measurement(monkeypatch):
    import asyncio

    class Engine:  # a prompt that takes longer than the streams have tokens
        async def async_generate(self, input_ids, sampling_params, stream):
            async def chunks():
                for n in range(1, sampling_params["max_new_tokens"] + 1):
                    await asyncio.sleep(0.2 if len(input_ids) > 1 else 0.001)
                    yield {"meta_info": {"completion_tokens": n}}

            return chunks()

    module = script()
    monkeypatch.setattr(module, "STREAM_TOKENS", module.WARM + 10)
    with pytest.raises(RuntimeError, match="before the prompt's first"):
        asyncio.run(module.Measurement(Engine(), [[1], [2]], [3, 3]).run())


def test_a_failed_case_is_told(run):
    ended = run("--only", "stock", FAKE_CRASH="1")
    assert ended.returncode == 1 and "does not start" in ended.stdout


def test_gaps_count_the_wait_that_the_window_cuts():
    gaps = script().gaps
    assert gaps([0.0, 1.0, 2.0], 0.5, 2.5) == [1.0, 1.0]
    assert gaps([0.0, 9.0], 1.0, 8.0) == [9.0]  # frozen all the time: the wait is not lost
    assert script().percentile([], 0.5) != script().percentile([], 0.5)
