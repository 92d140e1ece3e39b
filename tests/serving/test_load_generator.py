"""The real bench_serving of five SGLang releases, driven by us against the fake server."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
import zipfile
from types import SimpleNamespace

import pytest

from bench.quality import corruption_soak, tool_calls
from bench.serving import load_generator, prompts
from bench.serving.generator_process import Generator, GeneratorFailed, Row
from tests.serving.conftest import VERSIONS, bench_serving_source, wheel

OURS = {"benchmark", "calculate_metrics", "get_request_headers", "get_request", "async_request_sglang_generate"}
PASSED = {
    "backend", "api_url", "base_url", "model_id", "tokenizer", "input_requests", "request_rate", "max_concurrency",
    "disable_tqdm", "lora_names", "lora_request_distribution", "lora_zipf_alpha", "extra_request_body", "profile",
    "warmup_requests",
}  # fmt: skip


@pytest.fixture
def generator(sglang_path, tmp_path):
    """generator(version) -> a running Generator over that release."""
    running = []

    def make(version: str = "0.5.17") -> Generator:
        environment = {**os.environ, "PYTHONPATH": sglang_path(version)}
        running.append(Generator(sys.executable, tmp_path / "generator.log", 60, environment))
        return running[-1]

    yield make
    for one in running:
        one.__exit__()


def functions(version: str) -> dict[str, ast.AST]:
    body = ast.parse(bench_serving_source(version)).body
    return {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_argument_that_bench_serving_reads_is_given(version):
    found = functions(version)
    read = {
        node.attr
        for name in OURS | {"async_request_openai_completions"}
        for node in ast.walk(found[name])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
    assert len(read) > 10
    assert read - set(load_generator.ARGUMENTS) == set()


@pytest.mark.parametrize("version", VERSIONS)
def test_benchmark_takes_what_we_pass_and_asks_for_nothing_else(version):
    arguments = functions(version)["benchmark"].args
    names = [argument.arg for argument in arguments.args]
    required = set(names[: len(names) - len(arguments.defaults)])
    assert required <= PASSED <= set(names)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_release_measures_the_fake_server(version, generator, serve):
    server = serve(step_s=0.002, accept_length=2)
    rows = [Row([5000 + i, 2, 3], 8) for i in range(3)]
    one = generator(version)
    found = one.run(server.url, "sglang", "fake/model", rows, 2, True, 30)
    assert found["failure"] is None
    assert [output["success"] for output in found["outputs"]] == [True] * 3
    assert [output["output_len"] for output in found["outputs"]] == [8] * 3
    # five steps of the server; a busy client sees the tokens later, and closer together. At the first token it reads
    # its clock twice, for ttft and for what itl begins at: the server's first step lies before both.
    for output in found["outputs"]:
        assert 0.001 < output["ttft"] < output["latency"] and output["latency"] > 0.01
        assert len(output["itl"]) == 7 and 0 < sum(output["itl"]) <= output["latency"] - 0.001
    if version >= "0.5.17":
        assert found["outputs"][0]["spec_accept_length"] == 2
    late_behind_slow_prompts(one, "sglang", serve)


def late_behind_slow_prompts(generator, backend, serve):
    """Its delay is of the last first token, wherever a request function of the release learns of that."""
    server = serve(step_s=0.02, prefill_s=0.1)
    rows = [Row([6000 + i] * 4, 30) for i in range(2)] + [Row([9], 1, delay_s=0.05)]
    outputs = generator.run(server.url, backend, "fake/model", rows, 3, True, 30)["outputs"]
    firsts = [output["start_time"] + output["ttft"] for output in outputs[:2]]
    assert min(firsts) - outputs[0]["start_time"] > 0.3 and outputs[2]["success"]
    assert 0.05 <= outputs[2]["start_time"] - max(firsts) < 0.35
    ends = [output["start_time"] + output["latency"] for output in outputs[:2]]
    assert outputs[2]["start_time"] < min(ends), "they have ended, and nobody heard their first tokens"


def test_the_streams_are_limited_and_the_late_request_is_late(generator, serve):
    server = serve(step_s=0.003)
    rows = [*(Row([6000 + i] * 4, 12) for i in range(4)), Row([9] * 8, 1, delay_s=0.4)]
    outputs = generator().run(server.url, "sglang", "fake/model", rows, 5, True, 30)["outputs"]
    starts = [output["start_time"] for output in outputs]
    assert starts[4] - max(starts[:4]) > 0.3
    assert outputs[4]["output_len"] == 1
    limited = generator().run(serve(step_s=0.003).url, "sglang", "fake/model", rows[:4], 2, True, 30)["outputs"]
    assert server.engine.max_active >= 4 and most_at_once(limited) == 2


def test_the_late_request_waits_for_no_request_that_ended():
    async def request_func(request_func_input, pbar):
        if request_func_input is lost:
            raise ConnectionError
        return SimpleNamespace(success=True, ttft=0.1)

    lost, late = SimpleNamespace(timestamp=None), SimpleNamespace(timestamp=0.01)

    async def run():
        recorder = load_generator.Recorder(request_func, {0})
        return await asyncio.wait_for(asyncio.gather(recorder(lost), recorder(late), return_exceptions=True), 10)

    error, found = asyncio.run(run())
    assert isinstance(error, ConnectionError) and found.success


def most_at_once(outputs):
    """By the client's clock: a server counts a request until it has seen the end of its answer out."""
    begins = [output["start_time"] for output in outputs]
    ends = [begin + output["latency"] for begin, output in zip(begins, outputs, strict=True)]
    return max(sum(b <= begin < e for b, e in zip(begins, ends, strict=True)) for begin in begins)


def test_the_openai_backend_of_another_engine(generator, serve):
    rows = [Row([7000, 7001], 6)]
    one = generator()
    outputs = one.run(serve().url, "vllm", "fake/model", rows, 1, True, 30)["outputs"]
    assert outputs[0]["success"] and outputs[0]["output_len"] == 6 and len(outputs[0]["itl"]) == 5
    late_behind_slow_prompts(one, "vllm", serve)


def test_a_server_that_dies_leaves_what_was_measured(generator, serve):
    server = serve("die_mid_stream", die_after=2)
    rows = [Row([8000 + i], 8) for i in range(4)]
    found = generator().run(server.url, "sglang", "fake/model", rows, 1, True, 30)
    assert [output["success"] for output in found["outputs"]] == [True, True, False, False]
    assert found["failure"] is not None


def test_a_server_that_hangs_is_given_up(generator, serve):
    one = generator()
    with pytest.raises(GeneratorFailed, match="no result within 1 s"):
        one.run(serve("hang").url, "sglang", "fake/model", [Row([1], 4)], 1, True, 1)
    assert one.run(serve().url, "sglang", "fake/model", [Row([1], 4)], 1, True, 30)["outputs"][0]["success"]


def test_a_python_without_sglang_is_said(tmp_path):
    (tmp_path / "log").write_text("of an earlier run\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        Generator(sys.executable, tmp_path / "log", 60, environment) as generator,
        pytest.raises(GeneratorFailed, match="none of sglang.benchmark.serving") as failure,
    ):
        generator.start()
    assert "earlier" not in str(failure.value) and (tmp_path / "log").read_text().startswith("of an earlier run")


def test_the_generator_itself_is_never_patched(tmp_path):
    assert Generator(sys.executable, tmp_path / "log").environment["DSV4_SM120"] == "off"


def test_a_job_is_plain_data():
    assert json.loads(json.dumps(vars(Row([1, 2], 3, 0.5)))) == {"prompt": [1, 2], "output_tokens": 3, "delay_s": 0.5}


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20"])  # 0.5.23 takes the encoder from a package of its own
def test_the_markers_of_prompts_and_leaks_are_the_models(version):
    """Our prompts write DeepSeek-V4's own markers, and the gates look for them: as SGLang's encoder has them."""
    with zipfile.ZipFile(wheel(version)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/encoding_dsv4.py")]
        source = archive.read(name).decode()
        detector = archive.read("sglang/srt/function_call/deepseekv4_detector.py").decode()
    markers = {
        node.targets[0].id if isinstance(node, ast.Assign) else node.target.id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
    }
    assert markers["bos_token"] == prompts.BEGIN and markers["USER_SP_TOKEN"] == prompts.USER
    assert markers["ASSISTANT_SP_TOKEN"] + markers["thinking_end_token"] == prompts.ASSISTANT
    leaks = [markers["dsml_token"], markers["thinking_start_token"], markers["thinking_end_token"], prompts.USER]
    assert all(tool_calls.LEAK.search(f"text {leak}") for leak in leaks)
    assert f"<{markers['dsml_token']}tool_calls>" in detector
    assert any("tool-call" in mark for mark in corruption_soak.marks(f"text <{markers['dsml_token']}tool_calls>"))
