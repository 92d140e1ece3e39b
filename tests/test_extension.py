"""What extension.py says when the module or its library is missing, stale, broken, another. No GPU, no torch."""

import base64
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import deepseek_v4_sm120
from deepseek_v4_sm120.ops.shared import extension

PACKAGE = Path(deepseek_v4_sm120.__file__).parent
MODULE = f"_C{EXTENSION_SUFFIXES[0]}"
FILES = (MODULE, extension.LIBRARY)
# an ELF header, some bytes, and two section headers of 64 bytes at the end; no loader takes it
LIBRARY = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 1000, 0, 64, 56, 0, 64, 2, 1)
LIBRARY = LIBRARY.ljust(1000 + 2 * 64, b"\x00")


@pytest.fixture
def package(tmp_path) -> Path:
    """A mounted folder with the Python files that extension.py needs, and no compiled module."""
    folder = tmp_path / "deepseek_v4_sm120"
    for name in ("__init__.py", "ops/__init__.py", "ops/shared/__init__.py", "ops/shared/extension.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / name, folder / name)
    return folder


def put(package: Path, name: str = MODULE, data: bytes = LIBRARY) -> None:
    """The module and its library, one of them with these bytes."""
    for file in FILES:
        (package / file).write_bytes(data if file == name else LIBRARY)


def ask(package: Path, expression: str) -> str:
    script = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
    script += f"from deepseek_v4_sm120.ops.shared import extension\nprint({expression})"
    done = subprocess.run([sys.executable, "-I", "-c", script], text=True, capture_output=True)
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_missing_module_says_where_it_looked_and_how_to_build(package):
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: deepseek_v4_sm120: no compiled module for Python")
    assert MODULE in said and str(package) in said and "build_docker.sh" in said


def test_module_for_another_python_is_named(package):
    (package / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    said = ask(package, "extension.load()")
    assert "_C.cpython-39-x86_64-linux-gnu.so" in said and "SGLang's images run 3.12" in said and "--python" in said


def test_stale_module_is_refused(package):
    (package / MODULE).touch()
    (package / "build_info.json").write_text('{"version": "0.0.1"}')
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError") and "0.0.1" in said and deepseek_v4_sm120.__version__ in said


@pytest.mark.parametrize("gone", [False, True])
def test_a_checkout_is_told_of_what_its_build_was_made_of_and_it_lacks(package, gone):
    """Of a build without a list of its files nothing is known: that stops no server."""
    built = package.parent / "build" / package.name
    shutil.copytree(package, built)
    (package.parent / "csrc").mkdir()
    put(built)
    (built / "ops/mhc.py").touch()
    if not gone:
        (package / "ops/mhc.py").touch()
    assert ask(package, "extension.stale()") == "None\n"
    written = built.parent / deepseek_v4_sm120.RECORD
    written.parent.mkdir()
    files = [file.relative_to(built.parent) for file in built.rglob("*") if file.is_file()]
    written.write_text("".join(f"{file},{extension._digest(built.parent / file)},1\n" for file in files))
    with open(written, "a") as file:
        file.write(f"{package.name}/ops/wo_a.py,sha25")  # a disk was full
    said = ask(package, "extension.stale()")
    told = f"{package.parent} is a checkout, and its build/ was made of other files than its mhc.py: calls may fail"
    assert said.startswith(told if gone else "None"), said


@pytest.mark.parametrize("recorded", [False, True])
def test_a_module_without_its_library_is_refused(package, recorded):
    (package / MODULE).write_bytes(LIBRARY)
    if recorded:
        record(package)
    for said in (ask(package, "extension.load()"), ask(package, "extension.describe()['problem']")):
        assert f"{package / extension.LIBRARY} is missing: copy the folder" in said


def test_module_that_does_not_load_is_named_with_the_loader_s_words(package):
    put(package)
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: deepseek_v4_sm120: ") and MODULE in said and "does not load: " in said
    assert ask(package, "extension.problem()").strip() == said.removeprefix("ImportError: ")
    assert ask(package, "extension.explain()").strip() == "None"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("data", "words"), [(b"not a library", "is no library"), (LIBRARY[:-1], f"should have {len(LIBRARY)}")]
)
def test_without_a_record_the_file_must_be_complete(package, file, data, words):
    put(package, file, data)
    for said in (ask(package, "extension.load()"), ask(package, "extension.describe()['problem']")):
        assert str(package / file) in said and words in said and "rebuild it" in said


@pytest.mark.parametrize("file", FILES)
def test_half_of_the_real_file_kills_no_process(package, file):
    """Loading it is SIGBUS, which no `except` sees."""
    if extension.find() is None:
        pytest.skip(f"no compiled module to cut: {extension.explain()}")
    for name in FILES:
        shutil.copyfile(extension.find().with_name(name), package / name)
    os.truncate(package / file, (package / file).stat().st_size // 2)
    said = ask(package, "extension.load()")
    assert said.startswith(f"ImportError: deepseek_v4_sm120: {package / file} ") and "it is cut off" in said


def record(package: Path, *names: str) -> Path:
    """RECORD of an artifact that holds these files, as csrc/build_artifact.py writes it; without names, the two."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(LIBRARY).digest()).rstrip(b"=").decode()
    path = package.parent / deepseek_v4_sm120.RECORD
    path.parent.mkdir()
    rows = [f"deepseek_v4_sm120/{name},sha256={digest},{len(LIBRARY)}\n" for name in names or FILES]
    path.write_text("".join([*rows, f"{deepseek_v4_sm120.RECORD},,\n"]))
    return path


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LIBRARY[: len(LIBRARY) // 2], f"has {len(LIBRARY) // 2} bytes"),
        (LIBRARY + b"x", f"has {len(LIBRARY) + 1} bytes"),
        (LIBRARY[:-1] + b"x", "is sha256="),
    ],
)
def test_another_file_than_recorded_is_not_loaded(package, file, data, words):
    put(package, file, data)
    written = record(package)
    for said in (ask(package, "extension.load()"), ask(package, "extension.describe()['problem']")):
        assert str(package / file) in said and words in said and f"{written} says" in said
        assert "copy the folder that the build made again" in said


def test_the_recorded_module_is_loaded(package):
    put(package)
    record(package)
    assert ask(package, "extension.explain()").strip() == "None"
    assert "does not load: " in ask(package, "extension.load()"), "the loader was asked"


def test_a_folder_that_lacks_a_file_of_the_build_is_told(package):
    """As a copy that was cut off does; what pip compiled, which has no digest, may be gone, and what nothing runs."""
    put(package)
    written = record(package, *FILES, "ops/mhc.py")
    with open(written, "a") as rows:
        rows.write("deepseek_v4_sm120/__pycache__/settings.cpython-312.pyc,,\n")
        rows.write(f"{written.parent.name}/licenses/LICENSE,sha256=x,1\n")
    for said in (ask(package, "extension.load()"), ask(package, "extension.describe()['problem']")):
        assert f"{package.parent} lacks deepseek_v4_sm120/ops/mhc.py of {written}: copy the folder" in said
    (package / "ops/mhc.py").touch()
    assert ask(package, "extension.explain()").strip() == "None"


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_the_build_did_not_make(package, file):
    put(package)
    record(package, "_C.cpython-39-x86_64-linux-gnu.so", *(name for name in FILES if name != file))
    said = ask(package, "extension.load()")
    assert f"{package / file} was not made by this build" in said and "RECORD has no such file" in said


def test_a_record_that_cannot_be_read_is_a_sentence(package):
    put(package)
    record(package).write_bytes(b"\xff\xfe\x00")
    assert ask(package, "extension.load()").startswith("ImportError: deepseek_v4_sm120: ")


def test_the_digests_are_made_once(package):
    put(package)
    record(package)
    said = ask(package, "[extension.explain() for _ in range(9)].count(None), extension._damage.cache_info().misses")
    assert said.strip() == "9 2"


def test_describe_opens_no_library(package):
    put(package)
    (package / "build_info.json").write_text(f'{{"version": "{deepseek_v4_sm120.__version__}", "archs": ["120a"]}}')
    said = ask(package, "[extension.describe()[k] for k in ('archs', 'problem')], extension.find().name")
    assert said.strip() == f"[['120a'], None] {MODULE}"


def test_describe_without_a_module(package):
    said = ask(package, "[extension.describe()[k] for k in ('file', 'version', 'problem')]")
    assert said.startswith("[None, None, 'deepseek_v4_sm120: no compiled module")


@pytest.mark.parametrize(
    ("arch", "runs"),
    [("90a", {(9, 0)}), ("120a", {(12, 0)}), ("121a", {(12, 1)}), ("120f", {(12, 0), (12, 1)}), ("121f", {(12, 1)})],
)
def test_where_code_runs(arch, runs):
    """NVIDIA's table of family-specific compatibility."""
    for name in (arch, f"sm_{arch}"):
        assert {c for c in [(8, 9), (9, 0), (10, 0), (12, 0), (12, 1)] if extension.runs_on(name, c)} == runs
