"""What lanes, warps and copies do together, form by form as in test_forms.py: by the text of the PTX ISA."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.emulator import definitions as of
from tests.emulator.emulated import EmulatorError, at_most, choose, emulated
from tests.emulator.test_forms import forms, launch

ROW = "mad.wide.u32 %d61, %r60, {}, %d60;\n"
ALL, FEW = 0xFFFFFFFF, 0x000FFFFF  # lanes: all, the first twenty


def of_lanes(text: str, given: list[list[int]], results: int, members: int = ALL) -> list[list[int]]:
    """What members have in %r10, ... afterwards; what they are given is in %r0, ..., and the mask in %r40."""
    memory = np.array([[*row, *[77] * results] for row in given], np.uint32)
    count = len(given[0])
    made = ROW.format(4 * (count + results)) + "".join(f"ld.global.u32 %r{n}, [%d61+{4 * n}];\n" for n in range(count))
    made += f"mov.u32 %r40, {members};\nsetp.lt.u32 %p9, %r60, {members.bit_length()};\n@!%p9 bra $done;\n{text}\n"
    made += "".join(f"st.global.u32 [%d61+{4 * (count + n)}], %r{10 + n};\n" for n in range(results)) + "$done:"
    launch(made, memory, len(given))
    return [row[count:] for row in memory.tolist()[: members.bit_length()]]


def source(how: str, lane: int, by: int, width: int) -> int | None:
    """Of a shuffle among each `width` lanes; None: there is none, and a lane has its own."""
    first = lane // width * width
    at = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first + by % width}[how]
    return at if (at >= first if how == "up" else at < first + width) else None


@pytest.mark.parametrize("how", ["up", "down", "bfly", "idx"])
def test_shuffles(how):
    given = [[random.Random(lane).getrandbits(32)] for lane in range(32)]
    with emulated():
        for by in (0, 1, 5, 16, 31):
            for width in (32, 16, 8):
                last = (32 - width) << 8 | (0 if how == "up" else 31)
                text = f"shfl.sync.{how}.b32 %r10|%p1, %r0, {by}, {last}, %r40;\nselp.b32 %r11, 1, 0, %p1;\n"
                text += f"shfl.sync.{how}.b32 %r12, %r0, {by}, {last}, 0xffffffff;"
                for lane, found in enumerate(of_lanes(text, given, 3)):
                    at = source(how, lane, by, width)
                    value = given[lane if at is None else at][0]
                    assert found == [value, int(at is not None), value], (by, width, lane)


REDUCTIONS = {"add": lambda a: sum(a), "min": min, "max": max}
BITWISE = {"and": lambda a, b: a & b, "or": lambda a, b: a | b}


@pytest.mark.parametrize("members", [ALL, FEW])
@pytest.mark.parametrize("kind", ["some", "none", "every"])
def test_what_a_warp_says_and_sums(members, kind):
    """Votes of a predicate and of its opposite, matches, reductions, the elected and who is there."""
    drawn = random.Random(kind)
    given = [
        [{"some": drawn.getrandbits(1), "none": 0, "every": 1}[kind], drawn.choice([3, 1 << 31, drawn.getrandbits(32)])]
        for _ in range(32)
    ]
    names = [name for name in forms() if name.startswith("redux.")]
    text = "setp.ne.u32 %p1, %r0, 0;\nvote.sync.ballot.b32 %r10, %p1, %r40;\nvote.sync.ballot.b32 %r11, !%p1, %r40;\n"
    text += (
        "vote.sync.any.pred %p2, %p1, %r40;\nvote.sync.all.pred %p3, %p1, %r40;\nvote.sync.any.pred %p4, !%p1, %r40;\n"
    )
    text += "".join(f"selp.b32 %r{12 + n}, 1, 0, %p{2 + n};\n" for n in range(3))
    text += "match.any.sync.b32 %r15, %r1, %r40;\nactivemask.b32 %r16;\nelect.sync %r17|%p5, %r40;\n"
    text += "selp.b32 %r18, 1, 0, %p5;\n"
    text += "elect.sync _|%p6, %r40;\nselp.b32 %r19, 1, 0, %p6;\n"
    text += "".join(f"{name} %r{20 + n}, %r1, %r40;\n" for n, name in enumerate(names))
    with emulated():
        found = of_lanes(text, given, 10 + len(names), members)
    there = given[: members.bit_length()]
    said = [row[0] for row in there]
    ballot = sum(bit << lane for lane, bit in enumerate(said))
    sums = []
    for name in names:
        op, type_ = name.split(".")[2:]
        values = [of.read(row[1], type_) for row in there]
        total = values[0]
        for value in values[1:]:
            total = BITWISE[op](total, value) if op in BITWISE else total
        sums.append((REDUCTIONS[op](values) if op in REDUCTIONS else total) & ALL)
    for lane, row in enumerate(found):
        same = sum(int(other[1] == there[lane][1]) << at for at, other in enumerate(there))
        elected = [0, int(lane == 0), int(lane == 0)]
        expected = [
            ballot,
            ballot ^ members,
            int(any(said)),
            int(all(said)),
            int(not all(said)),
            same,
            members,
            *elected,
            *sums,
        ]
        assert row == expected, lane


@pytest.mark.parametrize("masks", ["%r60", "0x0000ffff"])
def test_masks_that_are_not_one_of_all_who_take_part_are_refused(masks):
    """Lanes that say different ones, and lanes that theirs does not name."""
    with emulated(), pytest.raises(EmulatorError, match="mask"):
        of_lanes(f"redux.sync.add.u32 %r10, %r0, {masks};", [[1]] * 32, 1)


@pytest.mark.parametrize("name", ["ldmatrix", "stmatrix"])
def test_matrices(name):
    """Lanes 8 m to 8 m + 7 give the rows of matrix m; of one, lane l has two numbers of row l / 4, transposed of
    column l / 4."""
    for form in (one for one in forms() if one.startswith(name)):
        count, turned = int(form.split("x")[-1].split(".")[0]), "trans" in form
        places = random.Random(form).sample(range(64), 32)  # of 16 bytes, of each lane's row
        numbers = np.arange(512, dtype=np.uint16).reshape(64, 8) * 7 + 5
        fragments = np.array(
            [[random.Random(lane * 4 + m).getrandbits(32) for m in range(4)] for lane in range(32)], np.uint32
        )
        memory = np.concatenate([np.array(places, np.uint32), fragments.ravel(), numbers.ravel().view(np.uint32)])
        text = "mad.wide.u32 %d61, %r60, 4, %d60;\nld.global.u32 %r20, [%d61];\nmov.u32 %r21, memory;\n"
        text += "shl.b32 %r20, %r20, 4;\n"
        text += "add.u32 %r20, %r20, %r21;\nmad.wide.u32 %d62, %r60, 16, %d60;\n"
        text += "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%d62+128];\n"
        text += "mad.wide.u32 %d63, %r60, 32, %d60;\nshl.b32 %r22, %r60, 5;\nadd.u32 %r22, %r22, %r21;\n"
        four, there, back = "{%r30, %r31, %r32, %r33}", "", ""
        for n in (0, 16):
            there += f"ld.global.v4.u32 {four}, [%d63+{640 + n}];\nst.shared.v4.u32 [%r22+{n}], {four};\n"
            back += f"ld.shared.v4.u32 {four}, [%r22+{n}];\nst.global.v4.u32 [%d63+{640 + n}], {four};\n"
        given = "{" + ", ".join(f"%r{m}" for m in range(count)) + "}"
        text += f"{there}bar.sync 0;\n{form} " + (
            f"{given}, [%r20];\n" if name == "ldmatrix" else f"[%r20], {given};\n"
        )
        text += f"bar.sync 0;\n{back}st.global.v4.u32 [%d62+128], {{%r0, %r1, %r2, %r3}};\n"
        with emulated():
            launch(text, memory, 32)
        kept, rows = memory[32:160].reshape(32, 4), memory[160:].view(np.uint16).reshape(64, 8)
        for lane in range(32):
            for m in range(count):
                for h in range(2):
                    row, column = (lane % 4 * 2 + h, lane // 4) if turned else (lane // 4, lane % 4 * 2 + h)
                    place = places[8 * m + row]
                    if name == "ldmatrix":
                        assert int(kept[lane, m]) >> 16 * h & 0xFFFF == numbers[place, column], (form, lane, m)
                    else:
                        assert rows[place, column] == int(fragments[lane, m]) >> 16 * h & 0xFFFF, (form, lane, m)


# ---- products: lanes' fragments as the ISA's figures have them


def place_of_a(bits: int, lane: int, at: int) -> tuple[int, int]:
    """(row, column) of a lane's number."""
    each = 32 // bits  # in a word
    word, inside = divmod(at, each)
    return lane // 4 + 8 * (word % 2), lane % 4 * each + inside + 4 * each * (word // 2)


def place_of_b(bits: int, lane: int, at: int) -> tuple[int, int]:
    each = 32 // bits
    word, inside = divmod(at, each)
    return lane % 4 * each + inside + 4 * each * word, lane // 4


DECODED = {"bf16": of.BF16.decoded, "f16": of.F16.decoded, "e4m3": of.e4m3, "e2m1": lambda byte: of.e2m1(byte >> 2)}


def drawn_number(kind: str, drawn: random.Random) -> int:
    if kind == "e2m1":
        return drawn.getrandbits(4) << 2  # bits 5 to 2 of a byte
    if kind == "e4m3":
        return drawn.choice([bits for bits in range(256) if bits & 0x7F < 0x60])
    return (of.BF16 if kind == "bf16" else of.F16).encoded(Fraction(drawn.randrange(-100, 101), 16) or 0.0)


def product(form: str, scales: tuple = ()):
    """(found, expected) of a product of drawn numbers: [16][8] floats' bits each."""
    words, drawn = form.split("."), random.Random(form + str(scales))
    kind_a, kind_b = [word for word in words if word in DECODED]
    bits = 8 if kind_b == "e4m3" else 16
    depth, each = 256 // bits, 32 // bits
    a = [[0.0] * depth for _ in range(16)]
    b = [[0.0] * 8 for _ in range(depth)]
    table = []
    c = [[drawn.uniform(-1000, 1000) for _ in range(8)] for _ in range(16)]
    c = [[struct.unpack("<f", struct.pack("<f", x))[0] for x in row] for row in c]
    scale_words = [
        [sum(drawn.randrange(120, 135) << 8 * byte for byte in range(4)) for _ in range(2)] for _ in range(32)
    ]
    for lane in range(32):
        words_of_lane = []
        for kind, count, place, to in ((kind_a, 4, place_of_a, a), (kind_b, 2, place_of_b, b)):
            numbers = [drawn_number(kind, drawn) for _ in range(count * each)]
            for at, number in enumerate(numbers):
                row, column = place(bits, lane, at)
                to[row][column] = DECODED[kind](number)
            words_of_lane += [
                sum(n << bits * k for k, n in enumerate(numbers[w * each :][:each])) for w in range(count)
            ]
        places = [(lane // 4 + 8 * (j // 2), lane % 4 * 2 + j % 2) for j in range(4)]
        words_of_lane += [of.F32.encoded(c[row][column]) for row, column in places]
        table.append([*words_of_lane, *scale_words[lane], 0, 0, 0, 0])
    memory = np.array(table, np.uint32)
    text = ROW.format(64) + "".join(f"ld.global.u32 %r{n}, [%d61+{4 * n}];\n" for n in range(12))
    operands = "{%r20, %r21, %r22, %r23}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9}"
    if scales:
        byte_a, lanes_a, byte_b, lane_b = scales
        operands += f", %r10, {{{byte_a}, {lanes_a}}}, %r11, {{{byte_b}, {lane_b}}}"
    text += f"{form} {operands};\n" + "".join(f"st.global.u32 [%d61+{48 + 4 * j}], %r{20 + j};\n" for j in range(4))
    with emulated():
        launch(text, memory, 32)
    found = {}
    for lane, row in enumerate(memory.tolist()):
        for j in range(4):
            found[lane // 4 + 8 * (j // 2), lane % 4 * 2 + j % 2] = row[12 + j]
    expected = {}
    for row in range(16):
        for column in range(8):
            total = sum(Fraction(a[row][k]) * Fraction(b[k][column]) for k in range(depth))
            if scales:
                of_a = scale_words[row % 8 * 4 + 2 * lanes_a + row // 8][0] >> 8 * byte_a & 0xFF
                of_b = scale_words[column * 4 + lane_b][1] >> 8 * byte_b & 0xFF
                total *= Fraction(2) ** (of_a - 127 + of_b - 127)
            total += Fraction(c[row][column])
            expected[row, column] = of.F32.encoded(total or 0.0)
    return found, expected


@pytest.mark.parametrize("form", ["bf16.bf16", "f16.f16", "e4m3.e4m3"])
def test_products(form):
    (name,) = [
        one for one in forms() if one.startswith("mma") and f".f32.{form}.f32" in one and "block_scale" not in one
    ]
    found, expected = product(name)
    assert found == expected


@pytest.mark.parametrize("of_a", ["e4m3", "e2m1"])
def test_products_with_scales(of_a):
    """Each byte of the scales' words, each pair of lanes that has a's and each lane that has b's."""
    (name,) = [one for one in forms() if "block_scale" in one and f".{of_a}.e4m3." in one]
    for scales in ((0, 0, 0, 0), (1, 1, 2, 3), (3, 0, 1, 2), (2, 1, 3, 1)):
        found, expected = product(name, scales)
        assert found == expected, scales
    with pytest.raises(EmulatorError, match="which there are not"):
        product(name, (0, 2, 0, 0))


# ---- copies and barriers


@pytest.mark.parametrize(
    "form",
    [("ca.shared.global", n) for n in (4, 8, 16)] + [("cg.shared.global", 16), ("cg.shared.global.L2::256B", 16)],
)
def test_asynchronous_copies(form):
    """All bytes, or the first ones and zeros; by groups, by all, and by an mbarrier."""
    (way, size), drawn = form, random.Random(str(form))
    waits = {
        "group": "cp.async.commit_group;\ncp.async.wait_group 0;\n",
        "all": "cp.async.wait_all;\n",
        "mbarrier": "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r25];\n$again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r25], 0;\n@!%p1 bra $again;\n",
    }
    for how, wait in waits.items():
        for read in (None, size, size // 2, 0):
            memory = np.array([[drawn.getrandbits(8) for _ in range(32)] for _ in range(32)], np.uint8)
            given = memory.copy()
            text = ROW.format(32) + "mov.u32 %r21, memory;\nshl.b32 %r22, %r60, 4;\n"
            text += "add.u32 %r22, %r22, %r21;\nadd.u32 %r25, %r21, 1024;\n"
            text += "setp.eq.u32 %p2, %r60, 0;\n@%p2 mbarrier.init.shared::cta.b64 [%r25], 32;\nbar.sync 0;\n"
            text += f"cp.async.{way} [%r22], [%d61], {size}{'' if read is None else f', {read}'};\n{wait}"
            text += "".join(
                f"ld.shared.u32 %r1, [%r22+{n}];\nst.global.u32 [%d61+{16 + n}], %r1;\n" for n in range(0, size, 4)
            )
            with emulated():
                launch(text, memory, 32)
            kept = given.copy()
            kept[:, 16 : 16 + size] = 0
            kept[:, 16 : 16 + (size if read is None else read)] = given[:, : size if read is None else read]
            assert (memory == kept).all(), (how, read)


@pytest.mark.parametrize("way, size", [("ca", 32), ("ca", 12), ("cg", 8), ("cg", 4)])
def test_copies_of_other_sizes_are_refused(way, size):
    with emulated(), pytest.raises(EmulatorError, match=f"a copy of {size} bytes"):
        launch(
            f"mov.u32 %r1, memory;\ncp.async.{way}.shared.global [%r1], [%d60], {size};\n", np.zeros(64, np.uint8), 1
        )


def test_copies_in_bulk_and_mbarriers():
    """Who waits for a phase sees the copy's bytes; a phase is over when all have arrived and all bytes are there."""
    memory = np.array([[7 * n for n in range(16)], [0] * 16], np.uint32)
    text = "mov.u32 %r21, memory;\nadd.u32 %r22, %r21, 512;\nsetp.eq.u32 %p1, %r60, 0;\n"
    text += "@%p1 mbarrier.init.shared::cta.b64 [%r22], 4;\nfence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
    text += "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r22], 64;\n"
    text += "@%p1 mbarrier.arrive.shared::cta.b64 %d1, [%r22], 2;\n"
    text += "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%d60], 64, [%r22];\n"
    text += "setp.eq.u32 %p2, %r60, 33;\nmbarrier.test_wait.parity.shared::cta.b64 %p4, [%r22], 1;\n"
    text += "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r22];\n$again:\n"
    text += "mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r22], 0;\n"
    text += "@!%p3 bra $again;\nsetp.gt.u32 %p5, %r60, 15;\n@%p5 bra $done;\nmad.wide.u32 %d61, %r60, 4, %d60;\n"
    text += "shl.b32 %r23, %r60, 2;\nadd.u32 %r23, %r23, %r21;\nld.shared.u32 %r1, [%r23];\n"
    text += "st.global.u32 [%d61+64], %r1;\n$done:\n"
    with emulated():
        for seed in range(8):
            choose(seed=seed, most_instructions=(3, 30)[seed % 2])
            one = memory.copy()
            launch(text, one, 64)
            assert one[1].tolist() == memory[0].tolist()
            with at_most(100_000), pytest.raises(EmulatorError, match="does not end"):  # who does not arrive is missed
                launch(text.replace("%r60, 33;", "%r60, 64;"), one, 64)


@pytest.mark.parametrize("said", [0, 1, 64])
def test_barriers_that_say_what_any_or_all_said(said):
    """Of 64 threads the first so many say yes."""
    memory = np.zeros((64, 4), np.uint32)
    text = (
        ROW.format(16)
        + f"setp.lt.u32 %p1, %r60, {said};\nbar.red.or.pred %p2, 0, %p1;\nbar.red.and.pred %p3, 0, 64, %p1;\n"
    )
    text += "bar.red.and.pred %p4, 1, !%p1;\n"
    text += "".join(f"selp.b32 %r1, 1, 0, %p{2 + n};\nst.global.u32 [%d61+{4 * n}], %r1;\n" for n in range(3))
    with emulated():
        launch(text, memory, 64)
    assert memory[:, :3].tolist() == [[int(said > 0), int(said == 64), int(said == 0)]] * 64


def test_who_arrives_at_a_barrier_goes_on_and_who_waits_sees_what_it_did():
    """One warp only arrives; without it the other one waits for ever."""
    text = "setp.lt.u32 %p1, %r60, 32;\nmov.u32 %r21, memory;\nshl.b32 %r22, %r60, 2;\nadd.u32 %r22, %r22, %r21;\n"
    text += "@!%p1 bra $other;\n"
    text += "mov.u32 %r1, 9;\nst.shared.u32 [%r22], %r1;\nbar.arrive 3, 64;\nbra $done;\n$other:\nbar.sync 3, 64;\n"
    text += "ld.shared.u32 %r1, [%r22+-128];\nmad.wide.u32 %d61, %r60, 4, %d60;\nst.global.u32 [%d61], %r1;\n$done:\n"
    with emulated():
        for seed in range(6):
            choose(seed=seed, most_instructions=3)
            memory = np.zeros(64, np.uint32)
            launch(text, memory, 64)
            assert memory.tolist() == [0] * 32 + [9] * 32
        with pytest.raises(EmulatorError, match="all wait"):
            launch(text.replace("bar.arrive 3, 64;", ""), memory, 64)


def test_what_changes_no_number():
    """Hints, what another memory's users wait for, and waits of a grid that has none in front."""
    names = [
        "setmaxnreg.inc.sync.aligned.u32 232",
        "setmaxnreg.dec.sync.aligned.u32 24",
        "prefetch.global.L2 [%d60]",
        "nanosleep.u32 20",
    ]
    names += [
        "fence.proxy.async.shared::cta",
        "fence.mbarrier_init.release.cluster",
        "griddepcontrol.wait",
        "griddepcontrol.launch_dependents",
    ]
    with emulated():
        assert of_lanes(
            "mov.u32 %r10, %r0;\n" + "".join(f"{name};\n" for name in names), [[lane] for lane in range(32)], 1
        ) == [[lane] for lane in range(32)]
        assert (
            math.prod(of_lanes("mov.u32 %r10, 1;\nbra.uni $there;\nmov.u32 %r10, 2;\n$there:", [[0]] * 32, 1)[0]) == 1
        )
