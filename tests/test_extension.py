"""What extension.py says when the compiled module is missing, for another Python, stale or broken. No GPU, no torch."""

import base64
import hashlib
import shutil
import struct
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import deepseek_v4_sm120
from deepseek_v4_sm120 import extension

PACKAGE = Path(deepseek_v4_sm120.__file__).parent
MODULE = f"_C{EXTENSION_SUFFIXES[0]}"
# an ELF header, some bytes, and two section headers of 64 bytes at the end; no loader takes it
LIBRARY = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 1000, 0, 64, 56, 0, 64, 2, 1)
LIBRARY = LIBRARY.ljust(1000 + 2 * 64, b"\x00")


@pytest.fixture
def package(tmp_path) -> Path:
    """A mounted folder with the Python files that extension.py needs, and no compiled module."""
    folder = tmp_path / "deepseek_v4_sm120"
    folder.mkdir()
    for name in ("__init__.py", "extension.py"):
        shutil.copyfile(PACKAGE / name, folder / name)
    return folder


def ask(package: Path, expression: str) -> str:
    script = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
    script += f"from deepseek_v4_sm120 import extension\nprint({expression})"
    done = subprocess.run([sys.executable, "-I", "-c", script], text=True, capture_output=True)
    return done.stdout if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_missing_module_says_where_it_looked_and_how_to_build(package):
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: deepseek_v4_sm120: no compiled module for Python")
    assert MODULE in said and str(package) in said and "build_docker.sh" in said


def test_module_for_another_python_is_named(package):
    (package / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    said = ask(package, "extension.load()")
    assert "_C.cpython-39-x86_64-linux-gnu.so" in said and "--python" in said


def test_stale_module_is_refused(package):
    (package / MODULE).touch()
    (package / "build_info.json").write_text('{"version": "0.0.1"}')
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError") and "0.0.1" in said and deepseek_v4_sm120.__version__ in said


def test_module_that_does_not_load_is_named_with_the_loader_s_words(package):
    (package / MODULE).write_bytes(LIBRARY)
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: deepseek_v4_sm120: ") and MODULE in said and "does not load: " in said


@pytest.mark.parametrize(
    ("data", "words"), [(b"not a library", "is no library"), (LIBRARY[:-1], f"should have {len(LIBRARY)}")]
)
def test_without_a_record_the_file_must_be_complete(package, data, words):
    (package / MODULE).write_bytes(data)
    for said in (ask(package, "extension.load()"), ask(package, "extension.describe()['problem']")):
        assert MODULE in said and words in said and "rebuild it" in said


def test_half_of_the_real_module_kills_no_process(package):
    """Loading it is SIGBUS, which no `except` sees."""
    if extension.find() is None:
        pytest.skip(f"no compiled module to cut: {extension.explain()}")
    with open(extension.find(), "rb") as whole:
        (package / MODULE).write_bytes(whole.read(extension.find().stat().st_size // 2))
    said = ask(package, "extension.load()")
    assert said.startswith("ImportError: ") and "it is cut off" in said


def record(package: Path, name: str = MODULE, data: bytes = LIBRARY) -> Path:
    """RECORD of an artifact that holds this one file, as csrc/build_artifact.py writes it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    info = package.parent / f"deepseek_v4_sm120-{deepseek_v4_sm120.__version__}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"deepseek_v4_sm120/{name},sha256={digest},{len(data)}\n{info.name}/RECORD,,\n")
    return info / "RECORD"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LIBRARY[: len(LIBRARY) // 2], f"has {len(LIBRARY) // 2} bytes"),
        (LIBRARY + b"x", f"has {len(LIBRARY) + 1} bytes"),
        (LIBRARY[:-1] + b"x", "is sha256="),
    ],
)
def test_another_module_than_recorded_is_not_loaded(package, data, words):
    (package / MODULE).write_bytes(data)
    written = record(package)
    for said in (ask(package, "extension.load()"), ask(package, "extension.describe()['problem']")):
        assert str(package / MODULE) in said and words in said and f"{written} says" in said
        assert "copy the folder that the build made again" in said


def test_the_recorded_module_is_loaded(package):
    (package / MODULE).write_bytes(LIBRARY)
    record(package)
    assert ask(package, "extension.explain()").strip() == "None"
    assert "does not load: " in ask(package, "extension.load()"), "the loader was asked"


def test_a_module_that_the_build_did_not_make(package):
    (package / MODULE).write_bytes(LIBRARY)
    record(package, name="_C.cpython-39-x86_64-linux-gnu.so")
    said = ask(package, "extension.load()")
    assert "was not made by this build" in said and "RECORD has no such file" in said


def test_a_record_that_cannot_be_read_is_a_sentence(package):
    (package / MODULE).write_bytes(LIBRARY)
    record(package).write_bytes(b"\xff\xfe\x00")
    assert ask(package, "extension.load()").startswith("ImportError: deepseek_v4_sm120: ")


def test_the_digest_is_made_once(package):
    (package / MODULE).write_bytes(LIBRARY)
    record(package)
    said = ask(package, "[extension.explain() for _ in range(9)].count(None), extension._damage.cache_info().misses")
    assert said.strip() == "9 1"


def test_describe_opens_no_library(package):
    (package / MODULE).write_bytes(LIBRARY)
    (package / "build_info.json").write_text(f'{{"version": "{deepseek_v4_sm120.__version__}", "archs": ["120a"]}}')
    said = ask(package, "[extension.describe()[k] for k in ('archs', 'problem')], extension.find().name")
    assert said.strip() == f"[['120a'], None] {MODULE}"


def test_describe_without_a_module(package):
    said = ask(package, "[extension.describe()[k] for k in ('file', 'version', 'problem')]")
    assert said.startswith("[None, None, 'deepseek_v4_sm120: no compiled module")
