"""A reference server's answers in a file: for a candidate that does not fit beside it on the same cards."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path

from bench.quality import greedy, whole
from bench.quality.verdict import Verdict
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint
from deepseek_v4_sm120.patching.json_file import draft, put


def _format(gate: str) -> str:
    return f"{gate} 1"


def record(gate: str, endpoint: Endpoint, prompts: list[list[int]], new: int) -> dict:
    """The answers with their best at every position, JSON-able. NotWhole: one of them is not what was asked for."""
    answers = []
    for index, prompt in enumerate(prompts):
        greedy.forget(endpoint)
        answers.append(endpoint.generate(prompt, new, top=greedy.TOP, ignore_eos=True))
        whole.demand(answers[-1], new, f"{endpoint.url}, prompt {index}", logprobs=True, top=greedy.TOP)
    pairs = zip(prompts, answers, strict=True)
    return {
        "format": _format(gate),
        "entries": [{"prompt": prompt, "answer": asdict(answer)} for prompt, answer in pairs],
    }


def is_file(gate: str, given: str) -> bool:
    """Whether a reference is a saved file, not an address. ValueError: it looks like a file, and there is none."""
    if Path(given).is_file():
        return True
    if "://" not in given and (given.endswith(".json") or "/" in given.rstrip("/")):
        raise ValueError(f"{gate}: there is no file {given}; an address looks like http://host:port")
    return False


def must_be_writable(path: Path) -> None:
    """What cannot be written is known before the run, of which nothing is left there until it has ended well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "--save wants a file, and there is something else", str(path))
    with draft(path.resolve().parent, b""):
        pass


def write(gate: str, path: Path, found: dict) -> Verdict:
    put(path, json.dumps(found))
    return Verdict(gate, None, f"saved {len(found['entries'])} reference answers to {path}")


def read(gate: str, path: Path) -> dict:
    """A file that `gate --save` has written. ValueError: it is none."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != _format(gate):
            raise ValueError(f"its format is {found['format']!r}")
        for entry in found["entries"]:
            answer = Answer(**entry["answer"])
            answer.logprob_ids = answer.logprob_ids or list(answer.ids)  # older files have none
            answer.tops = [[(float(logprob), int(token)) for logprob, token in step] for step in answer.tops]
            whole.demand(answer, len(answer.ids), "a saved answer", logprobs=True, top=greedy.TOP)
            entry["answer"] = asdict(answer)
        if not found["entries"]:
            raise ValueError("it has no answers")
    except (ValueError, KeyError, TypeError, RecursionError, whole.NotWhole) as error:
        raise ValueError(f"{gate}: {path} is no file of {_format(gate)!r}: {error}") from error
    return found
