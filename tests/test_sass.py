"""The reading of machine code, on a few lines of it."""

import pytest

from tests import sass

BASE, X, WEIGHT = 0x380, 0x0, 0x8
LOAD_POINTERS = [
    "LDC.64 R2, c[0x0][0x380]",  # x
    "LDC.64 R4, c[0x0][0x388]",  # weight
    "S2R R0, SR_TID.X",
    "IMAD.WIDE R2, R0, 0x4, R2",
    "IMAD.WIDE R4, R0, 0x4, R4",
]
X_LOAD, WEIGHT_LOAD = "LDG.E R6, desc[UR4][R2.64]", "LDG.E.CONSTANT R7, desc[UR4][R4.64+0x10]"


def analysed(*lines: str) -> sass.Function:
    code, at = [".text.kernel:"], 0
    for line in lines:
        if line.startswith(".L_"):
            code.append(line)
            continue
        guard, _, rest = line.rpartition("| ")
        code.append(f"        /*{at:04x}*/  {guard} {rest} ;")
        at += 16
    return sass.analyse(sass.split("\n".join(code))["kernel"], BASE, [X, WEIGHT])


def test_loads_are_attributed_and_placed():
    found = analysed(*LOAD_POINTERS, WEIGHT_LOAD, "ACQBULK", X_LOAD, "PREEXIT", "EXIT")
    assert [(a.pointers, a.ahead, a.constant) for a in found.reads] == [({WEIGHT}, True, True), ({X}, False, False)]
    assert (found.ends_without_wait, found.triggers, found.waits) == ([], [True], 1)


def test_a_load_is_ahead_if_any_path_is():
    found = analysed(*LOAD_POINTERS, "@P0| BRA `(.L_x_0)", "ACQBULK", ".L_x_0:", X_LOAD, "EXIT")
    assert [a.ahead for a in found.reads] == [True]
    assert len(found.ends_without_wait) == 1


def test_a_wait_under_a_predicate_is_none():
    found = analysed(*LOAD_POINTERS, "@P0| ACQBULK", X_LOAD, "EXIT")
    assert [a.ahead for a in found.reads] == [True]


def test_an_early_end_without_a_wait_is_found():
    found = analysed("@P0| EXIT", "PREEXIT", "ACQBULK", "EXIT")
    assert len(found.ends_without_wait) == 1
    assert found.triggers == [False]


def test_loops_and_moved_pointers():
    found = analysed(
        *LOAD_POINTERS, "ACQBULK", ".L_x_0:", "MOV.64 R8, R2", "SHFL.IDX PT, R10, R8, RZ, 0x1f", "MOV R11, R9",
        "LDG.E R6, desc[UR4][R10.64]", "IADD3 R2, PT, PT, R2, 0x4, RZ", "@P0| BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip
    assert [a.pointers for a in found.reads] == [{X}]


@pytest.mark.parametrize(
    ("line", "pointer"),
    [
        ("LDGSTS.E.BYPASS.128 [R0+0x100], desc[UR4][R4.64]", WEIGHT),
        ("STG.E desc[UR4][R2.64], R5", X),
        ("ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR4][R2.64], R7", X),
    ],
)
def test_kinds_of_access(line, pointer):
    found = analysed(*LOAD_POINTERS, line, "EXIT")
    assert [a.pointers for a in (found.reads or found.writes)] == [{pointer}]


def test_a_chosen_pointer_is_either():
    found = analysed(*LOAD_POINTERS, "SEL.64 R8, R2, R4, P0", "LDG.E R6, desc[UR4][R8.64]", "EXIT")
    assert [a.pointers for a in found.reads] == [{X, WEIGHT}]


def test_what_is_loaded_is_no_pointer():
    found = analysed(*LOAD_POINTERS, "ACQBULK", "LDG.E.64 R8, desc[UR4][R2.64]", "LDG.E R6, desc[UR4][R8.64]", "EXIT")
    assert [a.pointers for a in found.reads] == [{X}, set()]


def test_bulk_copies():
    found = analysed("LDCU.64 UR6, c[0x0][0x388]", "UBLKCP.S.G [UR8], [UR6], UR10", "ACQBULK", "EXIT")
    assert [(a.pointers, a.ahead) for a in found.reads] == [({WEIGHT}, True)]


def test_a_jump_that_goes_nowhere_known_is_a_fault():
    """What is behind it would not be looked at."""
    with pytest.raises(AssertionError, match="who knows where this goes: .*BRX"):
        analysed(*LOAD_POINTERS, "BRX R4 -0x10", X_LOAD, "EXIT")
