"""Opens the built folder, the thing that users mount, with tools that the build does not use."""

import base64
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import build_artifact
import pytest

import deepseek_v4_sm120

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "bench"))
import kernel_report  # noqa: E402

ARTIFACT = REPO / "build"
KNOWN = sorted(f"known_files/{p.name}" for p in (REPO / "deepseek_v4_sm120/sglang_patches/known_files").iterdir())
PACKAGE = ARTIFACT / "deepseek_v4_sm120"
DIST_INFO = f"deepseek_v4_sm120-{deepseek_v4_sm120.__version__}.dist-info"
CUBINS = {"sm_120", "sm_120a", "sm_121a"}  # as cuobjdump names them: sm_120 is 120f
HOPPERS = {"sm_90a"}  # where it was asked for
LIBRARY = PACKAGE / "libdeepseek_v4_sm120.so"
LARGEST_FOLDER, PYTHONS = 20_000_000, 4  # bytes, with modules for 3.10 to 3.13
SECOND_BUILD_SECONDS = 5
SM120_BLOCK_SHARED_BYTES = 99 * 1024
NEWEST_GLIBC = (2, 34)


@pytest.fixture(scope="module")
def info() -> dict:
    assert ARTIFACT.is_dir(), f"{ARTIFACT} is missing: run python3 csrc/build_artifact.py"
    return json.loads((PACKAGE / "build_info.json").read_text())


@pytest.fixture(scope="module")
def modules(info) -> dict[str, Path]:
    found = {version: PACKAGE / name for version, name in info["pythons"].items()}
    assert found
    return found


@pytest.fixture(scope="module")
def binaries(modules) -> list[Path]:
    return [LIBRARY, *modules.values()]


def symbols(path: Path, defined: bool) -> set[str]:
    with path.open("rb") as stream:
        table = elffile().ELFFile(stream).get_section_by_name(".dynsym").iter_symbols()
        return {s.name for s in table if s.name and (s.entry.st_shndx != "SHN_UNDEF") == defined}


def elffile():
    """pyelftools, imported late: the GPU tests are collected with no more than torch and pytest."""
    from elftools.elf import elffile

    return elffile


def cuobjdump(*arguments: str) -> str:
    files = metadata.files("nvidia-cuda-cuobjdump")
    tool = next(f.locate() for f in files if Path(f).name == "cuobjdump")
    nvdisasm = Path(find_spec("triton").origin).parent / "backends/nvidia/bin"  # which -sass calls
    environ = os.environ | {"PATH": f"{nvdisasm}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([tool, *arguments], check=True, text=True, capture_output=True, env=environ).stdout


def interpreter(version: str) -> str:
    """The Python of this version that the build used; found the way the build finds it."""
    found = {i.version: i.path for i in build_artifact.find_interpreters([])}
    if version not in found:
        pytest.skip(f"the artifact has a module for Python {version}, which this machine lacks")
    return found[version]


def run_isolated(python: str, script: str) -> str:
    """-I: nothing of the checkout or of this test environment is on sys.path, only the artifact."""
    command = [python, "-I", "-B", "-c", f"import sys; sys.path.insert(0, {str(ARTIFACT)!r})\n{script}"]
    done = subprocess.run(command, text=True, capture_output=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_what_belongs(info):
    assert {p.name for p in ARTIFACT.iterdir()} == {"sitecustomize.py", "deepseek_v4_sm120", DIST_INFO}
    modules = {f"deepseek_v4_sm120/{name}" for name in (info["library"], *info["pythons"].values())}
    sources = {str(p.relative_to(REPO)) for p in (REPO / "deepseek_v4_sm120").rglob("*.py")} | {"sitecustomize.py"}
    sources |= {f"deepseek_v4_sm120/sglang_patches/{name}" for name in ("reviewed.json", "reads.json", *KNOWN)}
    extra = {"deepseek_v4_sm120/build_info.json"}
    dist = {f"{DIST_INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert {
        str(p.relative_to(ARTIFACT)) for p in ARTIFACT.rglob("*") if p.is_file()
    } == modules | sources | extra | dist
    assert len(sources) > 3
    for source in sources:
        assert (ARTIFACT / source).read_bytes() == (REPO / source).read_bytes(), (
            f"{source}: build/ is older than the checkout"
        )


def test_the_folder_is_small(modules):
    """What it would be with a module for each Python that is served, too."""
    found = sum(path.stat().st_size for path in ARTIFACT.rglob("*"))
    missing = max(PYTHONS - len(modules), 0) * max(path.stat().st_size for path in modules.values())
    assert found + missing <= LARGEST_FOLDER, f"{found} bytes, {missing} more with {PYTHONS} Pythons"


def test_a_second_build_makes_nothing(tmp_path):
    """In processor time: tests run beside each other."""
    command = [sys.executable, build_artifact.__file__, "--out", str(tmp_path / "build")]
    subprocess.run(command, capture_output=True)  # after a commit since the tests' own, for one, there is something
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert not re.findall(r".* s for .*", done.stdout)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= SECOND_BUILD_SECONDS


def test_record_is_true():
    rows = [line.rsplit(",", 2) for line in (ARTIFACT / DIST_INFO / "RECORD").read_text().splitlines()]
    assert {row[0] for row in rows} == {str(p.relative_to(ARTIFACT)) for p in ARTIFACT.rglob("*") if p.is_file()}
    for name, digest, size in rows:
        if name == f"{DIST_INFO}/RECORD":
            continue
        content = (ARTIFACT / name).read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(content)), name


def test_entry_point_is_discoverable():
    script = (
        "from importlib.metadata import distribution, entry_points\n"
        "found = entry_points(group='sglang.srt.plugins', name='deepseek_v4_sm120')\n"
        "print([e.value for e in found], all(callable(e.load()) for e in found))\n"
        "print(distribution('deepseek-v4-sm120').version)"
    )
    out = run_isolated(sys.executable, script).splitlines()
    assert out == ["['deepseek_v4_sm120.patching:install'] True", deepseek_v4_sm120.__version__]


def test_needs_only_common_libraries(binaries):
    allowed = {
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    }
    allowed |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    for path in binaries:
        with path.open("rb") as stream:
            elf = elffile().ELFFile(stream)
            dynamic = list(elf.get_section_by_name(".dynamic").iter_tags())
            needed = {tag.needed for tag in dynamic if tag.entry.d_tag == "DT_NEEDED"}
            assert "libc.so.6" in needed
            own = set() if path == LIBRARY else {LIBRARY.name}
            assert own <= needed <= allowed | own, path.name
            searched = [(t.entry.d_tag, t.rpath) for t in dynamic if t.entry.d_tag == "DT_RPATH"]
            assert searched == ([("DT_RPATH", "$ORIGIN")] if own else []), path.name
            assert not [tag for tag in dynamic if tag.entry.d_tag == "DT_RUNPATH"], f"{path.name}: LD_LIBRARY_PATH wins"
            versions = {
                aux.name
                for section in elf.iter_sections()
                if section.name == ".gnu.version_r"
                for _, auxiliaries in section.iter_versions()
                for aux in auxiliaries
            }
        glibc = {tuple(map(int, v.removeprefix("GLIBC_").split("."))) for v in versions if v.startswith("GLIBC_2")}
        assert glibc
        assert max(glibc) <= NEWEST_GLIBC, path.name


def test_exports_only_what_is_meant(modules):
    """A cudart symbol that is exported could be taken by torch's libcudart, or take its place."""
    asked = {version: {s for s in symbols(path, False) if "dsv4" in s} for version, path in modules.items()}
    assert all(names == symbols(LIBRARY, True) for names in asked.values())
    assert all(name.startswith(("_ZN4dsv4", "_ZNK4dsv4")) for name in symbols(LIBRARY, True))
    for path in modules.values():
        assert symbols(path, True) == {"PyInit__C"}, path.name
    for path in (LIBRARY, *modules.values()):
        assert not [name for name in symbols(path, False) if re.match(r"_*cu[A-Z]|_*cuda", name)], path.name


def test_the_kernels_are_in_the_library_alone(modules, info):
    """Only the intended cubins, all of them told, compressed, and no PTX."""
    listed = re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("--list-elf", str(LIBRARY)))
    assert set(listed) - HOPPERS == CUBINS
    assert {f"sm_{arch}".replace("120f", "120") for arch in info["archs"]} == set(listed)
    assert {kernel["arch"] for kernel in info["kernels"]} == set(info["archs"])
    assert {f"sm_{arch}" for arch in info["archs"]} | HOPPERS == set(kernel_report.LIMITS)
    assert not re.findall(r"\.ptx\b", cuobjdump("--list-ptx", str(LIBRARY)))
    for path in (LIBRARY, *modules.values()):
        with path.open("rb") as stream:
            section = elffile().ELFFile(stream).get_section_by_name(".nv_fatbin")
            assert (section is not None) == (path == LIBRARY), path.name


def test_kernels_use_what_the_build_reported(info):
    """cuobjdump on the library against ptxas's report: no stack, no local memory, bounded shared memory."""
    reported = {(k["arch"], k["registers"], k["stack_bytes"], k["static_shared_bytes"]) for k in info["kernels"]}
    assert not [k for k in info["kernels"] if k["stack_bytes"] or k["spill_bytes"]]
    seen, arch, count = set(), None, 0
    for line in cuobjdump("--dump-resource-usage", str(LIBRARY)).splitlines():
        if found := re.search(r"arch = sm_(\w+)", line):
            arch = found[1]
        if found := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, found.groups())
            assert stack == 0 and local == 0, f"sm_{arch}: {line.strip()}"
            assert shared <= SM120_BLOCK_SHARED_BYTES
            seen.add((arch, registers, stack, shared))
            count += 1
    assert count == len(info["kernels"]) > 0
    assert {s[0] for s in seen} == {r[0] for r in reported}
    assert {s[:3] for s in seen} == {r[:3] for r in reported}


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_imports_where_it_was_built_for(version, info):
    if version not in info["pythons"]:
        pytest.skip(f"not built for Python {version}")
    script = (
        "import json\n"
        "from deepseek_v4_sm120.ops.shared import extension\n"
        "shared = extension.load().kernel_shared_bytes()\n"
        "loaded = {m.split()[-1] for m in open('/proc/self/maps') if 'libdeepseek_v4_sm120' in m}\n"
        "try:\n    kernels = len(extension.load().kernel_attributes())\n"
        "except RuntimeError as error:\n    kernels = str(error)\n"
        "found = [extension.build_info(), shared, extension.describe(), 'torch' in sys.modules, [*loaded], kernels]\n"
        "print(json.dumps(found))"
    )
    built, shared, described, torch_loaded, loaded, kernels = json.loads(run_isolated(interpreter(version), script))
    assert built == {key: info[key] for key in ("version", "git_commit", "cuda_version", "archs")} | {"python": version}
    assert built["version"] == deepseek_v4_sm120.__version__
    assert shared == info["shared_bytes"]
    assert shared and max(shared.values()) <= SM120_BLOCK_SHARED_BYTES
    assert described["problem"] is None and described["archs"] == info["archs"]
    assert Path(described["file"]) == PACKAGE / info["pythons"][version]
    assert loaded == [str(LIBRARY)]
    # without a GPU the library throws and the module catches
    assert re.search(r": cuda\w+ failed: ", kernels) if isinstance(kernels, str) else kernels > 0
    assert not torch_loaded


def test_serves_the_python_of_sglang(info):
    if "3.12" not in info["pythons"]:
        pytest.skip("this machine has no Python 3.12 with headers; ./build_docker.sh with Docker builds for it")
    assert info["pythons"]["3.12"].startswith("_C.cpython-312-")
