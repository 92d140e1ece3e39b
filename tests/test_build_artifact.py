"""The build's own refusals: each check must be able to fail."""

import subprocess

import build_artifact
import pytest
from build_artifact import REPO, BuildError, KernelUse

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_120a'
ptxas info    : Function properties for _Z1kPf
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {shared} bytes smem
ptxas info    : Compile time = 27.160 ms
"""
SHARED = {"k": 1024}


@pytest.mark.parametrize(
    ("stack", "spills", "shared", "accepted"),
    [(0, 0, 101_376, True), (8, 0, 0, False), (0, 4, 0, False), (0, 0, 101_377, False)],
)
def test_kernel_bounds(stack, spills, shared, accepted):
    uses = build_artifact.read_ptxas(LOG.format(stack=stack, spills=spills, shared=shared))
    assert uses == [KernelUse("_Z1kPf", "120a", 40, stack, 2 * spills, shared)]
    if accepted:
        build_artifact.check_kernels(uses, SHARED)
    else:
        with pytest.raises(BuildError, match="_Z1kPf sm_120a"):
            build_artifact.check_kernels(uses, SHARED)


@pytest.mark.parametrize("shared", [{}, {"k": 101_377}])
def test_dynamic_shared_memory_bound(shared):
    with pytest.raises(BuildError):
        build_artifact.check_kernels([], shared)


def test_interleaved_log_is_refused():
    lines = LOG.format(stack=0, spills=0, shared=0).splitlines()
    with pytest.raises(BuildError, match="begins before"):
        build_artifact.read_ptxas("\n".join([*lines[:2], *lines[1:]]))
    with pytest.raises(BuildError, match="never ended"):
        build_artifact.read_ptxas("\n".join(lines[:4]))


def test_a_kernel_that_spills_is_seen_in_this_compilers_own_log(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __maxnreg__(24) k(float* p) { float a[64];\n"
        "#pragma unroll\nfor (int i = 0; i < 64; i++) a[i] = p[i * 32 + threadIdx.x];\n__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 64; i++) p[i * 64 + threadIdx.x] = a[63 - i] * a[(i * 7) % 64]; }\n"
    )
    toolkit = build_artifact.find_toolkit(None, REPO / ".build-cache")
    command = [
        toolkit.nvcc,
        "-gencode=arch=compute_90a,code=sm_90a",
        "-O3",
        "-Xptxas=-v",
        "-c",
        source,
        "-o",
        tmp_path / "spill.o",
    ]
    log = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    (use,) = build_artifact.read_ptxas(log)
    assert use.arch == "90a" and use.spill_bytes > 0
    with pytest.raises(BuildError):
        build_artifact.check_kernels([use], SHARED)


def test_library_with_a_stranger_in_needed_is_refused(tmp_path):
    library = tmp_path / "lib.so"
    source = tmp_path / "lib.c"
    source.write_text('#include <stdio.h>\nint f(void) { return puts("x"); }\n')
    stranger = tmp_path / "libtorch.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", stranger, source], check=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", library, source, stranger], check=True)
    with pytest.raises(BuildError, match="libtorch.so"):
        build_artifact.check_library(library)


def test_failing_build_leaves_the_earlier_folder(tmp_path):
    out = tmp_path / "build"
    (out / "deepseek_v4_sm120").mkdir(parents=True)
    (out / "earlier").touch()
    with pytest.raises(RuntimeError), build_artifact.published(out) as fresh:
        (fresh / "half").touch()
        raise RuntimeError("the compiler fell over")
    assert [p.name for p in tmp_path.iterdir()] == ["build"]
    assert (out / "earlier").exists() and not (out / "half").exists()
    with build_artifact.published(out) as fresh:
        (fresh / "whole").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["build"]
    assert [p.name for p in out.iterdir()] == ["whole"]


def test_foreign_folder_is_not_replaced(tmp_path):
    (tmp_path / "precious").touch()
    with pytest.raises(BuildError, match="not empty"), build_artifact.published(tmp_path):
        pass
    assert (tmp_path / "precious").exists()


def test_unusable_requests_say_what_was_found(tmp_path):
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho nonsense\n")
    old.chmod(0o755)
    with pytest.raises(BuildError, match="names no release"):
        build_artifact.find_toolkit(str(old), tmp_path)
    with pytest.raises(BuildError, match="does not run"):
        build_artifact.find_interpreters(["/bin/false"])
