"""The parts of the gates that need no server: data sets, divergences, prompts."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from bench.quality import (
    arithmetic,
    cancelled_requests,
    corruption_soak,
    gates,
    greedy,
    in_flight,
    logit_oracle,
    needle,
    soak_state,
    tool_calls,
    whole,
)
from bench.quality.verdict import too_few
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint, Interval
from bench.serving.prompts import ASSISTANT, BEGIN, USER, PromptSource, prose, task


def test_the_shipped_problems_are_right_and_stay_the_same():
    problems = arithmetic.shipped_problems()
    assert len({problem.question for problem in problems}) == arithmetic.NUM_SHIPPED
    assert all(problem.answer > 0 for problem in problems)
    first = problems[0]
    assert first.question == "Elif has 35 apples and buys 4 bags of 28 apples. How many apples does Elif have now?"
    assert first.answer == 35 + 4 * 28 and arithmetic.number_in(first.worked) == first.answer


@pytest.mark.parametrize(
    ("text", "number"),
    [("so #### 1,234", 1234), ("#### 5 and 6", 5), ("it is 3.5", 3.5), ("7 or 8", 8), ("none", None)],
)
def test_the_number_of_an_answer(text, number):
    assert arithmetic.number_in(text) == number


def test_gsm8k_from_a_file_and_what_can_be_wrong_with_it(serve, tmp_path, capsys):
    data = tmp_path / "test.jsonl"
    server = serve()
    shipped = arithmetic.shipped_problems()[:12]
    lines = [json.dumps({"question": p.question, "answer": p.worked}) for p in shipped]
    data.write_text("\n".join(lines))
    ask = ["arithmetic", "--url", server.url, "--data", str(data)]
    assert gates.main(ask) == gates.PASSED
    assert "7 of 7 right" in capsys.readouterr().out
    for text, message in [
        ("", "is empty"),
        ("{}", ":1 is no GSM8K line"),
        ('{"question": "q", "answer": "none"}', "has no number"),
        ("\n".join(lines[:5]), "nothing left to ask"),
    ]:
        data.write_text(text)
        assert gates.main(ask) == gates.USAGE
        assert message in capsys.readouterr().err
    data.unlink()
    assert gates.main(ask) == gates.USAGE
    assert gates.main(["arithmetic", "--url", server.url, "--lm-eval"]) == gates.USAGE
    assert "pip install lm-eval" in capsys.readouterr().err


@pytest.mark.parametrize(("score", "code", "verdict"), [(0.95, 0, "PASS"), (0.2, 0, "FAIL"), (0, 3, "INCOMPLETE")])
def test_lm_eval_is_handed_the_work(score, code, verdict, serve, tmp_path, monkeypatch):
    """A stand-in for lm-evaluation-harness: what it is called with, and what is made of its result."""
    package = tmp_path / "path/lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--output_path') + 1]) / 'model'\n"
        "folder.mkdir(parents=True)\n"
        f"found = {{'results': {{'gsm8k': {{'exact_match,flexible-extract': {score}}}}}, 'argv': sys.argv}}\n"
        "(folder / 'results_1.json').write_text(json.dumps(found))\n"
        f"sys.exit({code})\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    url = serve().url
    gates.main(["arithmetic", "--url", url, "--lm-eval", "--limit", "9", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "arithmetic.json").read_text())["verdict"] == verdict
    words = json.loads(next((tmp_path / "lm_eval").rglob("results_1.json")).read_text())["argv"]
    assert f"base_url={url}/v1/completions" in words[words.index("--model_args") + 1] and words[-1] == "9"


def test_a_needle_stands_where_it_is_said():
    for depth in needle.DEPTHS:
        prompt, number = needle.question(3000, depth, 1)
        told = prompt.index(f"is {number}.") / len(prompt)
        assert told == pytest.approx(depth, abs=0.05)
        assert prompt.count(number) == 1
        shifted = [needle.question(3000, depth, 1, shift) for shift in range(4)]
        begins = needle.BEGIN + needle.USER
        assert [p.removeprefix(begins).replace(n, number) for p, n in shifted] == [
            front + prompt.removeprefix(begins) for front in ("", "\n", "one\n", "one two\n")
        ]
        assert len({n for _, n in shifted}) == 4, "the answer of the place before is wrong"


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([2], [1], 0)]
)
def test_where_two_answers_part(a, b, place):
    assert greedy.first_difference(a, b) == place


def test_two_bad_choices_that_are_as_likely_as_each_other_are_no_tie(endpoint_of):
    endpoint = endpoint_of()
    best = endpoint.generate([1, 2, 3], 1, top=20, ignore_eos=True).tops[0]
    first, second = best[-2], best[-1]
    assert greedy.judge(endpoint, [1, 2, 3], first[1], second[1], tie=1.0) == (first[0], second[0], False)
    assert greedy.judge(endpoint, [1, 2, 3], best[0][1], best[1][1], tie=10)[2] is True
    assert greedy.judge(endpoint, [1, 2, 3], best[0][1], 12345, tie=10) == (best[0][0], None, False)


@pytest.mark.parametrize(
    ("tops", "tie", "is_tie"),
    [
        ([(-0.5, 1), (-0.75, 2)], 0.25, True),
        ([(-0.75, 2), (-0.5, 1)], 0.25, True),  # whichever chose the better one
        ([(-0.5, 1), (-0.75, 2)], 0.249, False),
        ([(-0.25, 3), (-0.5, 1), (-0.5, 2)], 0.25, True),
        ([(-0.125, 3), (-0.5, 1), (-0.5, 2)], 0.25, False),  # both chose badly
        ([(-0.5, 1)], 9.0, False),
        ([(-0.5, 2)], 9.0, False),
    ],
)
def test_a_tie_is_as_wide_as_it_is_said_to_be(tops, tie, is_tie):
    best = {token: logprob for logprob, token in tops}
    assert greedy.weigh(tops, 1, 2, tie) == (best.get(1), best.get(2), is_tie)


def test_an_answer_that_ends_early_parts_there_and_no_tie_explains_it():
    long, short = Answer([4, 1], "", tops=[[(0.0, 4)], [(0.0, 1)]]), Answer([4], "")
    for pair in ((long, short), (short, long)):
        place = greedy.divergence(None, 3, [9], *pair, tie=99.0)
        assert (place.prompt, place.position, place.tie) == (3, 1, False)
    assert greedy.divergence(None, 3, [9], long, long, tie=0.0) is None
    other = Answer([5, 1], "")
    assert greedy.divergence(None, 0, [9], long, other, tie=99.0).first_logprob == 0.0


def whole_answer(**changes) -> Answer:
    """Four tokens as they were asked for, with the best two of each position."""
    tops = [[(-0.5, n), (-1.0, n + 1)] for n in range(4)]
    given = {"logprobs": [-0.5] * 4, "logprob_ids": [0, 1, 2, 3], "tops": tops, "finish": "length"}
    return Answer([0, 1, 2, 3], "", **(given | changes))


def tops_with(step) -> list:
    return [*whole_answer().tops[:3], step]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"logprobs": [-0.5, -0.5, -0.5, 1e-3], "tops": tops_with([(1e-3, 3), (-1.0, 4)])}, None),  # rounding
        ({"logprobs": [-0.5, -0.5, -0.5005, -0.5]}, None),
        ({"logprobs": [-0.5, -0.5, -0.502, -0.5]}, "token 2 has log-probability -0.5020, and -0.5000 among the best"),
        ({"tops": tops_with([(-0.9, 7), (-1.0, 8)])}, None),  # it is not among them: the gates say what that means
        ({"completion_tokens": 4}, None),
        ({"completion_tokens": 5}, "4 tokens, of which the server counts 5"),
        ({"logprobs": [-0.5, -0.5, -0.5, 2e-3]}, "output position 3: 0.002 is no log-probability: it is above 0"),
        ({"logprobs": [float("nan"), 1.0, -0.5, -0.5]}, "output position 0: nan"),
        ({"logprobs": [-0.5, float("-inf"), -0.5, -0.5]}, "output position 1: -inf"),
        ({"logprob_ids": [0, 1, 2, 9]}, "of other tokens than the answer's"),
        ({"finish": "stop"}, "finish_reason 'stop' where 'length'"),
        ({"tops": tops_with([(-0.5, 3), (-0.5, 4)])}, None),
        ({"tops": tops_with([(-0.5, 3), (-0.4, 4)])}, "do not stand best first"),
        ({"tops": tops_with([(-0.5, 3), (-0.6, 3)])}, "repeat a token, or are more"),
        ({"tops": tops_with([(-0.5, 3), (-0.6, 4), (-0.7, 5)])}, "repeat a token, or are more"),
        ({"tops": tops_with([(0.5, 3), (-0.6, 4)])}, "output position 3: 0.5 is no log-probability"),
        ({"tops": tops_with([(-0.5, 3), (float("nan"), 4)])}, "output position 3: nan"),
    ],
)
def test_what_an_answer_must_be(changes, said):
    found = whole.faults(whole_answer(**changes), 4, "here", logprobs=True, top=2)
    assert found == [] if said is None else len(found) == 1 and said in found[0] and found[0].startswith("here")
    if said:
        with pytest.raises(whole.NotWhole, match="nothing can be judged by this reference: here"):
            whole.demand(whole_answer(**changes), 4, "here", logprobs=True, top=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish": None}, "no finish_reason"),
        ({"finish": "abort", "finish_message": "why"}, "aborted the request: why"),
        ({"finish": "abort"}, "it does not say why"),
        ({"logprobs": [-0.5] * 3}, "3 log-probabilities for 4 tokens"),
        ({"tops": tops_with([])[:3]}, "the 2 best tokens of 3 of 4 positions"),
        ({"tops": tops_with([(-0.5, 3)])}, "position 3: 1 best tokens where 2 were asked for"),
    ],
)
def test_what_lets_nothing_be_judged(changes, said):
    with pytest.raises(whole.NotWhole, match=said):
        whole.faults(whole_answer(**changes), 4, "here", logprobs=True, top=2)


def test_best_tokens_that_are_all_as_likely():
    for count, said in ((whole.FLAT - 1, False), (whole.FLAT, True)):
        answer = whole_answer(tops=[[(-0.5, place + n) for n in range(count)] for place in range(4)])
        found = whole.faults(answer, 4, "here", logprobs=True, top=count)
        assert bool(found) is said and (not said or f"the {count} best tokens are all as likely, -0.5000" in found[0])


def test_an_answer_of_another_length():
    for new in (3, 5):
        assert f"4 tokens where {new} were asked for" in whole.faults(whole_answer(), new, "here")[0]
    bare = whole_answer(logprobs=[], logprob_ids=[], tops=[])
    assert whole.faults(bare, 4, "here") == []  # of what nobody asked nothing is missing


@pytest.mark.parametrize(
    ("ids", "is_stuck"),
    [
        ([1, 2, 3, 7, 7, 7], True),
        ([1, 2, 7, 7], False),  # a half of two
        ([1, 2, 3, 7, 7, 8], False),
        ([0] * 12 + [1, 2, 3, 4] * 3, True),
        ([0] * 12 + [1, 2, 3, 4] * 2 + [1, 2, 3], False),
        ([0] * 15 + [1, 2, 3, 4, 5] * 3, False),  # five are an answer
        (list(range(20)), False),
    ],
)
def test_an_answer_that_is_stuck(ids, is_stuck):
    assert whole.is_stuck(ids) is is_stuck


def test_how_many_answers_may_say_nothing():
    good, stuck = [[n, *range(n, n + 11)] for n in range(8)], [[n, 6, 7, 9, 9, 9] for n in range(3)]
    assert whole.says_nothing([*good[:6], *stuck[:2]]) == ""  # a quarter
    said = whole.says_nothing([*good[:5], *stuck])
    assert "of 8, 3 repeat at most 4 tokens to their end and 0 are the same" in said
    assert "0 repeat at most 4 tokens to their end and 3 are the same" in whole.says_nothing([good[0]] * 4)
    assert "1 repeat" in whole.says_nothing([*good[:5], good[0], good[0], stuck[0]])  # both count


def test_who_ran_at_once():
    times = [Interval(0.0, 2.0), Interval(1.0, 3.0), Interval(2.0, 4.0), Interval(None, None)]
    assert in_flight.most_at_once(times) == 2 and in_flight.most_at_once([]) == 0
    assert in_flight.most_at_once([*times, Interval(1.5, 3.5)]) == 3
    for begin, end, count in ((1.0, 2.0, 2), (2.0, 3.0, 2), (0.0, 2.0, 1), (0.5, 2.5, 0), (2.5, 3.0, 2)):
        assert in_flight.around(times, begin, end) == count, (begin, end)
    assert in_flight.around([Interval(1.0, None), Interval(1.0, 3.0)], 1.0, 3.0) == 1


def test_log_probabilities_are_compared_as_far_as_the_tokens_are_the_same():
    first = Answer([1, 2, 3], "", logprobs=[-0.5, -0.5, -0.5])
    for ids, greatest in (([1, 2, 3], 4.0), ([1, 2, 9], 0.25), ([1, 9, 3], 0.125), ([9, 2, 3], 0.0)):
        other = Answer(ids, "", logprobs=[-0.625, -0.25, -4.5])
        assert greedy.logprob_difference(first, other) == greatest


def wavering(gap, second=2, differs=0.0):
    """Two answers that part by a tie of two tokens, each likelier by half of `gap` where it is chosen."""
    told = (
        [[(-0.4, 5)], [(-0.4, 1), (-0.4 - gap / 2, 2)]],
        [[(-0.4 - differs, 5)], [(-0.4, second), (-0.4 - gap / 2, 1)]],
    )
    return [Answer([5, tops[1][0][1]], "", logprobs=[tops[0][0][0], -0.4], tops=tops) for tops in told]


@pytest.mark.parametrize(
    ("answers", "own"),
    [
        (wavering(0.1), 0.1),
        (wavering(0.1, differs=0.25), 0.25),
        (wavering(0.1, second=9), math.inf),  # a token that the other has not among its best
        ([wavering(0.1)[0], wavering(0.1, differs=0.25)[0]], 0.0),
        ([Answer([5, 1], "", logprobs=[-0.4, -0.4]), Answer([5, 1], "", logprobs=[-0.4, -0.6])], 0.2),
        ([Answer([5, 1], ""), Answer([5, 2], "")], math.inf),  # log-probabilities that are not told
    ],
)
def test_who_wavers_is_excused_for_three_times_that_and_no_more(answers, own, monkeypatch):
    """A server that takes either of two equal tokens may have a fault besides."""
    assert greedy.own_difference(*answers) == pytest.approx(own)
    asked = iter(answers * 3)
    endpoint = SimpleNamespace(url="", flush_cache=lambda: None, generate=lambda *_, **__: next(asked))
    monkeypatch.setattr(greedy.whole, "demand", lambda *_, **__: None)  # 20 best of each
    wide = min(own, 1.0)
    gaps = {2.9 * wide: True, 3.1 * wide + 1e-6: own == math.inf, math.inf: False}
    places = [greedy.Divergence(0, 1, 1, 2, -0.4, None if gap == math.inf else -0.4 - gap, False) for gap in gaps]
    assert [greedy.is_own(endpoint, [7], 2, place) for place in places] == list(gaps.values())

    options = gates.parser().parse_args(["cancelled-requests", "--url", "http://127.0.0.1:9"])
    compared = cancelled_requests.Answers(endpoint, options, [[7]])
    monkeypatch.setattr(compared, "stays", lambda *_: True)
    after = Answer([5, 3], "", logprobs=[-0.4, -2.0] if answers[0].logprobs else [])
    for place, is_own in zip(places, gaps.values(), strict=True):
        monkeypatch.setattr(greedy, "divergence", lambda *_, place=place: place)
        found, ties, doubt = compared.changes(*([one] for one in (*answers, after)))
        assert (len(found), ties, bool(doubt)) == (not is_own, 0, is_own)


@pytest.mark.parametrize(("wrong", "asked"), [((), [0]), ((2,), [0, 3]), ((0, 5), [0, 1]), ((1, 2, 3), [0, 2, 3, 4])])
def test_every_position_is_compared_once_from_the_references_own_prefix(wrong, asked):
    best = [(-float(n), n) for n in range(20)]
    reference, seen = Answer(list(range(6)), "", tops=[best] * 6), []

    class Candidate:
        def flush_cache(self):
            seen.append("emptied")

        def generate(self, prompt, new, **_):
            begin = len(prompt) - 2
            seen.append(begin)
            assert prompt == [90, 91, *range(begin)] and new == 6 - begin
            ids = [19 if n in wrong else n for n in range(begin, 6)]
            given = {"logprobs": [-float(n) for n in ids], "logprob_ids": ids, "finish": "length"}
            return Answer(ids, "", tops=[best] * new, **given)

    found = logit_oracle.Alignment()
    first, faults = logit_oracle.align(Candidate(), [90, 91], reference, found)
    assert (found.positions, found.same_token, found.lost) == (6, 6 - len(wrong), 0) and faults == []
    assert seen == [one for begin in asked for one in ("emptied", begin)]
    assert first.startswith(f"position {wrong[0]}: reference chose {wrong[0]}") if wrong else first == ""


def test_positions_that_no_rounding_explains():
    best = [(-float(n), n) for n in range(20)]
    right = whole_answer(tops=[best] * 4)
    assert logit_oracle.position_faults(1, right, right, 1, 5) == []
    assert "only 4 of the best 20" in logit_oracle.position_faults(1, right, right, 1, 4)[0]
    other = Answer([0, 30, 2, 3], "", tops=[best] * 4)
    (found,) = logit_oracle.position_faults(1, right, other, 1, 20)
    assert found == "position 1: the reference has the candidate's token 30 not among its best 20"
    (found,) = logit_oracle.position_faults(1, other, right, 1, 20)
    assert found == "position 1: the candidate has the reference's token 30 not among its best 20"


def test_alignment_counts_by_hand():
    found = logit_oracle.Alignment()
    found.add([(-0.5, 7), (-1.0, 8)], [(-0.75, 7), (-1.5, 9)], True)
    found.add([(-0.5, 7), (-1.0, 8)], [(-0.5, 8), (-0.9, 7)], False)
    figures = found.figures()
    assert figures["positions"] == 2 and figures["token_match"] == 0.5 and figures["top1_overlap"] == 0.5
    assert figures["top5_overlap"] == 0.75
    # the candidate does not list token 8 at first: then it has at most the -1.5 of its last
    assert figures["logprob_error_mean"] == pytest.approx((0.25 + 0.5 + 0.4 + 0.5) / 4)
    assert figures["logprob_error_max"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "faults", "passed"),
    [
        ({}, [], True),
        ({"same_token": 93}, [], False),
        ({"overlap": {1: 100.0, 5: 100.0, 20: 89.9}}, [], False),
        ({"error_sum": 100.1}, [], False),
        ({"error_sum": float("nan")}, [], False),
        ({"positions": 0, "weighed": 0}, [], False),
        ({}, ["position 3: no rounding explains it"], False),
    ],
)
def test_the_oracles_bars(changes, faults, passed, monkeypatch):
    """Each is met to the last position; one more is a failure, whatever the others say."""
    exact = {"positions": 100, "same_token": 98, "weighed": 2000, "error_sum": 100.0}
    exact |= {"overlap": {1: 100.0, 5: 100.0, 20: 90.0}} | changes
    itself = logit_oracle.Alignment(100, 100, 2000, 0.0, overlap=dict.fromkeys((1, 5, 20), 100.0))
    compared = [(itself, [], []), (logit_oracle.Alignment(**exact), faults, ["parted"])]
    monkeypatch.setattr(logit_oracle, "compare", lambda *_: compared.pop())
    ids = [{"prompt": [n], "answer": {"ids": [n, n + 1, n + 2, n + 3]}} for n in range(8)]
    monkeypatch.setattr(logit_oracle, "reference_of", lambda *_: {"entries": ids})
    monkeypatch.setattr(logit_oracle.saved, "record", lambda *_: {})
    options = gates.parser().parse_args(["logit-oracle", "--url", "http://127.0.0.1:9", "--reference", "x"])
    found = logit_oracle.run(options)
    assert found.passed is passed and not found.incomplete and found.findings == [*faults, "parted"]


@pytest.mark.parametrize(
    ("changes", "own", "said"),
    [
        ({"same_token": 97}, {}, "97 of 100 is below the bar, 98%"),
        ({"same_token": 93}, {"same_token": 97}, "against itself: greedy tokens that match"),
        ({"same_token": 93}, {"same_token": 93, "wide": 2}, "against itself: greedy tokens that match"),
        ({"same_token": 93}, {"same_token": 93, "wide": 3}, ""),  # it is wrong at random
        ({"error_sum": 100.1}, {"error_sum": 101.0}, "against itself: the mean error"),
        ({"error_sum": 100.1}, {"same_token": 97}, ""),
        ({"same_token": 93, "error_sum": 100.1}, {"error_sum": 101.0}, ""),
    ],
)
def test_what_the_oracle_cannot_hold_against_a_candidate(changes, own, said, monkeypatch):
    """A bar that it misses against itself, too, or by chance; not one of two."""
    exact = {"positions": 100, "same_token": 100, "weighed": 2000, "error_sum": 0.0}
    exact |= {"overlap": {1: 100.0, 5: 100.0, 20: 100.0}}
    compared = [(logit_oracle.Alignment(**exact | one), [], []) for one in (own, changes)]
    monkeypatch.setattr(logit_oracle, "compare", lambda *_: compared.pop())
    monkeypatch.setattr(logit_oracle, "reference_of", lambda *_: {"entries": []})
    monkeypatch.setattr(logit_oracle.saved, "record", lambda *_: {})
    options = gates.parser().parse_args(["logit-oracle", "--url", "http://127.0.0.1:9", "--reference", "x"])
    found = logit_oracle.run(options)
    assert found.passed is False and (said in found.incomplete if said else not found.incomplete), found


@pytest.mark.parametrize("bar", [0.5, 0.9, 0.98])
def test_few_that_are_wrong_say_nothing(bar):
    """Exactly those that a server at the bar has in one run of a hundred, or more seldom, fail it."""

    for asked in (1, 5, 55):
        each = [math.comb(asked, k) * bar**k * (1 - bar) ** (asked - k) for k in range(asked + 1)]
        below = [right for right in range(asked + 1) if right < bar * asked]
        told = [right for right in below if not too_few(right, asked, bar)]
        assert told == [right for right in below if sum(each[: right + 1]) < 0.01], asked
        assert not any(too_few(right, asked, bar) for right in range(len(below), asked + 1))
    assert too_few(0, 0, bar) == too_few(3, 4, 1.0) == too_few(1000, 1319, 0.9) == "" and too_few(1180, 1319, 0.9)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("The number is 12,345.", {"12345"}),
        ("12 345", {"12345"}),
        ("12\u202f345 and 12345", {"12345"}),
        ("12345 or 11111", {"12345", "11111"}),
        ("12345 22222", {"12345", "22222"}),
        ("1,2345", {"1", "2345"}),
        ("no", set()),
    ],
)
def test_a_number_may_be_written_with_its_thousands_apart(text, numbers):
    assert needle.numbers_in(text) == numbers


@pytest.mark.parametrize(
    ("entries", "changes", "said"),
    [
        (8, {}, ""),
        (8, {"ended": "lost"}, "lost"),
        (8, {"changed": "flag x"}, "not the one that began: flag x"),
        (0, {}, "no answer came in this run"),
        (8, {"failed": True}, "1 requests have failed in this soak, the first: request 3: 500"),
        (8, {"same": 2}, ""),
        (8, {"same": 8}, "7 of 8 answers"),
        (8, {"unnamed": 2}, ""),
        (8, {"unnamed": 3}, "3 of 8 answers do not name the case"),
        (8, {"open": 4}, ""),
        (8, {"open": 5}, "5 of 8 answers that stopped by themselves do so within a sentence: too few to say"),
    ],
)
def test_what_leaves_a_soak_unfinished(entries, changes, said, tmp_path):
    state = soak_state.State(tmp_path / "soak.jsonl", {"flags": {"a": 1}})
    for number in range(entries):
        digest = "same" if number < changes.get("same", 0) else str(number)
        is_named = number >= changes.get("unnamed", 0)
        ends = {"finish": "stop", "is_open": number < changes.get("open", 0)}
        state.add({"number": number, "output_tokens": 9, "digest": digest, "marks": [], "is_named": is_named} | ends)
    if changes.get("failed"):
        state.add({"number": 3, "failed": "500"})
    found = corruption_soak.unfinished(state, changes.get("ended", ""), changes.get("changed", ""))
    assert said in found if said else found == ""


@pytest.mark.parametrize(
    ("strays", "opens", "said"),
    [
        (0, 0, []),
        (2, 10, []),  # too few to speak of a share; half of those that stopped
        (3, 0, ["letters of a foreign script in 3 of 100 answers"]),
        (0, 15, []),  # of 20; half of those that stop so have 15 of them in one run of fifty
        (0, 16, ["16 of 20 answers that stopped by themselves"]),
    ],
)
def test_what_all_answers_show_together(strays, opens, said):
    answers = [
        {"stray_letters": int(n < strays), "is_open": n < opens, "finish": "stop" if n < 20 else "length"}
        for n in range(100)
    ]
    found = corruption_soak.faults_of_all(answers)
    assert len(found) == len(said) and all(text.startswith(begin) for text, begin in zip(found, said, strict=True))


def test_whose_answer_a_text_is():
    cases = {"123456": 4, "12345": 5, "77": 6}
    marks_of = corruption_soak.whose_marks
    assert marks_of("Case 123456: it was", "", "123456", cases) == []
    assert marks_of("Case 77: a count of things; Case 999999 is nobody's", "", "123456", cases) == []
    assert marks_of("Case 12345: it was", "", "123456", cases) == ["case 12345 is request 5's, not this one's"]
    prompt, _ = corruption_soak.request(4, 1, 300)
    assert f'"Case {corruption_soak.case(4, 1)}:"' in prompt
    document = prompt.split("\n\n")[0] if "\n\n" in prompt else prompt
    assert "its own prompt again" in marks_of(prompt.split("｜>", 2)[2], prompt, "1", cases)[0]
    own = " ".join(f"word{n}" for n in range(40))
    assert marks_of(f"{own} {' '.join(document.split()[:12])}", prompt, "1", cases) == []


@pytest.mark.parametrize("case", tool_calls.CASES, ids=lambda case: case.name)
def test_a_case_asks_with_its_tools(case):
    body = tool_calls.body_of(case, "m")
    assert ("tools" in body) == (case.cities is not None)
    assert body["chat_template_kwargs"] == {"thinking": case.thinking}


def test_prompts_have_the_length_asked_for_and_differ():
    tokens = {}

    def tokenize(text):
        return [tokens.setdefault(word, len(tokens)) for word in text.split()]

    for source in (PromptSource("text", tokenize), PromptSource("random")):
        for length in (1, 5, 40, 1000):
            first, second = source.ids(length, 1), source.ids(length, 2)
            assert len(first) == len(second) == length and (first != second or length < 20)
            assert source.ids(length, 1) == first
            ends = source.end(length, 1), source.end(length, 2)
            assert len(source.beginning(length, 1)) == len(ends[0]) == length and (ends[0] != ends[1] or length < 20)
    first = PromptSource("text", str.split).ids(60, 1)
    assert first[0].startswith(BEGIN + USER) and first[-1].endswith(ASSISTANT) and first.count(first[0]) == 1
    assert prose(50, 1) != prose(50, 2) and task(1) != task(2)
    with pytest.raises(ValueError, match="need a tokenizer"):
        PromptSource("text")
    with pytest.raises(ValueError, match="must be text or random"):
        PromptSource("prose")


@pytest.mark.parametrize("url", ["https://h", "ftp://h:1", "http://"])
def test_an_address_must_be_http(url):
    with pytest.raises(ValueError, match="http://host:port"):
        Endpoint(url)
