"""What the self-test makes of a card's answers: a wrong one is FAIL, a question that could not be asked NOT RUN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepseek_v4_sm120.commands import selftest
from deepseek_v4_sm120.commands.selftest import card
from deepseek_v4_sm120.specs.check import Failure, NotRun

BEHIND, AHEAD = card.Seen(True, -500), card.Seen(False, 900_000)
CONTROLS = [AHEAD] * 4


# ---- programmatic chains


def test_a_chain_in_order_passes():
    assert "8 of 8" in card.judge_waiting_chain(CONTROLS, [BEHIND] * 8)
    assert "8 of 8" in card.judge_returning_chain(CONTROLS, [BEHIND] * 8)


@pytest.mark.parametrize("chains", [[AHEAD] * 8, [*[BEHIND] * 7, AHEAD], []])
def test_a_third_kernel_that_overtakes_fails(chains):
    with pytest.raises(Failure, match="every kernel here relies"):
        card.judge_waiting_chain(CONTROLS, chains)


def test_a_returning_kernel_that_lets_others_overtake_is_a_failure_where_one_of_ours_returns_so(monkeypatch):
    assert "none relies on it" in card.judge_returning_chain(CONTROLS, [BEHIND, AHEAD])
    monkeypatch.setattr(card, "KERNELS_THAT_RETURN_WITHOUT_WAITING", ("mxfp4_moe down",))
    with pytest.raises(Failure, match=r"1 of 2 chains.*mxfp4_moe down"):
        card.judge_returning_chain(CONTROLS, [BEHIND, AHEAD])
    assert "2 of 2" in card.judge_returning_chain(CONTROLS, [BEHIND, BEHIND])


@pytest.mark.parametrize("controls", [[], [BEHIND] * 4, [AHEAD, AHEAD, BEHIND], [card.Seen(False, -3)]])
@pytest.mark.parametrize("judge", [card.judge_waiting_chain, card.judge_returning_chain])
def test_where_nothing_overlaps_no_order_was_seen(judge, controls):
    with pytest.raises(NotRun, match="launches do not overlap here"):
        judge(controls, [BEHIND] * 8)


ASKED = replace(BEHIND, asked=64)


def test_lines_that_are_read_anew_pass():
    assert "60 blocks and more, of 8 chains" in card.judge_plain_loads(
        CONTROLS, [*[ASKED] * 7, replace(ASKED, asked=60)]
    )


@pytest.mark.parametrize(
    ("seen", "words"), [(replace(ASKED, stale=1), "1 blocks read old lines"), (replace(AHEAD, asked=64), "read ahead")]
)
def test_an_old_line_behind_the_wait_fails(seen, words):
    with pytest.raises(Failure, match=f"{words}.*every kernel here reads so"):
        card.judge_plain_loads(CONTROLS, [*[ASKED] * 7, seen])


@pytest.mark.parametrize("chains", [[], [*[ASKED] * 7, BEHIND]])
def test_where_no_l1_had_an_old_line_nothing_was_asked(chains):
    with pytest.raises(NotRun, match="began too late"):
        card.judge_plain_loads(CONTROLS, chains)
    with pytest.raises(NotRun, match="launches do not overlap here"):
        card.judge_plain_loads([BEHIND] * 4, [ASKED] * 8)


# ---- flags between blocks


def test_values_that_all_come_pass():
    assert "640 values" in card.judge_exchange([640, 0, 0], 640, 0, "mhc")


@pytest.mark.parametrize(
    ("answer", "left"), [([639, 1, 0], 0), ([639, 0, 0], 0), ([600, 0, 1], 0), ([640, 0, 0], 3), ([0, 0, 0], 0)]
)
def test_values_that_come_otherwise_or_not_at_all_fail(answer, left):
    with pytest.raises(Failure, match="mhc cannot be trusted"):
        card.judge_exchange(answer, 640, left, "mhc")


# ---- spins that sleep


def flags_seen(after_ns: int, count: int = 100) -> list[tuple[int, int]]:
    return [(1_000_000 + 10_000 * i, 1_000_000 + 10_000 * i + after_ns) for i in range(count)]


BUSY = [0, 10_000_000]


def test_flags_that_are_seen_soon_pass():
    assert "2.0 us (median), 2.0 at most" in card.judge_sleep(BUSY, flags_seen(2000))


@pytest.mark.parametrize(
    "times", [[*flags_seen(2000), (5, 0)], [*flags_seen(2000), (0, 0)], [], flags_seen(300_000), flags_seen(-2000)]
)
def test_flags_that_are_seen_late_or_never_fail(times):
    with pytest.raises(Failure, match="mhc of many rows"):
        card.judge_sleep(BUSY, times)


@pytest.mark.parametrize("busy", [[0, 1_500_000], [1_500_000, 10_000_000], [0, 0]])
def test_spins_beside_nothing_ask_nothing(busy):
    with pytest.raises(NotRun, match="was not beside"):
        card.judge_sleep(busy, flags_seen(2000))


# ---- sums of the tensor cores


def aligned_sums(bits: int):
    """multiply() of a chip that cuts each term off `bits` below the greatest before it adds: Hopper's wgmma has 13."""

    def multiply(a, b, c):
        terms = torch.cat([a.double()[:, :, None, :] * b.double()[:, None, :, :], c.double()[..., None]], dim=-1)
        unit = torch.exp2(torch.log2(terms.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)).floor() - bits)
        return ((terms / unit).trunc() * unit).sum(-1).float()

    return multiply


@pytest.mark.parametrize("bits", [3, 12, 13, 14, 22, 23])
def test_the_bits_of_a_sum_are_counted(bits):
    assert card.kept_bits(aligned_sums(bits), torch) == bits


def test_too_few_bits_fail():
    assert "23 bits" in card.judge_bits(card.kept_bits(lambda a, b, c: a @ b.mT + c, torch))
    with pytest.raises(Failure, match="12 bits, needed 13.*index_select.*mxfp4_moe"):
        card.judge_bits(card.kept_bits(aligned_sums(12), torch))


@pytest.mark.parametrize("wrong", ["nan", "dropped", "place"])
def test_sums_that_are_wrong_have_no_bits(wrong):
    def multiply(a, b, c):
        if wrong == "place":  # the operands' last place is not read
            return a[..., :-1] @ b[..., :-1].mT + c
        return torch.full_like(c, float("nan")) if wrong == "nan" else a @ b.mT

    with pytest.raises(Failure, match="0 bits"):
        card.judge_bits(card.kept_bits(multiply, torch))


def test_what_the_problems_ask_is_exact_in_e4m3():
    for shift in (1, 13, card.MOST_BITS):
        a, b, _, exact = card.bit_problems(torch, shift)
        assert all(torch.equal(x.to(torch.float8_e4m3fn).float(), x) for x in (a, b))
        assert torch.equal(exact.float().double(), exact)


@pytest.mark.parametrize("bits", [13, 22, 23])
def test_f16_sums_are_asked_for_all_that_fp32_holds(bits):
    multiply = aligned_sums(bits)
    assert card.kept_bits(multiply, torch, card.F16_DEPTH) == bits
    if bits == card.MOST_BITS:
        assert "8192 sums of integers" in card.judge_f16_sums(multiply, torch)
    else:
        with pytest.raises(Failure, match=f"{bits} bits.*needed 23.*reproducible"):
            card.judge_f16_sums(multiply, torch)


def test_f16_sums_that_are_right_of_two_terms_and_wrong_of_many_fail():
    def multiply(a, b, c):  # a chip that has 20 bits where more than two terms meet
        few = (a != 0).sum(-1).amax() <= 2
        return aligned_sums(23 if few else 20)(a, b, c)

    with pytest.raises(Failure, match="23 bits.*sums of integers below 2\\^24 are inexact"):
        card.judge_f16_sums(multiply, torch)


def test_what_is_asked_of_f16_is_exact_in_f16():
    for a, b, _, exact in (card.bit_problems(torch, card.MOST_BITS, card.F16_DEPTH), card.integer_problems(torch)):
        assert all(torch.equal(x.half().float(), x) for x in (a, b))
        assert torch.equal(exact.float().double(), exact) and float(exact.abs().max()) <= 2.0**24


def scaled(a, b, c, a_scale, b_scale):
    """The block-scaled instruction in float64, with 13 bits."""
    powers = torch.exp2((a_scale.double()[:, :, None] - 127) + (b_scale.double()[:, None, :] - 127))
    return aligned_sums(13)(a, b, c.double() / powers).double() * powers


def test_a_right_block_scaled_product_passes():
    assert "small integers exactly" in card.judge_block_scaled(scaled, torch)


@pytest.mark.parametrize("wrong", ["rows", "columns", "bias", "nan", "zero", "rounded"])
def test_a_wrong_block_scaled_product_fails(wrong):
    def multiply(a, b, c, a_scale, b_scale):
        if wrong == "rows":  # row g has the scale of row g + 8
            a_scale = a_scale.roll(8, 1)
        if wrong == "columns":
            b_scale = b_scale.roll(1, 1)
        if wrong == "bias":
            a_scale = a_scale + 1
        found = scaled(a, b, c, a_scale, b_scale)
        if wrong == "rounded":
            return found.bfloat16()
        return found * {"nan": float("nan"), "zero": 0.0}.get(wrong, 1.0)

    with pytest.raises(Failure, match="MXFP8"):
        card.judge_block_scaled(multiply, torch)


# ---- asking


def test_a_probe_that_does_not_come_back_does_not_hang(monkeypatch):
    monkeypatch.setattr(card, "PATIENCE_S", 0.05)
    with pytest.raises(Failure, match="a chain of kernels did not come back within 0.05 s"):
        card.poll(lambda: False, "a chain of kernels")
    answers = iter([False, False, True])
    card.poll(lambda: next(answers), "a chain of kernels")


def test_a_question_that_could_not_be_asked_is_not_run_and_says_why(monkeypatch):
    def not_asked() -> str:
        raise NotRun("launches do not overlap here")

    outcome = selftest.run_check(card.Check("card", "chain", not_asked, ()), {}, False)
    assert (outcome.result, outcome.detail) == (selftest.NOT_RUN, "launches do not overlap here")


def test_the_block_scaled_question_is_for_cards_that_have_it():
    needs = {check.name: check.needs for check in card.checks(quick=True)}
    assert len(needs) == 9 and all("GPU" in names for names in needs.values())
    missing = {"block-scaled FP8": (selftest.NOT_RUN, "NVIDIA H200 has no block-scaled mma.sync")}
    by_name = {check.name: check for check in card.checks(quick=True)}
    outcome = selftest.run_check(by_name["block-scaled mma against software"], missing, False)
    assert outcome.result == selftest.NOT_RUN and "H200" in outcome.detail
