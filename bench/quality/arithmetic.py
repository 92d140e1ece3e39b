"""Gate 5: word problems with a number as the answer: GSM8K from a local file, or a small set of our own for smoke.

Few-shot, greedy, the number after "####" counts. A share may be wrong, and what is below the bar by no more than a
server at the bar is by chance is INCOMPLETE (verdict.too_few); an answer without any text is none that a model
gives, and fails whatever the share. `--lm-eval` hands the work to lm-evaluation-harness instead, where that is
installed and has its data at hand. The shipped set only shows that a server can add; it is no benchmark.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.quality import whole
from bench.quality.verdict import Verdict, at_least, check_bar, endpoint_of, too_few
from bench.serving.endpoint import Endpoint

NAME = "arithmetic"
NUM_SHIPPED = 60
STOP = "Question:"
_TEMPLATES = (
    (
        "{n} has {a} apples and buys {b} bags of {c} apples. How many apples does {n} have now?",
        lambda a, b, c: a + b * c,
    ),
    ("A train has {a} coaches with {b} seats each; {c} seats are taken. How many are free?", lambda a, b, c: a * b - c),
    ("{n} reads {a} pages a day for {b} days, then {c} more. How many pages is that?", lambda a, b, c: a * b + c),
    (
        "A box weighs {a} kg. {b} boxes stand on a cart of {c} kg. What is the total weight in kg?",
        lambda a, b, c: a * b + c,
    ),
    (
        "{n} earns {a} coins an hour, works {b} hours and spends {c} coins. How many are left?",
        lambda a, b, c: a * b - c,
    ),
)
_PEOPLE = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farah")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: int | float
    worked: str = ""


def shipped_problems(count: int = NUM_SHIPPED) -> list[Problem]:
    """The same problems in every run and release; every answer is positive."""
    source, found = random.Random("arithmetic 1"), []
    for index in range(count):
        template, solve = _TEMPLATES[index % len(_TEMPLATES)]
        a, b, c = source.randrange(12, 60), source.randrange(3, 13), source.randrange(5, 30)
        text = template.format(n=source.choice(_PEOPLE), a=a, b=b, c=c)
        answer = solve(a, b, c)
        found.append(Problem(text, answer, f"We compute with {a}, {b} and {c}. #### {answer}"))
    return found


def number_in(text: str) -> float | None:
    """The number after ####, else the last one in the text."""
    marked = re.findall(r"####\s*\$?(-?\d[\d,]*(?:\.\d+)?)", text)
    numbers = marked or re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[0 if marked else -1].replace(",", "")) if numbers else None


def read_problems(path: Path) -> list[Problem]:
    """GSM8K's JSONL: {"question", "answer" ending in "#### n"} a line."""
    found = []
    for place, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            answer = number_in(entry["answer"])
            question = entry["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"arithmetic: {path}:{place} is no GSM8K line ({type(error).__name__}: {error})"
            ) from error
        if answer is None:
            raise ValueError(f"arithmetic: {path}:{place} has no number in its answer")
        found.append(Problem(question, answer, entry["answer"]))
    if not found:
        raise ValueError(f"arithmetic: {path} is empty")
    return found


def prompt_of(problem: Problem, examples: list[Problem]) -> str:
    shown = "".join(f"Question: {e.question}\nAnswer: {e.worked}\n\n" for e in examples)
    return f"{shown}Question: {problem.question}\nAnswer:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="GSM8K's test.jsonl; without it the shipped set is asked")
    parser.add_argument(
        "--examples", type=Path, help="GSM8K's train.jsonl, for the few shots; default: the first of --data"
    )
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--limit", type=int, help="ask only so many")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--min-score", type=float, default=0.9)
    parser.add_argument("--lm-eval", action="store_true", help="run lm_eval's gsm8k task against the server instead")


def run_lm_eval(options: argparse.Namespace, endpoint: Endpoint) -> Verdict:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("arithmetic: --lm-eval needs lm-evaluation-harness in this Python (pip install lm-eval[api])")
    folder = (options.out or Path("quality")) / "lm_eval"
    model = f"model={endpoint.models()[0]},base_url={endpoint.url}/v1/completions,num_concurrent={options.concurrency}"
    model += ",tokenizer_backend=None,tokenized_requests=False"  # the server tokenizes; no tokenizer is fetched
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--tasks",
        "gsm8k",
        "--model_args",
        model,
    ]
    command += ["--num_fewshot", str(options.shots), "--output_path", str(folder)]
    command += ["--limit", str(options.limit)] if options.limit else []
    before = set(folder.rglob("results*.json"))
    # lm_eval takes the key from the environment alone; a command line is seen by every user of the machine
    environment = {**os.environ, **({"OPENAI_API_KEY": options.api_key} if options.api_key else {})}
    code = subprocess.run(command, env=environment).returncode
    results = sorted(set(folder.rglob("results*.json")) - before, key=lambda path: path.stat().st_mtime)
    if code or not results:
        return Verdict(NAME, None, "", incomplete=f"lm_eval ended with code {code} and {len(results)} new result files")
    score = json.loads(results[-1].read_text())["results"]["gsm8k"]["exact_match,flexible-extract"]
    return Verdict(
        NAME,
        score >= options.min_score,
        f"lm_eval gsm8k {score:.2%} (bar {options.min_score:.0%})",
        [],
        {"score": score},
    )


def run(options: argparse.Namespace) -> Verdict:
    endpoint = endpoint_of(options)
    at_least(NAME, 1, concurrency=options.concurrency, new=options.new)
    at_least(NAME, 1, limit=1 if options.limit is None else options.limit)
    at_least(NAME, 0, shots=options.shots)
    check_bar(NAME, options.min_score)
    if options.lm_eval and (options.data or options.examples):
        raise ValueError(f"{NAME}: --lm-eval brings its own questions: leave out --data and --examples")
    if options.lm_eval:
        return run_lm_eval(options, endpoint)
    problems = read_problems(options.data) if options.data else shipped_problems()
    examples = read_problems(options.examples)[: options.shots] if options.examples else problems[: options.shots]
    shown = {example.question for example in examples}  # with their answers: they are not asked
    asked = [problem for problem in problems if problem.question not in shown][: options.limit]
    if not asked:
        raise ValueError(
            f"arithmetic: nothing left to ask: {len(problems)} problems, {options.shots} of them shown as examples"
        )

    empty = []

    def answer(problem: Problem) -> str:
        found = endpoint.generate(prompt_of(problem, examples), options.new)
        whole.demand_end(found, problem.question)
        if not found.text.strip():
            empty.append(f"{problem.question[:60]}...: an empty answer ({len(found.ids)} tokens)")
        return found.text.split(STOP)[0]

    with ThreadPoolExecutor(max_workers=options.concurrency) as pool:
        texts = list(pool.map(answer, asked))
    wrong = [(p, text) for p, text in zip(asked, texts, strict=True) if number_in(text) != float(p.answer)]
    score = 1 - len(wrong) / len(asked)
    error = math.sqrt(score * (1 - score) / len(asked))
    findings = [f"{p.question[:60]}...: expected {p.answer:g}, got {text.strip()[-60:]!r}" for p, text in wrong]
    what = str(options.data) if options.data else "the shipped smoke set, no benchmark"
    summary = (
        f"{len(asked) - len(wrong)} of {len(asked)} right (bar {options.min_score:.0%}), {len(empty)} empty, {what}"
    )
    figures = {"score": score, "standard_error": error}
    passed = score >= options.min_score and not empty
    incomplete = "" if empty else too_few(len(asked) - len(wrong), len(asked), options.min_score)
    incomplete += " (of --data, GSM8K's test.jsonl, all: without --limit)" if incomplete else ""
    return Verdict(NAME, passed, summary, empty + findings, figures, incomplete=incomplete)
