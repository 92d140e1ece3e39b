#!/usr/bin/env python3
"""The process that sends the load: SGLang's own bench_serving, called with our prompts. Started by
generator_process.py.

Reads the path of a job file a line on stdin, writes the result file named in the job, answers "done" or "failed" and
the path on stdout. What bench_serving prints goes to stderr. It needs the Python that SGLang is installed in, no GPU.

Called of bench_serving (sglang.benchmark.serving, before 0.5.17 sglang.bench_serving): `benchmark`, which schedules and
times the requests, and the request functions under it. Ours: the prompts, the delay of a late request, and a tokenizer
that counts words, because bench_serving counts the answers' tokens a second time; those counts are not used.
The warm-up of bench_serving is off: it would send the first prompt twice, and its prefix would then be in the cache.
Its pause of a second after the warm-up is left out with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path

MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
# every attribute of the global `args` that bench_serving reads on our way, in SGLang 0.5.12 to 0.5.23
ARGUMENTS = {
    "backend": "sglang",
    "cache_report": True,
    "dataset_name": "random-ids",
    "disable_ignore_eos": False,
    "disable_stream": False,
    "goodput": None,
    "header": None,
    "image_count": 0,
    "image_resolution": "",
    "logprob_start_len": -1,
    "mooncake_num_rounds": 1,
    "num_prompts": 0,
    "output_details": False,
    "output_file": os.devnull,
    "plot_throughput": False,
    "print_requests": False,
    "profile_num_steps": None,
    "profile_steps": None,
    "random_input_len": 0,
    "random_output_len": 0,
    "random_range_ratio": 1.0,
    "return_logprob": False,
    "return_routed_experts": False,
    "sharegpt_output_len": None,
    "tag": None,
    "temperature": 0.0,
    "token_ids_logprob": None,
    "top_logprobs_num": 0,
    "top_p": 1.0,
    "warmup_requests": 0,
}
PACKAGES = (
    "sglang",
    "torch",
    "triton",
    "flashinfer_python",
    "sglang-kernel",
    "sgl-kernel",
    "sgl-deep-gemm",
    "transformers",
)
PATHS = {"sglang": "/generate", "sglang-oai": "/v1/completions", "vllm": "/v1/completions"}
KEPT = ("success", "error", "start_time", "ttft", "latency", "itl", "output_len", "cached_tokens", "spec_accept_length")


class WordCounter:
    """Stands in for a tokenizer where bench_serving only counts, and nothing uses the count."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return text.split()


class WithoutPause:
    """The module `time` or `asyncio` as bench_serving sees it, with a sleep that does not sleep."""

    def __init__(self, original, sleep):
        self._original, self.sleep = original, sleep

    def __getattr__(self, name: str):
        return getattr(self._original, name)


async def no_sleep(_seconds: float) -> None:
    """The requests are sent at once (request_rate inf), so that all sleep of bench_serving is that pause."""


def find_module():
    for name in MODULES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a parent package is missing
            found = None
        if found is not None:
            return importlib.import_module(name)
    raise SystemExit(f"load_generator: {sys.executable} has none of {', '.join(MODULES)}: use SGLang's own Python")


_sent = contextvars.ContextVar("position of the request that a task sends")


class Recorder:
    """Wraps a request function of bench_serving: keeps every output whole and in order, and starts a late request its
    delay after all others have their first token or have ended. early: the others' positions, at least one."""

    def __init__(self, request_func, early: set[int]):
        self.request_func, self.outputs = request_func, []
        self.silent, self.all_decode = early, asyncio.Event()

    async def __call__(self, request_func_input, pbar=None):
        position = len(self.outputs)
        self.outputs.append(None)
        _sent.set(position)
        if request_func_input.timestamp:
            await self.all_decode.wait()
            await asyncio.sleep(request_func_input.timestamp)
        try:
            found = await self.request_func(request_func_input=request_func_input, pbar=pbar)
        finally:
            self.heard(position)
        self.outputs[position] = {name: getattr(found, name) for name in KEPT if hasattr(found, name)}
        return found

    def heard(self, position: int) -> None:
        self.silent.discard(position)
        if not self.silent:
            self.all_decode.set()

    def watching(self, outputs: type) -> type:
        """bench_serving's class of outputs, one of which tells us when it learns of its first token."""
        recorder = self

        class Watched(outputs):
            def __setattr__(self, name, value):
                super().__setattr__(name, value)
                if name == "ttft" and value:
                    recorder.heard(_sent.get())

        return Watched


def run_job(module, job: dict) -> dict:
    """job: base_url, backend, model, rows [{prompt, output_tokens, delay_s}], streams, ignore_eos."""
    backend = job["backend"]
    values = {
        **ARGUMENTS,
        "backend": backend,
        "disable_ignore_eos": not job["ignore_eos"],
        "num_prompts": len(job["rows"]),
    }
    module.set_global_args(argparse.Namespace(**values))
    rows = [
        module.DatasetRow(row["prompt"], len(row["prompt"]), row["output_tokens"], timestamp=row["delay_s"] or None)
        for row in job["rows"]
    ]
    original, outputs = module.ASYNC_REQUEST_FUNCS[backend], module.RequestFuncOutput
    recorder = Recorder(original, {i for i, row in enumerate(job["rows"]) if not row["delay_s"]})
    module.ASYNC_REQUEST_FUNCS[backend], module.RequestFuncOutput = recorder, recorder.watching(outputs)
    extra = {"stream_options": {"include_usage": True}} if PATHS[backend] == "/v1/completions" else {}
    failure = None
    try:
        asyncio.run(
            module.benchmark(
                backend=backend,
                api_url=job["base_url"] + PATHS[backend],
                base_url=job["base_url"],
                model_id=job["model"],
                tokenizer=WordCounter(),
                input_requests=rows,
                request_rate=float("inf"),
                max_concurrency=job["streams"],
                disable_tqdm=True,
                lora_names=None,
                lora_request_distribution=None,
                lora_zipf_alpha=None,
                extra_request_body=extra,
                profile=False,
                warmup_requests=0,
            )
        )
    except Exception:  # its closing look at the server fails when that is gone: what was timed is kept, and marked
        failure = traceback.format_exc(limit=3)
    finally:
        module.ASYNC_REQUEST_FUNCS[backend], module.RequestFuncOutput = original, outputs
    found = [one or {"success": False, "error": "never answered"} for one in recorder.outputs]
    return {"outputs": found, "failure": failure}


def versions() -> dict[str, str]:
    """Of this interpreter and of what a server started with it would run on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = find_module()
    fields = {field.name for field in dataclasses.fields(module.RequestFuncOutput)}
    missing = {"success", "error", "start_time", "ttft", "latency", "itl", "output_len"} - fields
    if missing:
        raise SystemExit(f"load_generator: {module.__name__} has no {', '.join(sorted(missing))} in its outputs")
    print("ready", json.dumps({"module": module.__name__, "versions": versions()}), file=answers, flush=True)
    module.time, module.asyncio = WithoutPause(time, lambda _: None), WithoutPause(asyncio, no_sleep)
    for line in sys.stdin:
        path = Path(line.strip())
        try:
            job = json.loads(path.read_text())
            Path(job["result"]).write_text(json.dumps(run_job(module, job)))
            print("done", job["result"], file=answers, flush=True)
        except Exception:
            traceback.print_exc()
            print("failed", path, file=answers, flush=True)


if __name__ == "__main__":
    main()
