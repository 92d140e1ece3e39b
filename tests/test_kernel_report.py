"""bench/kernel_report.py: names, main loop and occupancy, from made-up listings."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "bench"))

from kernel_report import INSTRUCTION, Kernel, class_of, disassemble, find_tool, of_arch, short_name  # noqa: E402

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x37c]     ?trans1;           /* 0x1 */
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0030*/               @P0 BRA 0x30 ;
        /*0040*/                   LDSM.16.M88.4 R8, [R3] ;
        /*0050*/                   HMMA.16816.F32 R4, R8, R6, R4 ;
        /*0060*/              @!P1 HMMA.16816.F32 R4, R8, R6, R4 ;
        /*0070*/                   MUFU.EX2 R9, R9 ;
        /*0080*/               @P1 BRA 0x40 ;
        /*0090*/               @P2 BRA 0x10 ;
        /*00a0*/                   EXIT ;
"""


def kernel(**changes) -> Kernel:
    code = [(int(address, 16), opcode, operands) for address, opcode, operands in INSTRUCTION.findall(LISTING)]
    return Kernel(**{"arch": "sm_120a", "name": "k", "registers": 128, "threads": 256, "instructions": code, **changes})


def test_names():
    mangled = "_ZN4dsv413sparse_decode20sparse_decode_kernelILi2ELb1EEEvNS0_6ParamsE"
    assert short_name(mangled) == "sparse_decode_kernel<2,1>"
    assert short_name("plain_kernel") == "plain_kernel"


def test_main_loop_is_the_innermost_with_tensor_work():
    assert len(kernel().instructions) == 11
    assert [class_of(opcode) for _, opcode, _ in kernel().main_loop()] == [
        "ldmatrix",
        "tensor",
        "tensor",
        "special",
        "branch",
    ]
    assert kernel(instructions=kernel().instructions[:2]).main_loop() == []


def test_occupancy_is_the_tightest_limit():
    assert kernel().blocks_per_sm(49_152) == 2  # registers 2, shared memory 2
    assert kernel(registers=64).blocks_per_sm(49_152) == 2
    assert kernel().blocks_per_sm(101_376) == 1
    assert kernel(registers=32, threads=512).blocks_per_sm(1024) == 3  # warps


def test_cuobjdump_finds_the_nvdisasm_that_it_calls(tmp_path, monkeypatch):
    """Here Triton's, which is on nobody's PATH."""
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        f"#!{shutil.which('bash')}\n"
        "type -P nvdisasm >/dev/null || { echo 'Could not find nvdisasm' >&2; exit 1; }\n"
        "echo 'Fatbin elf code:'; echo 'arch = sm_120a'; echo 'Function k:'; echo ' REG:7'\n"
        "echo 'Function : k'; echo '/*0000*/ EXIT ;'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    (found,) = disassemble(str(tool), tmp_path / "library", "sm_120a")
    assert (found.name, found.registers, found.instructions[0][1]) == ("k", 7, "EXIT")


@pytest.mark.parametrize(("asked", "words"), [("/nowhere", "no program /nowhere"), (None, "pip install nvidia-cuda-x")])
def test_a_tool_that_is_not_there_is_one_sentence(asked, words):
    with pytest.raises(SystemExit, match=words):
        find_tool("x", asked)


def test_a_kernel_is_reported_as_of_the_architecture_that_it_is_compiled_for():
    """cuobjdump's answer to -arch sm_120a has the family's code as well."""
    part = "\nFatbin elf code:\n================\narch = {arch}\ncode version = [1,8]\n\n\t\tFunction : {name}\n"
    listing = "".join(
        part.format(arch=a, name=n) for a, n in (("sm_120f", "few"), ("sm_120a", "many"), ("sm_120f", "b"))
    )
    for arch, names in (("sm_120a", ["many"]), ("sm_120f", ["few", "b"])):
        assert [one.split()[0] for one in of_arch(listing, arch).split("Function : ")[1:]] == names
    with pytest.raises(SystemExit, match="no code for sm_121a"):
        of_arch(listing, "sm_121a")
