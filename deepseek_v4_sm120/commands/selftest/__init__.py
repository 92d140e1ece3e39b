"""`python3 -m deepseek_v4_sm120 selftest`: every operator against its reference on this machine, GPU or not.

Prints one line per check: PASS, FAIL, or NOT RUN and why. Exit status 1 when anything failed, 2 without torch: then
nothing can be looked at. `--require-gpu` makes a failure of what did not run for want of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass

from deepseek_v4_sm120 import OPS, __version__
from deepseek_v4_sm120.commands import console
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.ending import as_interrupts
from deepseek_v4_sm120.commands.selftest import build_and_layout, card
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching.steering import without
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches.table import TABLE
from deepseek_v4_sm120.specs.check import Check, Failure, NotRun

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
NO_GPU = "no GPU"
SHORTAGES = ("out of memory", "alloc_failed")  # CUDA's and torch's words, and cuBLAS's
ENOUGH_MIB = 8 << 10  # of a card: whose memory runs out though so much is free fails


@dataclass(frozen=True)
class Outcome:
    operator: str
    check: str
    result: str
    detail: str
    seconds: float


def checks(quick: bool) -> Iterator[Check]:
    """All checks in the order in which they are run; specs/<operator>.py has those of an operator."""
    yield from build_and_layout.checks(quick)
    yield from card.checks(quick)
    for operator in OPS:
        yield from importlib.import_module(f"deepseek_v4_sm120.specs.{operator}").checks(quick)


def what_is_missing(require_gpu: bool) -> dict[str, tuple[str, str]]:
    """What the checks need and this machine lacks: name -> (result, reason)."""
    without_gpu = FAIL if require_gpu else NOT_RUN
    missing = {}
    if (problem := extension.problem()) is not None:
        missing["module"] = (FAIL, problem)
    import torch

    if not torch.cuda.is_available():
        missing["GPU"] = (without_gpu, f"{NO_GPU}: torch {torch.__version__} sees no CUDA device")
    elif problem is None and (reason := _foreign_gpu()) is not None:
        missing["GPU"] = (without_gpu, reason)
    elif torch.cuda.get_device_capability()[0] != 12:
        missing["block-scaled FP8"] = (NOT_RUN, f"{torch.cuda.get_device_name()} has no block-scaled mma.sync")
    return missing


def _foreign_gpu() -> str | None:
    """Why this GPU cannot run the module, or None."""
    import torch

    capability, built = torch.cuda.get_device_capability(), extension.build_info()["archs"]
    if any(extension.runs_on(arch, capability) for arch in built):
        return None
    found = f"{torch.cuda.get_device_name()} has capability {'.'.join(map(str, capability))}"
    remedy = f"csrc/build_artifact.py --archs {extension.archs_for([capability])} builds for it"
    return f"{found}; the module is built for {' '.join(built)}; {remedy}"


def _shortage(error: Exception) -> str | None:
    """What a check lacked whose card others hold, None where it is the check's own fault."""
    import torch

    if not torch.cuda.is_available() or not any(words in str(error).lower() for words in SHORTAGES):
        return None
    torch.cuda.empty_cache()
    free, total = (part >> 20 for part in torch.cuda.mem_get_info())
    if free + (torch.cuda.memory_reserved() >> 20) > ENOUGH_MIB:  # what the check itself took is still there
        return None
    return f"{free} of {total} MiB are free on this card: end what holds the others, a server, and ask again"


def run_check(check: Check, missing: dict[str, tuple[str, str]], require_gpu: bool) -> Outcome:
    for need in check.needs:
        if need in missing:
            return Outcome(check.operator, check.name, *missing[need], 0.0)
    start = time.perf_counter()
    try:
        result, detail = PASS, check.run()
    except Failure as failure:
        result, detail = FAIL, str(failure)
    except NotRun as reason:
        result, detail = NOT_RUN, str(reason)
    except Exception as error:  # the table goes on; the error is its result
        shortage = _shortage(error)
        result = FAIL if shortage is None or require_gpu else NOT_RUN
        detail = shortage or f"{type(error).__name__}: {error}"
    return Outcome(check.operator, check.name, result, detail, round(time.perf_counter() - start, 3))


def _card() -> str:
    """The one that is asked, by what the host's nvidia-smi -L has of it, too; "" where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ""
    count, card = torch.cuda.device_count(), torch.cuda.get_device_properties(torch.cuda.current_device())
    others = f"; the other {count - 1} by CUDA_VISIBLE_DEVICES" if count > 1 else ""
    return f" on {card.name}, {card.uuid}{others}"


def _told(outcomes: Iterable[Outcome], todo: list[Check], missing: dict[str, tuple[str, str]]) -> list[Outcome]:
    """All of them, each printed as soon as it is there."""
    console.say(f"deepseek_v4_sm120 {__version__} self-test{_card()}")
    operators, names = (max(map(len, column)) for column in zip(*((c.operator, c.name) for c in todo), strict=True))
    told = []
    for o in outcomes:
        is_said = o.result != PASS and any(o.detail == other.detail for other in told)
        detail = "as above" if is_said else o.detail
        console.say(f"{o.operator:{operators}}  {o.check:{names}}  {o.result:{len(NOT_RUN)}}  {detail}")
        told.append(o)
    counts = {result: sum(outcome.result == result for outcome in told) for result in (PASS, FAIL, NOT_RUN)}
    console.say(", ".join(f"{count} {result}" for result, count in counts.items()))
    failed = {o.operator for o in told if o.result == FAIL and not o.detail.startswith(NO_GPU)} & set(OPS)
    if "GPU" in missing:
        console.say(f"No kernel was run: {missing['GPU'][1]}. In a container: docker run --gpus all")
    elif failed and "module" not in missing:
        text = without([name for name in OPS if name in failed], settings().choices, TABLE.fixed)
        console.say(f"DSV4_SM120_SET={text} leaves what failed to SGLang")
    if counts[FAIL] and {"GPU", "module"}.isdisjoint(missing):
        console.say("`doctor --out FILE` writes what finds the cause from afar: please post it")
    return told


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m deepseek_v4_sm120 selftest", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--quick", action="store_true", help="without the larger shapes")
    parser.add_argument("--require-gpu", action="store_true", help="without a GPU that is served, fail")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        raise CommandError(f"torch is not installed for {sys.executable}; run this in SGLang's image")
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise CommandError(f"torch does not load for {sys.executable}: {console.one_line(error)}") from error
    missing = what_is_missing(arguments.require_gpu)
    todo = list(checks(arguments.quick))
    with as_interrupts(), contextlib.closing(_outcomes(todo, missing, arguments)) as outcomes:
        if arguments.json:
            found = list(outcomes)
            console.print_json({"version": __version__, "checks": [asdict(outcome) for outcome in found]})
        else:
            found = _told(outcomes, todo, missing)
    return int(any(outcome.result == FAIL for outcome in found))


def _outcomes(todo: list[Check], missing: dict[str, tuple[str, str]], arguments) -> Generator[Outcome, None, None]:
    if {"GPU", "module"}.isdisjoint(missing):
        from deepseek_v4_sm120.commands.selftest import apart  # which asks us in turn

        return apart.outcomes(todo, arguments.quick, arguments.require_gpu)
    return (run_check(check, missing, arguments.require_gpu) for check in todo)
