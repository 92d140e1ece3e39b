#!/usr/bin/env python3
"""Registers, shared memory, occupancy and the main loop's SASS of every kernel in the built library. Needs no GPU.

    python3 bench/kernel_report.py [--arch sm_120f] [--cuobjdump PATH]

The main loop is the innermost backward branch whose body holds the most tensor-core instructions. Occupancy is worked
out from the chip's limits, the block size in the binary and the shared memory that the launch asks for, where the
module tells it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import needs_torch  # noqa: F401

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.ops.shared import extension  # noqa: E402

REGISTERS_PER_SM = 65_536
RESERVED_SHARED = 1024  # per block
OF_SM120 = (48, 100 * 1024)
# warps and bytes of shared memory of an SM; sm_120a and sm_121a: the kernels that are not compiled for the family
LIMITS = {"sm_90a": (64, 228 * 1024), "sm_120f": OF_SM120, "sm_120a": OF_SM120, "sm_121a": OF_SM120}

CLASSES = (
    ("tensor", r"[HQIO]?MMA|HGMMA|QMMA"),
    ("ldmatrix", r"LDSM"),
    ("ld/st shared", r"LDS|STS|STSM"),
    ("ld/st global", r"LDG|STG|LDGSTS|UBLKCP|LD|ST|ATOMG?|REDG?|CCTL"),
    ("convert", r"F2FP|F2F|I2F\w*|F2I\w*|PRMT|HADD2"),
    ("special", r"MUFU"),
    ("float", r"FFMA2?|FMUL2?|FADD2?|FMNMX3?|FSEL|FSETP|HFMA2|HMUL2|HMNMX2"),
    ("shuffle", r"SHFL|VOTE\w*|REDUX|MATCH"),
    ("barrier", r"BAR|SYNCS|WARPSYNC|DEPBAR|LDGDEPBAR|MEMBAR|ERRBAR|BSYNC|BSSY|ACQBULK|PREEXIT|FENCE"),
    ("branch", r"BRA|EXIT|CALL|RET|JMP|BRX|BREAK|NANOSLEEP"),
    (
        "integer",
        r"U?IMAD|U?IADD3?|U?LOP3|U?SHF|U?ISETP|U?LEA|U?MOV|U?SEL|U?IMNMX|VIMNMX|U?PRMT|LDCU?|ULDC|S2U?R|CS2R|R2U?R",
    ),
)
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*)")


@dataclass
class Kernel:
    """One kernel of one architecture, as disassembled."""

    arch: str
    name: str
    registers: int
    threads: int
    instructions: list[tuple[int, str, str]]  # address, opcode, operands

    def main_loop(self) -> list[tuple[int, str, str]]:
        """Instructions of the innermost loop with the most tensor-core work; empty without one."""
        loops = []
        for address, opcode, operands in self.instructions:
            target = re.search(r"\b0x([0-9a-f]+)\b", operands)
            if opcode == "BRA" and target and int(target[1], 16) < address:
                loops.append((int(target[1], 16), address))
        counts = {loop: self._tensor_between(*loop) for loop in loops}
        inner = [
            loop
            for loop in loops
            if counts[loop] and not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] and counts[o] for o in loops)
        ]
        if not inner:
            return []
        start, end = max(inner, key=lambda loop: (counts[loop], loop[0] - loop[1]))
        return [one for one in self.instructions if start <= one[0] <= end]

    def _tensor_between(self, start: int, end: int) -> int:
        return sum(start <= address <= end and class_of(opcode) == "tensor" for address, opcode, _ in self.instructions)

    def blocks_per_sm(self, shared_bytes: int) -> int:
        warps, shared = LIMITS[self.arch]
        warps_per_block = self.threads // 32
        registers_per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = REGISTERS_PER_SM // (registers_per_warp * warps_per_block)
        return min(warps // warps_per_block, shared // (shared_bytes + RESERVED_SHARED), by_registers)


def class_of(opcode: str) -> str:
    return next((name for name, pattern in CLASSES if re.fullmatch(pattern, opcode)), "other")


def packaged(package: str, tool: str) -> str | None:
    """A tool that a package of this Python brings."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(one.locate()) for one in files if Path(one).name == tool), None)


def find_tool(name: str, asked: str | None = None) -> str:
    found = shutil.which(asked) if asked else packaged(f"nvidia-cuda-{name}", name) or shutil.which(name)
    found = found or (None if asked else packaged("triton", name))
    if found is None:
        raise SystemExit(f"no program {asked}" if asked else f"no {name}: pip install nvidia-cuda-{name}")
    return found


def short_name(mangled: str) -> str:
    """_ZN..20sparse_decode_kernelILi2ELb1EEEv.. -> sparse_decode_kernel<2,1>"""
    rest, name = mangled.removeprefix("_ZN"), mangled
    while length := re.match(r"\d+", rest):  # length-prefixed parts; the last is the kernel
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    arguments = re.match(r"I((?:L\w\d+E)+)E", rest)
    values = re.findall(r"L\w(\d+)E", arguments[1]) if arguments else []
    return name + (f"<{','.join(values)}>" if values else "")


def of_arch(listing: str, arch: str) -> str:
    """What cuobjdump tells of the code for `arch`: asked for sm_120a it brings sm_120f's, too, and the other way."""
    parts = re.split(r"^Fatbin elf code:\n", listing, flags=re.M)[1:]
    of_it = [part for part in parts if f"\narch = {arch}\n" in f"\n{part}"]
    if not of_it:
        raise SystemExit(f"the library has no code for {arch}")
    return "".join(of_it)


def disassemble(tool: str, library: Path, arch: str) -> list[Kernel]:
    nvdisasm = Path(find_tool("nvdisasm"))  # which cuobjdump -sass calls
    environ = os.environ | {"PATH": os.pathsep.join([str(nvdisasm.parent), os.environ.get("PATH", "")])}

    def ask(*what: str) -> str:
        command = [tool, *what, "-arch", arch, str(library)]
        done = subprocess.run(command, env=environ, text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(f"{tool} {' '.join(what)} failed: {done.stderr.strip()}")
        return of_arch(done.stdout, arch)

    usage = ask("--dump-resource-usage")
    registers = dict(re.findall(r"Function (\S+):\s*\n\s*REG:(\d+)", usage))
    threads = {}
    for part in re.split(r"\n\.nv\.info\.", ask("-elf"))[1:]:
        found = re.search(r"EIATTR_MAX_THREADS\s*\n.*\n\s*Value:\s*0x([0-9a-f]+) 0x([0-9a-f]+) 0x([0-9a-f]+)", part)
        if found:
            x, y, z = (int(value, 16) for value in found.groups())
            threads[part.split()[0]] = x * y * z
    kernels = []
    for part in ask("-sass").split("Function : ")[1:]:
        name = part.split()[0]
        code = [(int(a, 16), opcode, operands) for a, opcode, operands in INSTRUCTION.findall(part)]
        kernels.append(Kernel(arch, short_name(name), int(registers[name]), threads.get(name, 1024), code))
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=LIMITS, help="default: all")
    parser.add_argument("--cuobjdump", help="path of the tool")
    arguments = parser.parse_args()
    if (problem := extension.explain()) is not None:
        raise SystemExit(problem)
    tool, shared = find_tool("cuobjdump", arguments.cuobjdump), extension.load().kernel_shared_bytes()
    classes = [name for name, _ in CLASSES] + ["other"]
    lines = []
    for arch in arguments.arch or LIMITS:
        for kernel in disassemble(tool, extension.find().with_name(extension.LIBRARY), arch):
            bytes_shared = shared.get(kernel.name.split("<")[0])  # of those that the module tells
            blocks = "" if bytes_shared is None else str(kernel.blocks_per_sm(bytes_shared))
            loop = kernel.main_loop()
            counts = Counter(class_of(opcode) for _, opcode, _ in loop)
            cells = [arch, kernel.name, str(kernel.registers), str(kernel.threads)]
            cells += ["" if bytes_shared is None else str(bytes_shared), blocks]
            cells += [str(len(kernel.instructions)), str(len(loop))]
            lines.append((*cells, *(str(counts[name]) for name in classes)))
    header = ("arch", "kernel", "regs", "threads", "shared", "blocks/SM", "SASS", "loop", *classes)
    print(common.table(header, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
