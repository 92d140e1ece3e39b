"""Every form of instruction that the emulator knows (forms.cpp) does what the PTX ISA says, and every other one is
refused by its name, not taken for something near."""

from __future__ import annotations

import ctypes
import functools
import random
import struct

import numpy as np
import pytest

from tests.emulator import definitions as of
from tests.emulator.emulated import called, emulated, library, run

THREADS = 90  # a warp of which all take part, one of which some do, and one of which some are there
HEAD = ".visible .entry form(.param .u64 given)\n{\n.reg .pred %p<16>;\n.reg .b16 %h<16>;\n.reg .b32 %r<64>;\n"
HEAD += ".reg .b64 %d<64>;\n.shared .align 16 .b8 memory[8192];\nld.param.u64 %d60, [given];\nmov.u32 %r60, %tid.x;\n"


@functools.cache
def forms() -> dict[str, list[str]]:
    """Name -> shapes of its operands, as in forms.cpp."""
    lines = library().emulator_forms().decode().splitlines()
    return {words[0]: ["" if shape == "-" else shape for shape in words[1:]] for words in map(str.split, lines)}


def launch(text: str, memory: np.ndarray, threads: int = THREADS) -> None:
    """A program, of which each thread has the address of the memory in %d60, and its number in %r60."""
    library().emulator_ptx(f"{HEAD}{text}\nret;\n}}\n".encode())
    library().emulator_allow(memory.ctypes.data, memory.nbytes)
    sizes = (ctypes.c_uint32 * 5)(1, 1, 1, threads, 0)
    called(library().emulator_launch(b"form", sizes, (ctypes.c_uint64 * 1)(memory.ctypes.data), 8))
    run()


def refused(text: str) -> str:
    """The error of an instruction; "": there is none."""
    library().emulator_ptx(f"{HEAD}{text}\nret;\n}}\n".encode())
    return library().emulator_error().decode() if library().emulator_parse(b"form") else ""


# ---- what changes numbers in registers

WHOLE = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000]
WHOLE += [0x3210, 0x7654, 0xBA98, 0xFFFFFFFE, 0xFFFFFFFF, 0x0123456789ABCDEF, 1 << 63, (1 << 63) - 1, (1 << 64) - 1]
REAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
    3.5,
    0.3,
    -0.7,
    1 + 2.0**-23,
    1 - 2.0**-24,
    448.0,
    464.0,
    65504.0,
    65520.0,
]
REAL += [2.0**-149, -(2.0**-130), 2.0**-126, 2.0**-133, 6e-8, 2.0**-24, 3.2, 32767.5, 65535.5, 2.0**31, -(2.0**31), 4e9]
REAL += [1e10, 3e38, -3e38, 2.0**126.5, 2.0**127, -(2.0**64), float("inf"), float("-inf"), float("nan"), 0.4375, 12.5]


@functools.cache
def numbers(kind: str) -> list[int]:
    """Of a type, as bits: hostile ones and any."""
    drawn = random.Random(kind)
    if kind == "pred":
        return [0, 1]
    if kind.startswith("f32"):
        some = [struct.unpack("<I", struct.pack("<f", x))[0] for x in REAL] + [drawn.getrandbits(32) for _ in range(40)]
        return some if kind == "f32" else [a | drawn.choice(some) << 32 for a in some]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        form = of.BF16 if kind.startswith("b") else of.F16
        some = [form.encoded(x) for x in REAL if x == x] + [drawn.getrandbits(16) for _ in range(40)]
        return some if not kind.endswith("x2") else [a | drawn.choice(some) << 16 for a in some]
    count = 32 if kind.endswith("x2") else of.bits_of(kind)
    return [x & (1 << count) - 1 for x in WHOLE] + [drawn.getrandbits(count) for _ in range(40)]


def elements(kind: str, bits: int) -> list[int]:
    """Of a number that is two."""
    if not kind.endswith("x2") or kind in ("e4m3x2", "e2m1x2"):
        return [bits]
    half = 32 if kind == "f32x2" else 16
    return [bits >> at & (1 << half) - 1 for at in (0, half)]


def by_elements(words, given, function):
    parts = zip(*(elements(words[-1], bits) for bits in given), strict=True)
    return tuple(function([*words[:-1], words[-1].removesuffix("x2")], list(part)) for part in parts)


def plain(words: list[str], count: int):
    """(types of what is read, of what is written, the result by its definition); None: it is tested elsewhere."""
    op, type_ = words[0], words[-1]
    if op in ("prmt", "brev", "popc", "clz", "bfind", "shf", "bfe"):
        return [type_] * (count - 1), "u32", of.bit_result
    if op == "setp":
        return [type_] * 2, "pred", of.compared
    if op == "selp":
        return [type_, type_, "pred"], type_, lambda words, given: given[0] if given[2] else given[1]
    if type_ == "pred" and op in ("and", "or", "xor", "not", "mov"):
        do = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
        one = {"not": lambda a: 1 - a, "mov": lambda a: a}
        return ["pred"] * (count - 1), "pred", lambda words, given: (do | one)[op](*given)
    if op in ("mov", "cvta"):
        return [type_], type_, lambda words, given: given[0]
    if op == "cvt":
        wide = words[-2] if words[-2] in ("f32", "f16", "bf16") or "x2" in words[-2] else "u64"
        return [type_] * (count - 1), wide, of.converted
    if op in ("max", "min") and type_ == "u16x2":
        return [type_] * 2, type_, lambda words, given: by_elements([op, "u16x2"], given, of.integer_result)
    if op in of.TWO or op in of.FLOATS or op in ("neg", "abs", "not", "shl", "shr", "mad", "lop3"):
        if type_ in ("f32", "f32x2"):
            do = of.float_result
            return [type_] * (count - 1), type_, do if type_ == "f32" else lambda *given: by_elements(*given, do)
        if "f16" in type_:
            return [type_] * (count - 1), type_, lambda *given: by_elements(*given, of.half_result)
        if op != "lop3":
            wide = type_ if "wide" not in words else {"16": "u32", "32": "u64"}[type_[1:]]
            third = ["u32"] if op in ("shl", "shr") else [type_] * (count > 2)
            return [type_, *third, *[wide] * (count > 3)], wide, of.integer_result
    return None


APPROXIMATE = ("ex2", "rsqrt", "approx", "full")


def is_same(words, found: int, expected, kind: str) -> bool:
    """Where hardware approximates, to the last place but one; of a NaN whichever; only the bits that the type has."""
    if isinstance(expected, tuple):
        pairs = zip(elements(kind, found), expected, strict=True)
        return all(is_same(words, *both, kind.removesuffix("x2")) for both in pairs)
    form = of.BF16 if "bf16" in kind else of.F16 if kind.startswith("f16") else of.F32
    if expected == of.NAN:
        value = form.decoded(found & (1 << form.bits) - 1)
        return value != value
    expected &= (1 << (32 if kind.endswith("x2") and kind != "f32x2" else 64 if kind == "f32x2" else width(kind))) - 1
    near = 1 if kind == "f32" and any(word in words for word in APPROXIMATE) else 0
    return abs(found - expected) <= near


@functools.cache
def width(kind: str) -> int:
    return (
        1
        if kind == "pred"
        else 32
        if kind.endswith("x2") and kind != "f32x2"
        else 64
        if kind == "f32x2"
        else of.bits_of(kind)
    )


def register(kind: str, at: int) -> str:
    return f"%{'p' if kind == 'pred' else {16: 'h', 32: 'r', 64: 'd'}[max(width(kind), 16)]}{at}"


def to_register(kind: str, at: int, slot: int) -> str:
    if kind == "pred":
        return f"ld.global.u32 %r50, [%d61+{8 * slot}];\nsetp.ne.s32 %p{at}, %r50, 0;\n"
    return f"ld.global.b{max(width(kind), 16)} {register(kind, at)}, [%d61+{8 * slot}];\n"


def from_register(kind: str, at: int, slot: int) -> str:
    if kind == "pred":
        return f"selp.b32 %r50, 1, 0, %p{at};\nst.global.b32 [%d61+{8 * slot}], %r50;\n"
    return f"st.global.b{max(width(kind), 16)} [%d61+{8 * slot}], {register(kind, at)};\n"


def rows(name: str, sources: list[str], result: str) -> list[list[int]]:
    """Of each thread: whether it takes part, what it is given, what its result's register had before."""
    drawn = random.Random(name)
    given = list(zip(*(drawn.choices(numbers(kind), k=THREADS) for kind in sources), strict=True))
    if len(sources) == 1:  # all of them
        given[: len(numbers(sources[0]))] = [(number,) for number in numbers(sources[0])[:THREADS]]
    return [[int(t < 32 or drawn.random() < 0.7), *one, drawn.choice(numbers(result))] for t, one in enumerate(given)]


def wrong(name: str, count: int) -> list:
    """Threads whose result is not that of the definition."""
    words = name.split(".")
    sources, result, definition = plain(words, count)
    sources = [
        "u16" if kind in ("u8", "s8") else "u16" if kind == "e4m3x2" else "u16" if kind == "e2m1x2" else kind
        for kind in sources
    ]
    table = rows(name, sources, result)
    operands = [register(result, 10), *(register(kind, at) for at, kind in enumerate(sources))]
    stride, last = 8 * (len(sources) + 2), len(sources) + 1
    text = f"mad.wide.u32 %d61, %r60, {stride}, %d60;\n" + to_register("pred", 9, 0) + to_register(result, 10, last)
    text += "".join(to_register(kind, at, at + 1) for at, kind in enumerate(sources))
    memory = np.array(table, np.uint64)
    launch(f"{text}@%p9 {name} {', '.join(operands)};\n{from_register(result, 10, last)}", memory)
    found = []
    for (takes_part, *given, before), (*_, after) in zip(table, memory.tolist(), strict=True):
        expected = definition(words, given) if takes_part else before
        after &= (1 << width(result)) - 1
        if expected is not None and not is_same(words if takes_part else [], after, expected, result):
            found.append((takes_part, given, before, expected, after))
    return found


def of_registers() -> list[tuple[str, str]]:
    """(name, shape of its operands) of all that this file has a definition of."""
    every = [(name, shape) for name, shapes in forms().items() for shape in shapes if shape and not {*shape} & {*"{m|"}]
    return [(name, shape) for name, shape in every if plain(name.split("."), len(shape))]


def test_instructions_of_registers():
    with emulated():
        found = {f"{name} {shape}": wrong(name, len(shape))[:2] for name, shape in of_registers()}
    assert len(found) > 400
    assert {name: bad for name, bad in found.items() if bad} == {}


def test_every_table_of_lop3():
    """All 256, over all eight choices of three bits in each word."""
    drawn = random.Random(3)
    memory = np.array([[drawn.getrandbits(32) for _ in range(3)] + [0] * 256 for _ in range(32)], np.uint32)
    text = "mad.wide.u32 %d61, %r60, 1036, %d60;\n" + "".join(
        f"ld.global.u32 %r{n}, [%d61+{4 * n}];\n" for n in range(3)
    )
    for table in range(256):
        text += f"lop3.b32 %r10, %r0, %r1, %r2, {table};\nst.global.u32 [%d61+{12 + 4 * table}], %r10;\n"
    with emulated():
        launch(text, memory, 32)
    for a, b, c, *found in memory.tolist():
        assert found == [of.looked_up(table, a, b, c) for table in range(256)]


def test_every_number_of_16_and_of_8_bits():
    """To float32: all f16, all bf16, all E4M3 by way of f16."""
    memory = np.zeros((1024, 256), np.uint32)
    memory[:, :64] = np.arange(1 << 16).reshape(1024, 64)
    text = "mad.wide.u32 %d61, %r60, 1024, %d60;\n"
    for n in range(64):
        text += f"ld.global.u16 %h0, [%d61+{4 * n}];\ncvt.f32.f16 %r1, %h0;\ncvt.f32.bf16 %r2, %h0;\n"
        text += "cvt.rn.f16x2.e4m3x2 %r3, %h0;\n"
        text += "".join(f"st.global.u32 [%d61+{4 * n + 256 * k}], %r{k};\n" for k in (1, 2, 3))
    with emulated():
        launch(text, memory, 1024)
    halves = memory[:, :64].astype(np.uint16).ravel()
    bytes_ = np.array([of.e4m3(byte) for byte in range(256)], np.float16)
    pairs = np.stack([bytes_[halves & 0xFF], bytes_[halves >> 8]], 1)
    for found, expected in (
        (memory[:, 64:128].ravel().view(np.float32), halves.view(np.float16).astype(np.float32)),
        (memory[:, 128:192].ravel().view(np.float32), (halves.astype(np.uint32) << 16).view(np.float32)),
        (memory[:, 192:].ravel().view(np.float16).reshape(-1, 2), pairs),
    ):
        is_nan = np.isnan(expected)
        assert (np.isnan(found) == is_nan).all()
        assert found[~is_nan].tobytes() == expected[~is_nan].tobytes()


# type, pieces -> as a move packs and unpacks them
PACKS = {("b32", 2): ("r", "h"), ("b64", 2): ("d", "r"), ("b64", 4): ("d", "h")}


@pytest.mark.parametrize("type_, pieces", PACKS)
def test_moves_of_pieces(type_, pieces):
    """The first one is the lowest."""
    whole, piece = PACKS[type_, pieces]
    count = of.bits_of(type_)
    memory = np.array([[random.Random(t).getrandbits(count), 0, 0, 0, 0, 0] for t in range(THREADS)], np.uint64)
    names = [f"%{piece}{n}" for n in range(pieces)]
    text = f"mad.wide.u32 %d61, %r60, 48, %d60;\nld.global.{type_} %{whole}20, [%d61];\n"
    text += f"mov.{type_} {{{', '.join(names)}}}, %{whole}20;\nmov.{type_} %{whole}21, {{{', '.join(names[::-1])}}};\n"
    text += f"st.global.{type_} [%d61+8], %{whole}21;\n"
    with emulated():
        launch(text, memory)
    bits = count // pieces
    for given, turned, *_ in memory.tolist():
        parts = [given >> bits * n & (1 << bits) - 1 for n in range(pieces)]
        assert turned == sum(part << bits * n for n, part in enumerate(parts[::-1]))


# ---- memory

# of a thread: in global memory %d61, in shared memory %r61
PLACES = "mad.wide.u32 %d61, %r60, 96, %d60;\nmul.lo.u32 %r61, %r60, 32;\n"
PLACES += "mov.u32 %r62, memory;\nadd.u32 %r61, %r61, %r62;\n"
ROW = 96  # bytes of a thread: 32 that are read, or written around, then its registers


def type_bytes(type_: str) -> int:
    return of.bits_of(type_) // 8


def registers(name: str, names: list[str]) -> str:
    """Braces may be around one, too."""
    return names[0] if len(names) == 1 and len(name) % 2 else "{" + ", ".join(names) + "}"


def loads(name: str, shared: bool) -> str:
    """All bytes of a thread's row that the registers have, of 64 bits and of the type's own: both must be extended."""
    type_, count = name.split(".")[-1], {"v2": 2, "v4": 4}.get(name.split(".")[-2], 1)
    text = PLACES
    if shared:
        text += "".join(f"ld.global.u64 %d0, [%d61+{n}];\nst.shared.u64 [%r61+{n}], %d0;\n" for n in (0, 8, 16, 24))
    at = "given+16" if ".param" in name else "%r61+16" if shared else "%d61+16"
    kinds = ["r"] if type_ == "f32" else ["d"] if type_bytes(type_) == 8 else ["d", "r"]
    for n, kind in enumerate(kinds):
        names = [f"%{kind}{10 * n + k}" for k in range(count)]
        text += f"{name} {registers(name, names)}, [{at}];\n"
    for k in range(count):
        text += f"cvt.u64.u32 %d{k}, %r{k};\n" if type_ == "f32" else ""
        text += f"st.global.u64 [%d61+{32 + 8 * k}], %d{k};\n"
        text += f"st.global.u32 [%d61+{64 + 4 * k}], %r{10 + k};\n" if len(kinds) > 1 else ""
    return text


def check_load(name: str) -> None:
    words, threads = name.split("."), 3
    type_, count = words[-1], {"v2": 2, "v4": 4}.get(words[-2], 1)
    memory = np.random.default_rng(len(name)).integers(0, 256, (threads, ROW), np.uint8)
    given = memory.copy()
    if words[1] == "param":
        text = HEAD.replace("(.param .u64 given)", "(.param .align 16 .b8 given[48])") + loads(name, False)
        parameters = (ctypes.c_uint8 * 48)(*struct.pack("<Q", memory.ctypes.data), *given[0, 8:48].tolist())
        library().emulator_ptx(f"{text}ret;\n}}\n".encode())
        library().emulator_allow(memory.ctypes.data, memory.nbytes)
        called(library().emulator_launch(b"form", (ctypes.c_uint32 * 5)(1, 1, 1, threads, 0), parameters, 48))
        run()
    else:
        launch(loads(name, words[1] == "shared"), memory, threads)
    for t in range(threads):
        row = given[0 if words[1] == "param" else t].tobytes()
        for k in range(count):
            size = type_bytes(type_)
            bits = int.from_bytes(row[16 + size * k :][:size], "little")
            expected = of.read(bits, type_.replace("f", "u")) & (1 << 64) - 1
            assert int.from_bytes(memory[t, 32 + 8 * k :].tobytes()[:8], "little") == expected, name
            if size < 8 and type_ != "f32":
                assert int.from_bytes(memory[t, 64 + 4 * k :].tobytes()[:4], "little") == expected & 0xFFFFFFFF, name


def check_store(name: str) -> None:
    """The type's bytes and no others, cut from registers of 64 bits."""
    words, threads = name.split("."), 3
    type_, count = words[-1], {"v2": 2, "v4": 4}.get(words[-2], 1)
    size, shared = type_bytes(type_), words[1] == "shared"
    memory = np.random.default_rng(len(name)).integers(0, 256, (threads, ROW), np.uint8)
    given = memory.copy()
    kind = "r" if type_ == "f32" else "d"
    text = PLACES
    text += "".join(f"ld.global.u64 %d{k}, [%d61+{32 + 8 * k}];\ncvt.u32.u64 %r{k}, %d{k};\n" for k in range(count))
    there = [f"ld.global.u64 %d20, [%d61+{n}];\nst.shared.u64 [%r61+{n}], %d20;\n" for n in (0, 8, 16, 24)]
    back = [f"ld.shared.u64 %d20, [%r61+{n}];\nst.global.u64 [%d61+{n}], %d20;\n" for n in (0, 8, 16, 24)]
    names = [f"%{kind}{k}" for k in range(count)]
    store = f"{name} [{'%r61' if shared else '%d61'}+{32 - size * count}], {registers(name, names)};\n"
    launch(text + ("".join(there) + store + "".join(back) if shared else store), memory, threads)
    for t in range(threads):
        row = bytearray(given[t].tobytes())
        for k in range(count):
            row[32 - size * (count - k) : 32 - size * (count - k - 1)] = given[t, 32 + 8 * k :].tobytes()[:size]
        assert memory[t].tobytes() == bytes(row), name


ATOMIC = {
    **{
        "add": lambda old, a: old + a,
        "min": min,
        "max": max,
        "and": lambda old, a: old & a,
        "or": lambda old, a: old | a,
    },
    "exch": lambda old, a: a,
}


def check_atomic(name: str) -> None:
    """One of a thread's own word: what it was, and what it is then."""
    words, type_, threads = name.split("."), name.split(".")[-1], 24
    shared, tells, op = "shared" in words, words[0] == "atom", words[-2]
    size, drawn = type_bytes(type_), random.Random(name)
    count = 8 * size
    some = [x for x in (0, 1, (1 << count) - 1, 1 << count - 1, (1 << count - 1) - 1)]
    rows_ = [[drawn.choice([*some, drawn.getrandbits(count)]) for _ in range(3)] + [5] for _ in range(threads)]
    for row in rows_[::2]:
        row[1] = row[0]  # what is compared is there
    memory = np.array(rows_, np.uint64)
    kind = {2: "h", 4: "r", 8: "d"}[size]
    text = "mad.wide.u32 %d61, %r60, 32, %d60;\nmul.lo.u32 %r61, %r60, 8;\n"
    text += "".join(f"ld.global.b{count} %{kind}{n}, [%d61+{8 * n}];\n" for n in range(3))
    text += f"st.shared.b{count} [%r61], %{kind}0;\n" if shared else ""
    given = ", ".join(
        [f"%{kind}10"] * tells + ["[%r61]" if shared else "[%d61]", f"%{kind}1"] + [f"%{kind}2"] * (op == "cas")
    )
    text += f"{name} {given};\n" + (f"st.global.b{count} [%d61+24], %{kind}10;\n" if tells else "")
    text += f"ld.shared.b{count} %{kind}11, [%r61];\nst.global.b{count} [%d61], %{kind}11;\n" if shared else ""
    launch(text, memory, threads)
    for (old, a, b, _), (new, _, _, told) in zip(rows_, memory.tolist(), strict=True):
        signed = [of.read(x, type_) for x in (old, a)]
        expected = (b if old == a else old) if op == "cas" else ATOMIC[op](*signed) & (1 << count) - 1
        assert new == expected and told == (old if tells else 5), (name, old, a, b)


KINDS = {"ld": check_load, "st": check_store, "atom": check_atomic, "red": check_atomic}


def test_loads_stores_and_atomics():
    with emulated():
        done = [KINDS[name.split(".")[0]](name) for name in forms() if name.split(".")[0] in KINDS]
    assert len(done) > 1000
