"""The machine code of every kernel against the table of what it may read before its wait (programmatic_launch.py)."""

import hashlib
import os
import pickle
import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import build_artifact
import pytest
from build_results import Results, locked, run

from deepseek_v4_sm120.ops.shared import extension
from tests import sass
from tests.programmatic_launch import BEFORE, BEHIND, KERNELS, NEVER, POINTERS, PROBES, docs_table

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "build/deepseek_v4_sm120"
DOCS = REPO / "docs/programmatic_launch.md"
# where they begin in the constant bank; sm_120 is what cuobjdump calls 120f; sm_90a where it was asked for
PARAMETERS = {"sm_120": 0x380, "sm_120a": 0x380, "sm_121a": 0x380, "sm_90a": 0x210}
FATBIN = 0xBA55ED50

# kernels that know their weights before the kernel in front has ended, and have them in registers; weights alone are
# loaded by 256 bytes of the L2
EARLY_WEIGHTS = {"bf16_linear", "fp8_linear, few rows", "mxfp4_moe, down and sum"}
WEIGHT_LOAD = re.compile(r"\bLDG\.\S*LTC256B")


def fatbins(library: Path) -> list[bytes]:
    """One for each CUDA source."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as stream:
        data = ELFFile(stream).get_section_by_name(".nv_fatbin").data()
    found, at = [], 0
    while at + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN:
            at += 8
            continue
        found.append(data[at : at + header + size])
        at += header + size
    return found


def machine_code(cubin: Path) -> dict[str, bytes]:
    from elftools.elf.elffile import ELFFile

    with cubin.open("rb") as stream:
        sections = ELFFile(stream).iter_sections()
        return {s.name.removeprefix(".text."): s.data() for s in sections if s.name.startswith(".text.")}


def disassembled(library: Path, folder: Path) -> dict[str, dict[str, list[str]]]:
    """Lines of every function by architecture; those of sm_121a that are sm_120a's to the byte are left out."""
    files = metadata.files("nvidia-cuda-cuobjdump")
    cuobjdump = next(f.locate() for f in files if Path(f).name == "cuobjdump")
    nvdisasm = Path(find_spec("triton").origin).parent / "backends/nvidia/bin/nvdisasm"
    kept = Results(build_artifact.CACHE / "listings", build_artifact.CSRC, run([nvdisasm, "--version"]))

    def lines_of(task: tuple[str, Path]) -> dict[str, list[str]]:
        arch, cubin = task
        functions = sass.split(listed(kept, nvdisasm, cubin))
        assert functions, cubin
        if arch == "sm_121a":
            own, other = machine_code(cubin), machine_code(next(cubin.parent.glob("*.sm_120a.cubin")))
            functions = {name: lines for name, lines in functions.items() if own[name] != other.get(name)}
        return functions

    tasks = []
    for i, fatbin in enumerate(fatbins(library)):
        here = folder / str(i)
        here.mkdir()
        (here / "all.fatbin").write_bytes(fatbin)
        subprocess.run([cuobjdump, "-xelf", "all", "all.fatbin"], cwd=here, check=True, capture_output=True)
        cubins = {path.suffixes[-2][1:]: path for path in here.glob("*.cubin")}
        assert len(cubins) == len(list(here.glob("*.cubin"))), cubins
        assert set(cubins) - {"sm_90a"} in ({"sm_120"}, {"sm_120a", "sm_121a"}), cubins
        tasks += list(cubins.items())
    found: dict[str, dict[str, list[str]]] = {arch: {} for arch in PARAMETERS}
    with ThreadPoolExecutor(2) as pool:
        for (arch, _), functions in zip(tasks, pool.map(lines_of, tasks), strict=True):
            found[arch] |= functions
    return found


def listed(kept: Results, nvdisasm: Path, cubin: Path) -> str:
    """What nvdisasm says of the file, kept by its content: from one run of the tests to the next few kernels change."""
    named = kept.folder / f"{hashlib.sha256(cubin.read_bytes()).hexdigest()}.cubin"
    with locked(named.with_suffix(".lock")):
        shutil.copyfile(cubin, named)
        return kept.make(["sh", "-c", '"$0" -c -ndf "$1" >"$3"', nvdisasm, named], [named], ".sass").read_text()


def offsets(folder: Path) -> dict[str, dict[int, str]]:
    """Of every pointer of the table, by struct, as the compiler has them."""
    lines = ["#include <cstddef>", "#include <cstdio>"]
    headers = sorted({f"{struct_.partition('::')[0]}" for struct_ in POINTERS})
    parts = [
        "bf16_linear/draft_head",
        "compressor/drafts",
        "fp8_linear/draft",
        "fp8_linear/norm",
        "mxfp4_moe/shared",
        "mxfp4_moe/scaled",
        "mxfp4_moe/sorted",
        "mxfp4_moe/tiles",
        "router_topk/argmax",
    ]
    lines += [f'#include "{name}.h"' for name in (*(f"{name}/{name}" for name in headers), *parts)] + ["int main() {"]
    for struct_, (constant, produced) in POINTERS.items():
        for name in (*constant, *produced):
            lines.append(f'  std::printf("{struct_} {name} %zu\\n", offsetof(dsv4::{struct_}, {name}));')
    (folder / "offsets.cpp").write_text("\n".join([*lines, "}"]))
    include = build_artifact.find_toolkit(None, build_artifact.CACHE).include
    program = folder / "offsets"
    command = ["g++", "-std=c++17", "-w", "-I", build_artifact.CSRC, "-isystem", include, folder / "offsets.cpp"]
    subprocess.run([*map(str, command), "-o", str(program)], check=True)
    found: dict[str, dict[int, str]] = {name: {} for name in POINTERS}
    for line in subprocess.run([program], check=True, text=True, capture_output=True).stdout.splitlines():
        struct_, name, offset = line.split()
        found[struct_][int(offset)] = name
    return found


@dataclass
class Found:
    """One kernel on one architecture."""

    key: str  # of the table
    name: str
    code: sass.Function
    lines: list[str]
    fields: dict[int, str]

    def named(self, access: sass.Access) -> set[str]:
        return {self.fields[offset] for offset in access.pointers}


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    library = PACKAGE / extension.LIBRARY
    assert library.is_file(), f"no {library}: run python3 csrc/build_artifact.py"
    return disassembled(library, tmp_path_factory.mktemp("cubins"))


def short(mangled: list[str]) -> list[str]:
    """Names without dsv4:: and anonymous namespaces, with template arguments."""
    full = subprocess.run(["c++filt", *mangled], check=True, text=True, capture_output=True).stdout.splitlines()
    plain = [re.sub(r"^void |dsv4::|\(anonymous namespace\)::", "", name) for name in full]
    return [name.partition("(")[0] for name in plain]


class Analyses:
    """What sass.py says of functions, kept by all that it reads: its own text, the function's lines, where parameters
    begin and which are pointers. From one run of the tests to the next few kernels change."""

    def __init__(self, folder: Path):
        self.analyser = Path(sass.__file__).read_bytes()
        self.place = folder / f"analyses-{hashlib.sha256(self.analyser).hexdigest()}.pickle"
        self.known: dict[str, sass.Function] = pickle.loads(self.place.read_bytes()) if self.place.exists() else {}
        self.asked: dict[str, sass.Function] = {}

    def of(self, lines: list[str], base: int, fields: dict[int, str]) -> sass.Function:
        told = "\n".join([str(base), str(sorted(fields)), *lines]).encode()
        key = hashlib.sha256(told).hexdigest()
        self.asked[key] = self.known[key] if key in self.known else sass.analyse(lines, base, fields)
        return self.asked[key]

    def keep(self) -> None:
        """Those that were asked for; others are of kernels that have changed."""
        unfinished = self.place.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(self.asked))
        unfinished.replace(self.place)


@pytest.fixture(scope="module")
def kernels(functions, tmp_path_factory) -> list[Found]:
    of_struct = offsets(tmp_path_factory.mktemp("offsets"))
    analyses = Analyses(build_artifact.CACHE / "listings")
    found = []
    for arch, by_name in functions.items():
        for mangled, name in zip(by_name, short(list(by_name)), strict=True):
            if re.match(PROBES, name):
                continue
            keys = [key for key, kernel in KERNELS.items() if re.match(kernel.pattern, name)]
            assert len(keys) == 1, f"{name} is {keys or 'nothing'} in the table"
            fields = of_struct[KERNELS[keys[0]].params]
            code = analyses.of(by_name[mangled], PARAMETERS[arch], fields)
            found.append(Found(keys[0], f"{name} {arch}", code, by_name[mangled], fields))
    analyses.keep()
    return found


def test_an_analysis_is_kept_for_what_it_was_made_of(tmp_path, monkeypatch):
    lines = [
        "        /*0000*/                   LDC R1, c[0x0][0x388] ;",
        "        /*0010*/                   LDG.E R2, desc[UR4][R1.64] ;",
        "        /*0020*/                   ACQBULK ;",
        "        /*0030*/                   EXIT ;",
    ]
    first = Analyses(tmp_path)
    made = first.of(lines, 0x380, {8: "x"})
    assert made.reads[0].ahead and made.waits == 1
    first.keep()
    monkeypatch.setattr(sass, "analyse", lambda lines, base, fields: (len(lines), base, list(fields)))
    again = Analyses(tmp_path)
    assert again.of(lines, 0x380, {8: "x"}) == made
    behind = [lines[0], lines[2], lines[1], lines[3]]
    asked_anew = [again.of(behind, 0x380, {8: "x"}), again.of(lines, 0x210, {8: "x"}), again.of(lines, 0x380, {0: "x"})]
    assert asked_anew == [(4, 0x380, [8]), (4, 0x210, [8]), (4, 0x380, [0])]
    (tmp_path / "sass.py").write_text(Path(sass.__file__).read_text().replace('"ACQBULK"', '"NOP"'))
    monkeypatch.setattr(sass, "__file__", str(tmp_path / "sass.py"))
    assert Analyses(tmp_path).known == {}


def test_every_entry_is_a_kernel(kernels):
    hopper = [k.key for k in kernels if k.name.endswith("sm_90a")]  # of a build that has its code
    assert {k.key for k in kernels if k.name.endswith(("sm_120", "sm_120a"))} == set(KERNELS)
    assert not hopper or set(hopper) == set(KERNELS)


def test_every_address_comes_from_a_known_pointer(kernels):
    """Else a load could escape the table; generic loads (LD) without one are of shared memory."""
    for kernel in kernels:
        for access in kernel.code.reads + kernel.code.writes:
            generic = access.opcode.split(".")[0] in ("LD", "ST")
            assert access.pointers or generic or access.any_pointer, f"{kernel.name}: {access.text}"
            assert not (access.any_pointer and (access.ahead or access.constant)), f"{kernel.name}: {access.text}"


def test_what_is_read_before_the_wait(kernels):
    """As the table has it, no less and no more; of what kernels write, what is older and hints, not through an L1."""
    for kernel in (k for k in kernels if not KERNELS[k.key].cooperative):
        entry = KERNELS[kernel.key]
        ahead = [access for access in kernel.code.reads if access.ahead]
        read = set().union(*(kernel.named(access) for access in ahead)) if ahead else set()
        assert read == {*entry.ahead, *entry.older, *entry.hints}, f"{kernel.name}: {[a.text for a in ahead]}"
        assert set(entry.ahead) <= set(POINTERS[entry.params][0]), kernel.key
        for access in ahead:
            if kernel.named(access) & {*entry.older, *entry.hints}:
                assert "STRONG.GPU" in access.opcode, f"{kernel.name}: {access.text}"


def test_hints_are_read_again_behind_the_wait(kernels):
    """All of what was read ahead, by plain loads; that results come of these alone is for the eye."""
    for kernel in kernels:
        for pointer in KERNELS[kernel.key].hints:
            reads = [access for access in kernel.code.reads if pointer in kernel.named(access)]
            behind = [access.opcode for access in reads if not access.ahead]
            assert behind, f"{kernel.name}: {pointer} is read before the wait only"
            assert all("STRONG" not in opcode for opcode in behind), f"{kernel.name}: {behind}"


def test_only_constants_are_loaded_as_such(kernels):
    """ld.global.nc is for memory that nobody writes while the kernel runs, and a kernel runs before its wait, too."""
    for kernel in kernels:
        constant = set(POINTERS[KERNELS[kernel.key].params][0])
        for access in kernel.code.reads:
            if access.constant:
                assert kernel.named(access) <= constant, f"{kernel.name}: {access.text}"


def test_nothing_is_written_before_the_wait(kernels):
    for kernel in (k for k in kernels if not KERNELS[k.key].cooperative):
        early = [access.text for access in kernel.code.writes if access.ahead and access.pointers]
        assert early == [], kernel.name


def test_every_thread_waits_before_it_ends(kernels):
    """A kernel of which no thread has waited may be done before those in front, and its successors' wait with it."""
    for kernel in kernels:
        cooperative = KERNELS[kernel.key].cooperative
        assert (kernel.code.waits == 0) == cooperative, kernel.name
        assert cooperative or kernel.code.ends_without_wait == [], kernel.name


def test_where_successors_are_let_in(kernels):
    expected = {BEHIND: {True}, BEFORE: {False}, NEVER: set()}
    for kernel in kernels:
        assert set(kernel.code.triggers) == expected[KERNELS[kernel.key].trigger], kernel.name


def test_what_is_older_has_been_waited_for():
    for key, entry in KERNELS.items():
        assert bool(entry.older) == bool(entry.first), key
        for first in entry.first:
            assert [k.trigger for k in KERNELS.values() if k.pattern == first] == [BEHIND], (key, first)
        assert entry.trigger in (BEHIND, BEFORE, NEVER), key


def test_weights_are_asked_for_before_the_wait(kernels):
    """What programmatic launch is for. ptxas moves a load behind the wait for the kernel in front where it may."""
    for kernel in (k for k in kernels if k.key in EARLY_WEIGHTS):
        text = "\n".join(kernel.lines)
        before, _, behind = text.partition(sass.WAIT)
        assert WEIGHT_LOAD.search(before), f"{kernel.name}: no weights before the wait"
        ahead_of_use = behind.partition("HMMA")[0]
        assert not WEIGHT_LOAD.search(ahead_of_use), f"{kernel.name}: weights are asked for behind the wait"


def test_the_docs_have_the_table():
    assert docs_table() in DOCS.read_text(), f"docs/programmatic_launch.md should have:\n{docs_table()}"
