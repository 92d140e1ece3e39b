"""The layout: one name per operator in every layer, nothing in a layer that is no operator, sizes one can read."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.conftest import LONGEST, TOGETHER, WAITING

REPO = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_README_LINES, MAX_README_COLUMNS = 180, 160
MAX_CONTENTS_LINES, MAX_PROSE_COLUMNS = 30, 140  # of docs/notes/README.md; of a page by hand, but for its tables

LAYERS = (
    "csrc/{op}/bindings.h",
    "csrc/{op}/launch.cu",
    "csrc/{op}/{op}.h",
    "deepseek_v4_sm120/sglang_patches/adapters/{op}.py",
    "deepseek_v4_sm120/ops/{op}.py",
    "deepseek_v4_sm120/reference/{op}.py",
    "deepseek_v4_sm120/specs/{op}.py",
    "tests/adapters/test_{op}.py",
    "tests/ops/test_{op}_gpu.py",
    "tests/ops/test_{op}_reference.py",
    "bench/{op}.py",
    "docs/notes/{op}.md",
)
# files of an operator's layer that belong to none
SHARED = {
    "deepseek_v4_sm120/reference": {"accuracy", "draft_block", "kv_pages", "model"},
    "deepseek_v4_sm120/specs": {"bounds", "check", "provider"},
    "deepseek_v4_sm120/sglang_patches/adapters": {
        *(
            "argument_defaults",
            "dense_rows",
            "direct_updates",
            "greedy_argmax",
            "halves_trial",
            "handed_over",
            "kept_weights",
            "platform_seams",
            "prefill_graphs",
            "prompt_passes",
            "halves_in_graphs",
            "prompts_in_halves",
            "sampling",
            "scheduling",
            "step_tables",
            "torch_compile",
            "turns",
            "waiting",
        ),
    },
    "bench": {
        *(
            "common",
            "features",
            "host_time",
            "kernel_report",
            "layer",
            "load_time",
            "measured",
            "needs_torch",
            "prompt_sums",
            "sparse_prefill",
        ),
        "timeline",
    },
}
# the end-to-end client: it must run wherever Python does, so these import nothing but the standard library and each
# other; SGLang (the load generator's process) and matplotlib (the plots) are looked for when they are needed
CLIENT_FOLDERS = ("bench/serving", "bench/quality")
# of the package, what the client shares with it: these need the standard library only, too
CLIENT_SHARES = (
    *("deepseek_v4_sm120.commands.disclosure", "deepseek_v4_sm120.commands.ending"),
    *("deepseek_v4_sm120.patching.json_file", "deepseek_v4_sm120.patching.lifetime"),
)
# of bench/quality, what is no gate
NO_GATE = {
    *("corruption_marks", "gates", "greedy", "in_flight", "saved", "server_load", "soak_state", "verdict", "whole"),
}
# patches that nobody has to know by name: parts of an operator or a setting, and what validation alone has
UNTOLD = {
    *("argument_defaults", "marlin_on_sm120", "prefill_interval", "sched_meta", "sm120_seams", "sparse_decode_hopper"),
    *("reproducible_arguments", "reproducible_head", "reproducible_sampling"),
}
# names that say nothing of a file's contents
VAGUE = {"utils", "util", "helpers", "misc", "tools", "lib"}


@functools.cache
def files(*patterns: str) -> tuple[Path, ...]:
    """The repository's own files that match, never none."""
    folders = ("bench", "csrc", "deepseek_v4_sm120", "tests")
    found = [path for folder in folders for pattern in patterns for path in (REPO / folder).rglob(pattern)]
    assert found, f"{patterns} match nothing under {folders}"
    return tuple(sorted(path for path in found if "__pycache__" not in path.parts))


def test_there_are_operators():
    assert OPS and len(set(OPS)) == len(OPS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_has_the_operator(op, layer):
    assert (REPO / layer.format(op=op)).is_file()


@pytest.mark.parametrize("op", OPS)
def test_the_operator_is_public_and_patched(op):
    assert op in {patch.name for patch in TABLE.patches}
    for layer in ("ops", "reference"):
        tree = ast.parse((REPO / "deepseek_v4_sm120" / layer / f"{op}.py").read_text())
        assert op in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, layer


@pytest.mark.parametrize(
    "folder",
    [*(f"deepseek_v4_sm120/{layer}" for layer in ("ops", "reference", "sglang_patches/adapters", "specs")), "bench"],
)
def test_a_layer_holds_operators_only(folder):
    """A module is an operator's, or starts with its name (mxfp4_moe_cases), or is shared and said to be."""
    stems = {path.stem for path in (REPO / folder).glob("*.py")} - {"__init__"}
    assert stems >= set(OPS)
    strangers = {stem for stem in stems if not any(stem == op or stem.startswith(f"{op}_") for op in OPS)}
    assert strangers == SHARED.get(folder, set())


SERVING = """
import importlib, pkgutil, sys
import deepseek_v4_sm120
from deepseek_v4_sm120 import ops, patching, sglang_patches
from deepseek_v4_sm120.sglang_patches import adapters, fixes
for package in (deepseek_v4_sm120, ops, patching, sglang_patches, adapters, fixes):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not (module.ispkg or module.name.endswith("__main__") or module.name.rpartition(".")[2].startswith("_C")):
            importlib.import_module(module.name)
print(*(name for name in sys.modules if name.startswith("deepseek_v4_sm120.")))
"""


def test_nothing_that_serves_imports_a_reference():
    """Adapters, operators, engine and what they share, in a process of its own: of specs the bounds alone."""
    done = subprocess.run([sys.executable, "-c", SERVING], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "deepseek_v4_sm120.patching.engine" in loaded
    assert {f"deepseek_v4_sm120.sglang_patches.adapters.{op}" for op in OPS} <= set(loaded)
    beside = [name for name in loaded if re.match(r"deepseek_v4_sm120\.(reference|specs|selftest|calibrate)\b", name)]
    assert beside == ["deepseek_v4_sm120.specs", "deepseek_v4_sm120.specs.bounds"]


@pytest.mark.parametrize("folder", CLIENT_FOLDERS)
def test_the_serving_client_needs_the_standard_library_only(folder):
    found = sorted((REPO / folder).glob("*.py"))
    assert len(found) > 5
    for path in [*found, *(REPO / f"{name.replace('.', '/')}.py" for name in CLIENT_SHARES)]:
        for node in ast.parse(path.read_text()).body:  # module level: what an import of the file needs
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            strangers = {name.split(".")[0] for name in names if name not in CLIENT_SHARES}
            strangers -= sys.stdlib_module_names | {"bench"}
            assert strangers == set(), path.name


def test_every_gate_can_be_run_and_is_documented():
    sys.path.insert(0, str(REPO))
    from bench.quality import gates

    modules = {gate.__name__.rpartition(".")[2] for gate in gates.GATES.values()}
    assert modules == {path.stem for path in (REPO / "bench/quality").glob("*.py")} - NO_GATE
    page = (REPO / "docs/gates.md").read_text()
    assert [name for name in gates.GATES if f"`{name}`" not in page or name not in gates.__doc__] == []


def test_files_are_short_and_say_what_they_hold():
    sources = files("*.py", "*.cu", "*.cuh", "*.h", "*.cpp")
    lengths = {str(path.relative_to(REPO)): len(path.read_text().splitlines()) for path in sources}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}
    assert {name for name in lengths if Path(name).stem in VAGUE} == set()


def test_the_files_that_are_begun_first_are_there():
    assert all((REPO / "tests" / name).is_file() for name in (*LONGEST, *WAITING, *sum(TOGETHER, ())))
    assert {names[0] for names in TOGETHER} <= set(LONGEST), "or their files' tests are not side by side"


def statements(tree: ast.AST):
    """All statements below: expressions, which are most of a tree, have none in them."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


EVERYWHERE = """
async def a():
    class C:
        def b(self):
            if x:
                def c(): pass
            elif y:
                def d(): pass
            with x:
                def e(): pass
    try:
        def f(): pass
    except E:
        def g(): pass
    else:
        def h(): pass
    finally:
        def i(): pass
for _ in x:
    match _:
        case 1:
            def j(): pass
"""


def test_functions_are_found_wherever_statements_are():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node.name for node in statements(ast.parse(EVERYWHERE)) if isinstance(node, kinds)]
    assert found == list("abcdefghij")


def test_functions_are_short():
    functions = {
        f"{path.relative_to(REPO)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in files("*.py")
        for node in statements(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(functions) > len(files("*.py"))
    assert {name: length for name, length in functions.items() if length > MAX_FUNCTION_LINES} == {}


def test_a_replacement_has_the_name_and_the_attributes_of_what_it_replaces():
    """By which others of ours find what is below them (`inspect.unwrap`), and marks of theirs stay."""
    bare, seen = [], 0
    for path in (REPO / "deepseek_v4_sm120" / "sglang_patches").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"_?replace_", node.name):
                returned = {ast.unparse(n.value) for n in ast.walk(node) if isinstance(n, ast.Return) and n.value}
                for inner in node.body:
                    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name in returned:
                        seen += 1
                        if "functools.wraps(original" not in " ".join(map(ast.unparse, inner.decorator_list)):
                            bare.append(f"{path.name}:{node.name}")
    assert seen > 100 and not bare


def test_kernels_know_nothing_of_torch():
    includes = [
        (path.name, line)
        for path in files("*.cu", "*.cuh", "*.h", "*.cpp")
        for line in re.findall(r"^\s*#\s*include\s*[<\"](.+?)[>\"]", path.read_text(), re.MULTILINE)
    ]
    assert includes
    assert [found for found in includes if re.match(r"torch|ATen|c10", found[1])] == []


def test_the_documents_name_every_operator_and_every_setting():
    readme, operating = ((REPO / name).read_text() for name in ("README.md", "docs/operating.md"))
    read = set(re.findall(r"\bDSV4_SM120[A-Z_]*", (REPO / "deepseek_v4_sm120/settings.py").read_text()))
    assert read and set(re.findall(r"\bDSV4_SM120[A-Z_]*", operating)) == read
    assert set(re.findall(r"\bDSV4_SM120[A-Z_]*", readme)) <= read
    assert [op for op in OPS if f"`{op}`" not in readme] == []
    settings = operating.partition("\n## Settings\n")[2]  # a row for each that `status` shows
    assert [default.name for default in TABLE.defaults if f"`{default.name}`" not in settings] == []
    told = readme + operating + (REPO / "docs/mended.md").read_text()
    assert {patch.name for patch in TABLE.patches if f"`{patch.name}`" not in told} == UNTOLD


def test_the_readme_is_short_and_its_links_lead_somewhere():
    lines = (REPO / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_README_LINES and max(map(len, lines)) <= MAX_README_COLUMNS
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    links = [(page, *link) for page in pages for link in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text())]
    assert len(links) > 5 and any(place for *_, place in links)
    broken = [
        f"{page.relative_to(REPO)}: {target}{place}"
        for page, target, place in links
        for found in [page.parent / target if target else page]
        if not found.exists() or (place and place not in places(found))
    ]
    assert broken == []


def places(page):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_notes_begin_with_where_their_subject_stands():
    notes = {path.stem: path.read_text() for path in (REPO / "docs/notes").glob("*.md")}
    contents = notes.pop("README")
    assert len(contents.splitlines()) <= MAX_CONTENTS_LINES
    assert set(re.findall(r"\]\((\w+)\.md\)", contents)) == set(notes) >= set(OPS)
    today = re.compile(r"# .+\n\n\| \| today \|\n\|---\|---\|\n(\| [^|]+ \| .+ \|\n){3,}\n[^\n|#-]")  # and a paragraph
    assert [name for name, page in notes.items() if not today.match(page)] == []


def test_pages_written_by_hand_are_wrapped():
    pages = [path for path in (REPO / "docs").rglob("*.md") if "Made by" not in path.read_text()[:100]]
    assert len(pages) > len(OPS)
    lines = {(page.name, line) for page in pages for line in page.read_text().splitlines() if line[:1] != "|"}
    long = {name for name, line in lines if len(line) > MAX_PROSE_COLUMNS}
    assert long == set()


def test_results_of_several_releases_are_sections_of_their_own(tmp_path, monkeypatch):
    """The newest first; the one that other pages link to keeps its title."""
    from bench import measured

    old = f"e2e_whole_step_sglang_{measured.CITED}"
    for name in (old, "e2e_whole_step_sglang_0.5.9", "e2e_whole_step_sglang_0.5.23", "mhc_h200"):
        of = old if name.startswith("e2e") else name
        (tmp_path / f"{name}.json").write_bytes((measured.RESULTS / f"{of}.json").read_bytes())
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    titles = re.findall(r"^## (.+)", measured.page(measured.results()), re.MULTILINE)
    whole = measured.SECTIONS["e2e_whole_step_sglang"].title
    assert titles == ["Bars", f"{whole}, SGLang 0.5.23", whole, f"{whole}, SGLang 0.5.9", "mhc"]


def test_the_matrix_of_features_is_shown_as_the_results_have_it():
    """`python3 bench/features.py` makes docs/features.md anew."""
    from bench import features

    results = features.results()
    assert features.PAGE.read_text() == features.page(results)
    shown = [line for found in results.values() for line in found["features"]]
    told = [feature.what for feature in features.features_stage.FEATURES]
    assert all(what in features.page(results) for what in [line["feature"] for line in shown] or told)


def test_what_was_measured_is_shown_as_the_results_have_it():
    """`python3 bench/measured.py` makes docs/measured.md anew."""
    from bench import measured

    results = measured.results()
    assert measured.PAGE.read_text() == (page := measured.page(results))
    missed = [row for found in results.values() for row in found.get("rows", ()) if row["met"] is False]
    assert page.count("**missed**") == len(missed) > 0 and not re.search(r"\bNone\b", page)
    rows = [row | {"metric": "something else"} for row in results["mhc_h200"]["rows"]]
    with pytest.raises(ValueError, match="mhc: the result file has no row"):
        measured.page({"mhc_h200": results["mhc_h200"] | {"rows": rows}})
