"""What may hang or end a process, each in one of its own: `mhc_side_by_side.py CASE`, by test_mhc_residency_gpu.py.

Prints "right", or what was wrong. A GPU that does not come back within PATIENCE_S ends the process with status 3.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.mhc import mhc
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension
from deepseek_v4_sm120.specs.mhc import Shape, make_inputs

PATIENCE_S = 60.0
ROWS, CALLS = 12, 85  # with a ring of 16 MiB, two graphs of 85 such calls had the same words, call by call
REPLAYS = 300


def wait(what: str) -> None:
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + PATIENCE_S
    while not event.query():
        if time.monotonic() > deadline:
            print(f"{what}: no end within {PATIENCE_S:g} s", flush=True)
            os._exit(3)
        time.sleep(0.001)


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def two_graphs() -> str:
    """Started by one event, a little apart by turns, so that their calls meet."""
    inputs = [make_inputs(Shape(ROWS), seed=seed, device="cuda") for seed in range(2)]
    expected = [mhc(**one.boundary(), kernels="split") for one in inputs]
    mhc(**inputs[0].boundary())
    wait("a first call")
    graphs, found = [torch.cuda.CUDAGraph() for _ in inputs], []
    for graph, one in zip(graphs, inputs, strict=True):
        with torch.cuda.graph(graph):
            found.append([mhc(**one.boundary()) for _ in range(CALLS)])
    streams = [torch.cuda.Stream() for _ in graphs]
    for turn in range(REPLAYS):
        torch.cuda._sleep(400_000)  # 0.2 ms: both are queued before either starts
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[turn % 2]):  # either one is late: calls that shared words were a call apart
            torch.cuda._sleep(1 + 300 * (turn // 2 % 100))
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        wait(f"replay {turn} of two graphs")
        wrong = [i for i in range(2) for call in found[i] if not equal(call, expected[i])]
        if wrong:
            return f"replay {turn}: {wrong.count(0)} and {wrong.count(1)} of {CALLS} calls have other bits"
    return "right"


def out_of_patience(rows: int) -> str:
    """A wait that gives up before its first look: no call after it succeeds."""
    module = extension.load()

    class Impatient:
        def __getattr__(self, name):
            return getattr(module, name)

        def mhc(self, **arguments):
            module.mhc(**arguments, patience=0)

    inputs = make_inputs(Shape(rows), device="cuda")
    wait("inputs")
    extension.load = Impatient
    mhc(**inputs.boundary())
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"stopped: {str(error).splitlines()[0]}"
    return "nobody gave up"


def green_stream(sms: int) -> tuple[int, int]:
    """(raw stream of a green context with at least so many multiprocessors, how many it has)"""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments) -> None:
        if error := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA driver error {error}")

    torch.zeros(1, device="cuda")
    device, groups = ctypes.c_int(), ctypes.c_uint(1)
    whole, part, rest = (ctypes.create_string_buffer(1024) for _ in range(3))  # CUdevResource: 144 bytes
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
    call("cuDeviceGetDevResource", device, whole, 1)
    call("cuDevSmResourceSplitByCount", part, ctypes.byref(groups), whole, rest, 0, ctypes.c_uint(sms))
    call("cuDevResourceGenerateDesc", ctypes.byref(description), part, 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, device, 1)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, 1, 0)
    return stream.value, ctypes.c_uint.from_buffer(part, 96).value


def green_context(sms: int) -> str:
    """Eager and captured calls on a stream with few multiprocessors, at rows where all kernels would be taken."""
    raw, has = green_stream(sms)
    index = torch.cuda.current_device()
    if not sms <= has < cuda_tensors.num_sms(index):
        return f"asked for {sms} multiprocessors, got {has}"
    if (told := cuda_tensors.stream_sms(index, raw)) != has:
        return f"stream_sms says {told}, the green context has {has}"
    if (told := cuda_tensors.stream_sms(index, torch.cuda.current_stream().cuda_stream)) != cuda_tensors.num_sms(index):
        return f"stream_sms says {told} of a plain stream"
    stream = torch.cuda.ExternalStream(raw)
    for rows in (1, 12, 2 * has - 1, 128, 300, 3000):
        inputs = make_inputs(Shape(rows), seed=rows, device="cuda")
        expected = mhc(**inputs.boundary(), kernels="split")
        wait("inputs")
        with torch.cuda.stream(stream):
            found = [mhc(**inputs.boundary()) for _ in range(3)]
            wait(f"{rows} rows on {has} multiprocessors")
        if not all(equal(one, expected) for one in found):
            return f"{rows} rows on {has} multiprocessors: other bits"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = [mhc(**inputs.boundary()) for _ in range(3)]
        with torch.cuda.stream(stream):
            graph.replay()
            wait(f"{rows} rows captured on {has} multiprocessors")
        if not all(equal(one, expected) for one in captured):
            return f"{rows} rows captured on {has} multiprocessors: other bits"
    return "right"


def shared_card() -> str:
    """Of a client of the multi-process service: kernels that begin block by block, with the bits that they have."""
    inputs = make_inputs(Shape(725), device="cuda")
    if not extension.load().mhc_card_is_shared():
        return "nobody says that the card is shared"
    chosen = op._kernels_of(725, 4096, True, cuda_tensors.num_sms(0), 0)
    found, expected = mhc(**inputs.boundary()), mhc(**inputs.boundary(), kernels=chosen)
    wait("a boundary")
    return "right" if chosen == "split" and equal(found, expected) else f"{chosen}, same bits: {equal(found, expected)}"


CASES = {
    "shared-card": shared_card,
    "two-graphs": two_graphs,
    "fused-out-of-patience": lambda: out_of_patience(12),
    "many-out-of-patience": lambda: out_of_patience(300),
    "green-8": lambda: green_context(8),
    "green-24": lambda: green_context(24),
}

if __name__ == "__main__":
    print(CASES[sys.argv[1]](), flush=True)
