"""The borders of groups of 4: SGLang's own planner and kernels, out of the wheels and compiled for the CPU, and our
reference on the same plans, against DeepSeek's definition, a token at a time. Prompts of every length modulo 4, whole,
in chunks that end anywhere and behind a prefix of another request, and the tokens that are decoded behind them."""

from __future__ import annotations

import ast
import ctypes
import functools
import re
from pathlib import Path

import pytest
import torch

from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.reference.accuracy import relative_error
from deepseek_v4_sm120.specs.compressor import PAGE_SIZES, page_bytes
from deepseek_v4_sm120.specs.wo_a import make_freqs_cis
from tests.on_cpu import Numbered, made_together
from tests.patching.wheels import RELEASES, content, every_release, members

SHARED, HEADER = (Path(__file__).with_name(f"{name}_on_cpu.h") for name in ("wheels", "groups"))
DEFINED = dict(re.findall(r"^#define (\w+) ?(\w*)$", SHARED.read_text(), re.M))
DIM, RING, PAGE, LONGEST = 128, 8, 256, 768  # of the index; slots of state a page of the window has; tokens
FLOAT32 = 1e-6
LENGTHS = (*range(1, 10), *range(127, 131), *range(254, 263), 515)
DECODED = 9
CALLS = """
extern "C" bool prefill(int64_t n, void** t, int32_t* count) {
  try {
    const auto rows = static_cast<uint32_t>(n);
    std::vector<char> scratch(24 * n + 16);
    const auto made = @host::compress::plan_compress_prefill(
        view(t[0], {1}), view(t[1], {3, 768}), view(t[2], {-1}), view(t[3], {1}, kDLCPU), view(t[4], {1}, kDLCPU),
        view(scratch.data(), {24 * n}, kDLCPU), rows, 4, 256, 8, @ring false);
    count[0] = made.first.shape[0];
    count[1] = made.second.shape[0];
    std::memcpy(t[8], made.first.data, 16 * count[0]);
    std::memcpy(t[9], made.second.data, 8 * count[1]);
    FlashCompress4Kernel<128, @floats, false>::run_prefill(
        view(t[5], {-1, 4, 512}), view(t[6], {n, 512}), view(t[10], {count[0], 128}), view(t[7], {8, 128}),
        view(t[8], {count[0], 16}), view(t[9], {count[1], 8}));
    return true;
  } catch (std::exception& error) { return std::fprintf(stderr, "%s", error.what()), false; }
}
extern "C" bool decode(int64_t, void** t, int32_t*) {
  try {
    const auto made = @host::compress::plan_compress_decode(
        view(t[0], {1}), view(t[1], {3, 768}), view(t[2], {-1}), view(t[3], {1}), 4, 256, 8 @of_ring);
    std::memcpy(t[8], made.data, 16);
    FlashCompress4Kernel<128, @floats, false>::run_decode(
        view(t[5], {-1, 4, 512}), view(t[6], {1, 512}), view(t[10], {1, 128}), view(t[7], {8, 128}),
        view(t[8], {1, 16}));
    return true;
  } catch (std::exception& error) { return std::fprintf(stderr, "%s", error.what()), false; }
}
"""


def texts(wheel) -> tuple[str, ...]:
    """Of the plans' lines, of the planner and of the kernels."""
    ends = ("sgl_kernel/deepseek_v4/compress_v2.cuh", "csrc/deepseek_v4/c_plan.cuh", "csrc/deepseek_v4/c4_v2.cuh")
    found = [next(member for member in sorted(members(wheel)) if member.endswith(end)) for end in ends]
    return tuple(re.sub(r"\b\w+\b *", as_defined, content(wheel, member)) for member in found)


def as_defined(word: re.Match) -> str:
    """A word of a text by the header's macros: two names that stand for the same make no other text."""
    name = word[0].rstrip()
    return f"{DEFINED[name]} ".lstrip() if name in DEFINED else word[0]


def whole(parts: tuple[str, ...], old="", new="") -> str:
    """A text for a CPU, with one thing in theirs changed."""
    lines, planner, kernels = parts
    assert old in planner + kernels
    planner, kernels = ((text.replace(old, new) if old else text) for text in (planner, kernels))
    within = "namespace sglang {" in lines
    kernels = re.sub(r"^#define (C4_KERNEL|WRITE_KERNEL) .*$", r"#define \1", kernels, flags=re.M)
    floats = re.search(r"template <([^>]*)>\s*struct FlashCompress4Kernel", kernels)[1].count("typename")
    text = re.sub(r"^#(include|pragma once).*$", "", "\n".join((lines, planner, kernels)), flags=re.M)
    header = SHARED.read_text() + HEADER.read_text()
    header = header.replace("//@@ SGLang's namespace", "namespace sglang {" if within else "")
    header = header.replace("//@@ end of it", "}" if within else "")
    with_ring = "use_req_ring" in planner
    calls = CALLS.replace("@host", "sglang::host" if within else "host").replace(
        "@floats", ", ".join(["float"] * floats)
    )
    calls = calls.replace("@ring", "false," if with_ring else "").replace("@of_ring", ", false" if with_ring else "")
    return f"{header}{text}\n{'using namespace sglang;' if within else ''}\n{calls}"


@functools.cache  # most releases have the files of the one before
def compiled(*texts: str) -> list[Numbered]:
    libraries = made_together(list(texts), "-O1", "-w", "-ffp-contract=off")
    for library in libraries:
        for name in ("prefill", "decode"):
            getattr(library, name).argtypes = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
            getattr(library, name).restype = ctypes.c_bool
    return libraries


def definition(tokens, ape) -> list[torch.Tensor]:
    """DeepSeek's entries before the norm, a token at a time, with its state: this group's tokens and those before.

    ape [4, 2 DIM] as the checkpoint has it; a token is [kv for the group after | own kv | the two scores].
    """
    found, before, own = [], [], []
    places = ape.double()
    for position, (kv, score) in enumerate(zip(*tokens.double().chunk(2, dim=1), strict=True)):
        own.append((kv, score + places[position % 4]))
        if len(own) == 4:
            pooled = [(kv[:DIM], score[:DIM]) for kv, score in before] + [(kv[DIM:], score[DIM:]) for kv, score in own]
            weights = torch.softmax(torch.stack([score for _, score in pooled]), dim=0)
            found.append((torch.stack([kv for kv, _ in pooled]) * weights).sum(dim=0))
            before, own = own, []
    return found


class Server:
    """A layer's state in pages of the sliding window that lie in no order, and our reference with one of its own."""

    def __init__(self, library, ape, generator):
        pages = 3 * LONGEST // PAGE + 1
        self.library, self.generator = library, generator
        self.request_to_token = torch.zeros((3, LONGEST), dtype=torch.int32)
        order = torch.randperm(pages, generator=generator)
        self.full_to_window = (order[:, None] * PAGE + torch.arange(PAGE)).flatten().contiguous()
        self.free = torch.randperm(pages, generator=generator).tolist()
        self.state = torch.full((pages * RING // 4, 4, 4 * DIM), float("nan"))
        self.own_state = self.state.clone()
        self.ape = torch.cat(ape.chunk(2, dim=1)).contiguous()  # as SGLang converts it
        weight = 1 + 0.2 * torch.randn(DIM, generator=generator)
        self.layer = {"norm_weight": weight, "norm_eps": 1e-6, "freqs_cis": make_freqs_cis(LONGEST, "cpu")}
        self.entries = {0: {}, 1: {}, 2: {}}

    def give_pages(self, request: int, length: int, first=0) -> None:
        for position in range(first, length, PAGE):
            place = self.free.pop() * PAGE
            self.request_to_token[request, position : position + PAGE] = place + torch.arange(PAGE)

    def step(self, request: int, length: int, rows: torch.Tensor, decodes=False) -> None:
        count, rows = len(rows), torch.cat([torch.full((8, 4 * DIM), float("nan")), rows])[8:]  # of this step only
        plan, writes = torch.zeros((count, 16), dtype=torch.uint8), torch.zeros((count, 8), dtype=torch.uint8)
        pooled, lines = torch.full((count, DIM), float("nan")), (ctypes.c_int32 * 2)(count, 0)
        tensors = [torch.tensor([request]), self.request_to_token, self.full_to_window, torch.tensor([length])]
        tensors += [torch.tensor([count]), self.state, rows, self.ape, plan, writes, pooled]
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        assert (self.library.decode if decodes else self.library.prefill)(count, pointers, lines)
        plan, writes = plan[: lines[0]], None if decodes else writes[: lines[1]]
        self.keep(request, plan, pooled, decodes)
        self.step_of_ours(rows, plan, writes)

    def keep(self, request, plan, pooled, decodes) -> None:
        for (length, *_), entry in zip(plan.view(torch.int32).tolist(), pooled, strict=False):
            if not decodes or length % 4 == 0:
                assert length % 4 == 0 and length // 4 - 1 not in self.entries[request]
                self.entries[request][length // 4 - 1] = entry, length - 4

    def step_of_ours(self, rows, plan, writes) -> None:
        """The same entries and, to the bit, the same state."""
        cache = torch.zeros((LONGEST // 64, page_bytes(PAGE_SIZES[4, DIM], DIM, False)), dtype=torch.uint8)
        given = {"cache": cache, "page_size": PAGE_SIZES[4, DIM], "out_loc": torch.arange(len(rows)), **self.layer}
        reference.compressor(rows, self.own_state, self.ape, plan, writes=writes, **given)
        assert torch.equal(self.own_state.view(torch.int32), self.state.view(torch.int32))


def chunks(length: int, prefix: int) -> list[list[int]]:
    """Where the steps of a prompt end: at once, and in chunks that end at all places of a group."""
    return [[length], sorted({*range(prefix + 1, length, 31), *range(prefix + 3, length, 34), length})]


def demand_the_definition(library, length: int, ends: list[int], prefix: int, seed=3) -> None:
    generator = torch.Generator().manual_seed(seed)
    ape = torch.randn((4, 2 * DIM), generator=generator)
    tokens = torch.randn((length + DECODED, 4 * DIM), generator=generator)
    tokens[:, 2 * DIM :] *= 3
    server = Server(library, ape, generator)
    if prefix:  # another request has computed it, and gone on otherwise
        server.give_pages(2, prefix + 9)
        other = torch.cat([tokens[:prefix], torch.randn((9, 4 * DIM), generator=generator)])
        server.step(2, prefix + 6, other[: prefix + 6])
        for position in range(prefix + 6, len(other)):
            server.step(2, position + 1, other[position : position + 1], decodes=True)
        server.request_to_token[1, :prefix] = server.request_to_token[2, :prefix]
        server.entries[1] = {n: entry for n, entry in server.entries[2].items() if n < prefix // 4}
    server.give_pages(1, len(tokens), prefix)
    for first, end in zip([prefix, *ends], ends, strict=False):
        server.step(1, end, tokens[first:end])
    for position in range(length, len(tokens)):
        server.step(1, position + 1, tokens[position : position + 1], decodes=True)
    expected, found = definition(tokens, ape), server.entries[1]
    assert sorted(found) == list(range(len(tokens) // 4))
    assert all(rotated == 4 * n for n, (_, rotated) in found.items())
    pooled = torch.stack([found[n][0] for n in range(len(expected))])
    assert relative_error(pooled, torch.stack(expected)) < FLOAT32, (length, ends)


@pytest.mark.parametrize("prefix", (0, PAGE))
@every_release("0.5.20")  # seen from 0.5.14 on, whose text does not change any more
def test_every_length_and_place(sglang_wheel, version, prefix):
    demand_all(texts(sglang_wheel(version)), prefix)


@functools.cache  # of a text: a failure is none that is kept
def demand_all(parts: tuple[str, ...], prefix: int) -> None:
    (library,) = compiled(whole(parts))
    for length in (n for n in LENGTHS if n > prefix):
        for ends in chunks(length, prefix):
            demand_the_definition(library, length, ends, prefix)


FAULTS = {
    "the tokens before the last group are not kept": ("last_c_pos - (is_overlap ? compress_ratio : 0)", "last_c_pos"),
    "nor those at the end of a page": ("position % swa_page_size >= (swa_page_size - compress_ratio)", "false"),
    "the group before is this one": ("max(position_1 - params.compress_ratio, 0)", "position_1"),
    "the second group has none before it": ("plan.seq_len > 4;", "plan.seq_len > 8;"),
    "a chunk's border is a token off": ("std::min(j + 1, window_size)", "std::min(j + 2, window_size)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(sglang_wheel, fault):
    parts = texts(sglang_wheel(RELEASES[-1]))
    library = compiled(*(whole(parts, *change) for change in FAULTS.values()))[list(FAULTS).index(fault)]
    with pytest.raises(AssertionError):
        for length, prefix in ((7, 0), (262, 0), (262, PAGE)):
            for ends in chunks(length, prefix):
                demand_the_definition(library, length, ends, prefix)


VISIBLE = """
    import sys, torch
    sys.path.insert(0, FOLDER)
    from metadata_kernel import init_compression_metadata
    lengths = torch.arange(1, 1025, dtype=torch.int32)
    slots = torch.randperm(4096)[:1024]
    table = torch.randint(50, (1024, 4), dtype=torch.int32)
    made = init_compression_metadata(lengths, lengths - 1, slots, table, 256)
    for ratio, (slot, seen) in {4: (made[0], made[2]), 128: (made[4], (made[8] >= 0).sum(dim=1))}.items():
        ended = lengths % ratio == 0
        print(torch.equal(seen.int(), lengths // ratio), torch.equal(slot, torch.where(ended, slots // ratio, 0)))
"""


def asked_for(text: str, name: str) -> tuple[str, ...]:
    """A function of a module, and what of the module it needs, but for imports."""
    defined = {}
    for node in ast.parse(text).body:
        names = [node.name] if hasattr(node, "name") else [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
        defined |= dict.fromkeys(names, node)
    wanted = [name]
    for one in wanted:
        inner = {n.id for n in ast.walk(defined[one]) if isinstance(n, ast.Name)}
        wanted += sorted((inner & set(defined)) - set(wanted))
    return tuple(ast.unparse(defined[one]) for one in wanted)


@pytest.fixture(scope="module")
def seen():
    """What was said of a text: most releases have that of the one before, or other kernels beside it."""
    return {}


@every_release("0.5.20")  # seen from 0.5.14 on, whose text does not change any more
def test_a_query_sees_the_group_that_it_ends_and_all_before(sglang_wheel, tmp_path, python_with_torch, seen, version):
    """DeepSeek's: entry j for the query at position p where j < (p + 1) // ratio. In Triton's interpreter."""
    wheel = sglang_wheel(version)
    (member,) = [member for member in members(wheel) if member.endswith("dsv4/metadata_kernel.py")]
    text = content(wheel, member)
    needed = asked_for(text, "init_compression_metadata")
    if needed not in seen:
        (tmp_path / "metadata_kernel.py").write_text(text)
        code = VISIBLE.replace("FOLDER", repr(str(tmp_path)))
        seen[needed] = python_with_torch(code, env={"TRITON_INTERPRET": "1"}).stdout
    assert seen[needed] == "True True\n" * 2
