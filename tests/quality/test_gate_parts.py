"""The parts of the gates that need no server: data sets, divergences, prompts."""

from __future__ import annotations

import json

import pytest

from bench.quality import arithmetic, gates, greedy, logit_oracle, needle, tool_calls
from bench.serving.endpoint import Endpoint
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
