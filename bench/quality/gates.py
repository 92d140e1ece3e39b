#!/usr/bin/env python3
"""The correctness gates: `python3 bench/quality/gates.py GATE --url http://127.0.0.1:30000 [options]`, standard
library only.

  logit-oracle           greedy tokens and the 20 best log-probabilities against a reference server or file
  speculation-equality   the same text with and without speculation, at concurrency 1, 8, 32
  batch-invariance       one prompt alone, and among 31 others
  needle                 a fact in a long document
  arithmetic             GSM8K from a local file, or a small set of our own
  corruption-soak        hours of mixed load, every answer looked at; resumable
  tool-calls             DSML tool calls and reasoning, streamed and not
  long-chats             each turn of a chat the same from the prefix cache and without it, with and without reasoning
  cancelled-requests     a storm of aborts leaves later answers, queue and KV cache as they were
  summary FILE...        a Markdown table of verdicts

Exit codes: 0 passed; 1 failed; 2 wrong usage; 3 no verdict; 4 incomplete: the server was lost on the way, answered
something else than was asked, or ran fewer requests at once than the gate is about, or Ctrl-C; 5 an error of the gate
itself.

A server with an API key: --api-key, or SGLANG_API_KEY in the environment. It is sent to every server that the command
names, and written nowhere.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import tempfile
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.quality import (  # noqa: E402
    arithmetic,
    batch_invariance,
    cancelled_requests,
    corruption_soak,
    greedy,
    logit_oracle,
    long_chats,
    needle,
    speculation_equality,
    tool_calls,
)
from bench.quality.verdict import Verdict, markdown, without  # noqa: E402
from bench.serving.endpoint import KEY_STATUSES, TOTAL_S, ServerError, ServerRefused  # noqa: E402
from bench.serving.help_text import tell_defaults  # noqa: E402
from deepseek_v4_sm120.commands.disclosure import API_KEY, printable  # noqa: E402

GATES = {
    gate.NAME: gate
    for gate in (
        logit_oracle,
        speculation_equality,
        batch_invariance,
        needle,
        arithmetic,
        corruption_soak,
        tool_calls,
        long_chats,
        cancelled_requests,
    )
}
# with random weights these measure nothing: there is no quality to lose
NEED_A_TRAINED_MODEL = {needle.NAME, arithmetic.NAME, corruption_soak.NAME, tool_calls.NAME}
PASSED, FAILED, USAGE, NO_VERDICT, INCOMPLETE, INTERNAL = range(6)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gates = found.add_subparsers(dest="gate", required=True)
    for name, gate in GATES.items():
        one = gates.add_parser(name, description=gate.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        one.add_argument("--url", required=True, help="the server under test")
        one.add_argument("--timeout", type=float, default=600.0, help="seconds of silence before a request is given up")
        one.add_argument("--total-timeout", type=float, default=TOTAL_S, help="seconds a request may take in all")
        one.add_argument("--api-key", help=f"sent with every request; default: {API_KEY} of the environment")
        one.add_argument("--seed", type=int, default=1)
        one.add_argument(
            "--prompts", default="text", choices=("text", "random"), help="random: token ids, no tokenizer"
        )
        one.add_argument("--tie", type=float, default=greedy.TIE, help="log-probabilities this close are a tie")
        one.add_argument(
            "--random-weights", action="store_true", help="the model is not trained: quality has no verdict"
        )
        one.add_argument("--out", type=Path, help="folder for GATE.json")
        gate.add_arguments(one)
        tell_defaults(one)
    summary = gates.add_parser("summary")
    summary.add_argument("files", nargs="+", type=Path)
    return found


def check(options: argparse.Namespace) -> None:
    """Raise ValueError or OSError for what would be found wrong only after the run; put an earlier verdict aside."""
    for name in ("timeout", "total_timeout"):
        if not 0 < getattr(options, name) < math.inf:
            shown = f"{name.replace('_', '-')} must be a number of seconds above 0, got {getattr(options, name):g}"
            raise ValueError(f"{options.gate}: --{shown}")
    if not math.isfinite(options.tie):
        raise ValueError(f"{options.gate}: --tie must be a finite number, got {options.tie:g}")
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=options.out):
                pass
            path = options.out / f"{options.gate}.json"
            if path.is_dir():
                raise IsADirectoryError(f"{path.name} is a folder")
            if path.exists():  # what an earlier run says must not stand for this one, however it ends
                path.replace(f"{path}.old")
        except OSError as error:
            raise ValueError(f"{options.gate}: --out {options.out} cannot be written: {error}") from error


def run(options: argparse.Namespace) -> Verdict:
    """The gate's verdict; a lost server is INCOMPLETE, never a pass. ValueError: wrong usage."""
    try:
        found = GATES[options.gate].run(options)
    except ServerRefused as error:
        if "/v1/tokenize" in str(error) and error.status not in KEY_STATUSES:
            raise ValueError(
                f"no tokenizer: {error}. Start the server with its tokenizer, or take --prompts random"
            ) from error
        key = f". Give the server's key: --api-key, or {API_KEY} in the environment"
        hint = key if error.status in KEY_STATUSES else ""
        found = Verdict(options.gate, None, "", incomplete=str(error) + hint)
    except ServerError as error:
        found = Verdict(options.gate, None, "", incomplete=str(error))
    if options.random_weights:
        found.notes.append("random weights")
        if options.gate in NEED_A_TRAINED_MODEL and not found.incomplete:
            found.passed = None
            found.notes.append("no quality can be measured; this run only shows that the gate works against the server")
    return found


def code_of(found: Verdict) -> int:
    if found.incomplete:
        return INCOMPLETE
    return {True: PASSED, False: FAILED, None: NO_VERDICT}[found.passed]


def judged(options: argparse.Namespace) -> int:
    """Run one gate, print and write what it says; its exit code."""
    try:
        if options.gate == "summary":
            print(markdown({str(path.with_suffix("")): path for path in options.files}))
            return PASSED
        check(options)
        found = run(options)
    except (ValueError, OSError) as error:
        print(f"gates: {printable(without(str(error), options.api_key))}", file=sys.stderr)
        return USAGE
    print(found.text(options.api_key), flush=True)
    if options.out:
        path = options.out / f"{options.gate}.json"
        try:
            found.write(path, "python3 " + shlex.join(sys.argv), options.api_key)
        except OSError as error:  # a pass that is not written down is none
            print(f"gates: {path} could not be written: {error}", file=sys.stderr)
            return FAILED if code_of(found) == FAILED else INCOMPLETE
    return code_of(found)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.api_key = getattr(options, "api_key", None) or os.environ.get(API_KEY) or None
    try:
        return judged(options)
    except KeyboardInterrupt:
        print(f"gates: {options.gate}: interrupted: no verdict", file=sys.stderr)
        return INCOMPLETE
    except Exception:  # Python's own exit code would be that of a gate that failed
        trace = without(traceback.format_exc(), options.api_key)
        print(f"{trace}gates: an error of the gate itself, above; the server has no verdict", file=sys.stderr)
        return INTERNAL


if __name__ == "__main__":
    sys.exit(main())
