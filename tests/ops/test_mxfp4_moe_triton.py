"""The grouped GEMMs without a GPU: results in Triton's interpreter, and what is compiled for sm_120a."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.ops import mxfp4_moe as op
from deepseek_v4_sm120.ops.triton import mxfp4_moe_table as table
from deepseek_v4_sm120.reference.mxfp4_moe import local_experts, tiles
from deepseek_v4_sm120.specs.mxfp4_moe import Shape, routed_ids

INTERPRETED = Path(__file__).with_name("mxfp4_moe_interpreted.py")
MAX_SHARED_BYTES = 101_376
SM120 = 120
BF16_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@functools.cache
def interpreted() -> dict[str, float]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    done = subprocess.run([sys.executable, INTERPRETED], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        "holes, no limit",
        "no expert at all",
        "one expert takes all",
        "row counts at tile edges",
        "repeated within a row",
        "second rank, up first, scaled",
        "map, wide scales",
        "tiles of 64",
    ],
)
def test_interpreted_w4a16(name):
    assert interpreted()[name] < 2e-6


# ---- compiled for sm_120a


def signature_of(kernel, blocks: table.Blocks):
    """(types, constants, divisibility) as the launches pass them."""
    typed = {"x": "*bf16", "h": "*bf16", "y": "*bf16", "limit": "fp32"}
    pointers = dict.fromkeys(("sorted_pairs", "tile_expert", "tile_begin", "tile_end"), "*i32")
    pointers |= dict.fromkeys(("w13", "w13_scale", "w2", "w2_scale"), "*u8") | typed
    constants = {"TOPK": 6, "PRODUCT": "w4a16", "BLOCK_M": blocks.block_m, "BLOCK_N": blocks.block_n}
    constants |= {"BLOCK_K": blocks.block_k, "STAGES": blocks.stages}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name][0] == "*" or types[name] == "i32"
    }
    return types, constants, divisible


@functools.cache
def compiled(gemm: str, blocks: table.Blocks):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deepseek_v4_sm120.ops.triton import mxfp4_moe as kernels

    kernel = {"gate_up": kernels._gate_up_kernel, "down": kernels._down_kernel}[gemm]
    source = ASTSource(kernel, *signature_of(kernel, blocks))
    return triton.compile(source, target=GPUTarget("cuda", SM120, 32), options={"num_warps": blocks.warps})


def resources(ptx: str) -> tuple[int, int]:
    """(registers, bytes spilled) that Triton's own ptxas reports for sm_120a."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(SM120).path, "-v", "--gpu-name=sm_120a", str(source), "-o", str(Path(folder, "out"))]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return int(registers), sum(int(n) for pair in spills for n in pair)


def machine_instructions(cubin: bytes) -> set[str]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"\b([HQO]MMA[.\w]*)", done.stdout))


def configurations() -> list:
    """Every entry of the table for capability 12, and the default."""
    found = set(table.DEFAULT.items()) | {(e.gemm, e.blocks) for e in table.ENTRIES if e.major == 12}
    return sorted(found, key=str)


@pytest.mark.parametrize("gemm, blocks", configurations(), ids=str)
def test_a_configuration_fits_sm_120a_and_uses_the_intended_instructions(gemm, blocks):
    kernel = compiled(gemm, blocks)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= MAX_SHARED_BYTES
    registers, spilled = resources(ptx)
    assert registers <= 255 and spilled == 0
    assert BF16_MMA in ptx and "cp.async" in ptx
    assert not re.search(r"\b(min|max)(\.ftz)?\.f32\b", ptx)  # which give the other operand for a NaN, SwiGLU's limit
    found = machine_instructions(kernel.asm["cubin"])
    assert found and all(name.startswith("HMMA") for name in found), found


# ---- tables and tiles


def test_every_call_finds_blocks():
    for major in (9, 12):
        for pairs_per_expert in (0.1, 3, 100, 1e4):
            up = table.choose(major, "gate_up", pairs_per_expert, 1024, 4096)
            down = table.choose(major, "down", pairs_per_expert, 4096, 1024, block_m=up.block_m)
            assert up.block_m == down.block_m and 128 % up.block_n == 0 and 4096 % down.block_n == 0
    assert table.choose(7, "down", 5, 1, 1) == table.DEFAULT["down"]


@pytest.mark.parametrize("ids, masked", [("uniform", 0.0), ("edges", 0.0), ("one", 0.0), ("uniform", 0.6)])
@pytest.mark.parametrize("block_m", [16, 64, 128])
def test_tiles_hold_every_pair_once(ids, masked, block_m):
    """The specification; the kernels are held against it on the GPU."""
    shape = Shape(70, experts=16, ids=ids, masked=masked)
    local = local_experts(routed_ids(shape, torch.Generator().manual_seed(1)), 16)
    num_whole = op.num_whole_tiles(local.numel(), block_m)
    pairs, table = tiles(local, 16, block_m, num_whole)
    lists = op.cut(table, num_whole, block_m)
    seen = []
    for height, (experts, begins, ends) in lists:
        assert all(part.storage_offset() * part.element_size() % 16 == 0 for part in (experts, begins, ends))
        for expert, begin, end in zip(experts.tolist(), begins.tolist(), ends.tolist(), strict=True):
            if expert < 0:
                continue
            assert 0 < end - begin <= height
            mine = pairs[begin:end].tolist()
            assert {int(local.flatten()[pair]) for pair in mine} == {expert} and mine == sorted(mine)
            seen += mine
    assert sorted(seen) == (local.flatten() >= 0).nonzero().flatten().tolist()


def test_no_routing_needs_more_whole_tiles_than_there_are():
    for block_m in (16, 64, 128):
        least = block_m // 2 + block_m // 4 + 1  # pairs of an expert that make a whole tile
        for experts in (1, 3, 40):
            local = torch.arange(experts).repeat_interleave(least)[:, None]
            num_whole = op.num_whole_tiles(local.numel(), block_m)
            _, (expert, _, _) = tiles(local, experts, block_m, num_whole)
            assert expert[:num_whole].ge(0).sum() == experts and len(expert) == num_whole + 2 * experts
