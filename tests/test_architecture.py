"""docs/architecture.md: its pictures name what exists, and its checklists are true of what is there already."""

import ast
import json
import re
from pathlib import Path

import pytest

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.sglang_patches.table import LEDGER

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "deepseek_v4_sm120"
PAGE = (REPO / "docs" / "architecture.md").read_text()
MOST_FILES = 22  # that an operator touches
MOST_OF_A_RELEASE = 2


def checklist(title: str) -> list[str]:
    """The files in the table under that heading."""
    section = PAGE.split(f"### {title}\n", 1)[1].split("\n### ")[0]
    found = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert found, title
    return found


def names(pattern: str, word: str, **values: str) -> bool:
    """Whether the file is there and has the word, in its text or in its name."""
    path = pattern.format(**values)
    said = rf"(?<![A-Za-z0-9]){re.escape(word)}"
    return (REPO / path).is_file() and bool(re.search(said, f"{path} {(REPO / path).read_text()}", re.I))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("file", checklist("An operator"))
def test_every_operator_did_what_the_list_says(op, file):
    assert names(file, op, op=op)


def test_an_operator_touches_few_files():
    assert len(checklist("An operator")) <= MOST_FILES


def test_no_other_list_names_all_operators():
    """A file of the package or of csrc that every operator stands in is one that the next has to be added to."""
    known = {file for file in checklist("An operator") if "{op}" not in file}
    sources = [*PACKAGE.rglob("*.py"), *(REPO / "csrc").rglob("*.cu*"), *(REPO / "csrc").rglob("*.h")]
    all_named = {
        str(path.relative_to(REPO))
        for path in sources
        if all(re.search(rf"(?<![A-Za-z0-9_]){op}(?![A-Za-z0-9])", path.read_text()) for op in OPS)
    }
    assert all_named <= known


def test_a_kernel_variant():
    for file in checklist("A kernel variant"):
        assert names(file, "stacked", op="sparse_decode", variant="stacked"), file


@pytest.mark.parametrize(
    "title, word",
    [
        ("A variable of ours", "DSV4_SM120_UNREVIEWED"),
        ("A default of SGLang's that we change", "prefill_decode_interval"),
    ],
)
def test_a_variable_and_a_default(title, word):
    assert word in PAGE.split(f"### {title}\n", 1)[1].split("|")[0]
    for file in checklist(title):
        assert names(file, word) or names(file, word.replace("_", "-")), file


@pytest.mark.parametrize("release", json.loads(LEDGER.read_text()))
def test_a_release(release):
    files = checklist("A release")
    assert len(files) <= MOST_OF_A_RELEASE
    for file in files:
        assert names(file, release), file


def test_what_the_page_names_exists():
    words = re.findall(r"`((?:[a-z_]+/)+[A-Za-z_{}.]*)`", PAGE) + re.findall(r"^([a-z_]+/) ─", PAGE, re.M)
    assert len(words) > 20
    for word in words:
        if "{" not in word:
            assert any((root / word).exists() for root in (REPO, PACKAGE, PACKAGE / "sglang_patches")), word


def imported(path: Path) -> set[str]:
    """First folders below the package that a module imports, wherever in it."""
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}  # the name may be a folder itself
    return {name.split(".")[1] for name in names if name.startswith("deepseek_v4_sm120.")}


@pytest.mark.parametrize(
    "folder, never",
    [
        ("ops", {"patching", "sglang_patches", "specs", "reference", "commands"}),
        ("patching", {"ops", "specs", "reference"}),
        ("sglang_patches", {"reference"}),
        ("reference", {"patching", "sglang_patches", "specs", "commands"}),
    ],
)
def test_arrows_go_down(folder, never):
    modules = [*(PACKAGE / folder).rglob("*.py")]
    assert len(modules) > 1
    for path in modules:
        assert not imported(path) & never, path


@pytest.mark.parametrize(
    "text",
    [
        "from deepseek_v4_sm120 import specs, OPS",
        "import deepseek_v4_sm120.specs.wo_a as x",
        "def f():\n    from deepseek_v4_sm120.specs import bounds",
    ],
)
def test_an_import_is_seen_however_it_is_written(text, tmp_path):
    (tmp_path / "module.py").write_text(text)
    assert "specs" in imported(tmp_path / "module.py")
