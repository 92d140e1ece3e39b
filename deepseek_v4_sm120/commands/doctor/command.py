"""`doctor`: gather, check, print."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from deepseek_v4_sm120.commands import console
from deepseek_v4_sm120.commands.disclosure import API_KEY
from deepseek_v4_sm120.commands.doctor import (
    cpu_checks,
    facts,
    gpu_checks,
    gpu_health,
    host_checks,
    http_get,
    network_checks,
    probe,
    server,
    software_checks,
)
from deepseek_v4_sm120.commands.doctor.finding import FAIL, Finding

PROBE_SECONDS = 150.0
PROBE_MIB = 1024  # of each card: a CUDA context and buffers; the sums take another one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="also ask the running server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--api-key", help=f"of that server; others can read it here: better the variable {API_KEY}")
    parser.add_argument("--quick", action="store_true", help="no copies on the GPUs; of --out what takes seconds")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--out", metavar="FILE", help="one file for an issue: this, status, selftest, calibrate and a server's times"
    )
    parser.add_argument("--log", metavar="FILE", help="with --out: the server's log; its start and faults go in")
    parser.add_argument("--profile", metavar="FILE", help="with --out: calibrate's file (else calibrate is run)")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 when a check FAILs; warnings and checks that could not run do not count."""
    if arguments.api_key is not None and arguments.url is None:
        raise console.CommandError("`--api-key` is that of a running server, so it wants --url")
    if arguments.out is not None:
        from deepseek_v4_sm120.commands.doctor import attached  # which asks us in turn

        return attached.run(arguments)
    for name in ("log", "profile"):
        if getattr(arguments, name) is not None:
            raise console.CommandError(f"--{name} is for the file that --out writes")
    _, findings = look(arguments)
    if arguments.json:
        console.print_json({"findings": [asdict(f) for f in findings]})
    else:
        show(findings)
    return int(any(f.state == FAIL for f in findings))


def look(arguments: argparse.Namespace) -> tuple[facts.Facts, list[Finding]]:
    """What there is, and what is to be said of it; with --url of the server, too."""
    answers = None
    if arguments.url is not None:  # first: a dead server is told at once
        answers = server.ask(arguments.url, arguments.api_key or os.environ.get(API_KEY))
    port = None if arguments.url is None else http_get.port_of(arguments.url)
    found = facts.gather(Path("/"), os.environ, port=port)
    if answers is not None:
        found.is_serving, found.hosts = True, answers.get("nnodes")
    if arguments.quick:
        found.probe_problem = "not tried: --quick"
    elif found.smi.gpus:
        found.probe, found.probe_problem = _probe(found)
    findings = examine(found)
    if answers is not None:
        variables = next(iter(found.server_environ.values()), None)
        findings += list(server.checks(replace(answers, applied=applied(found), variables=variables)))
    return found, findings


def _probe(found: facts.Facts) -> tuple[dict | None, str | None]:
    """Beside a running server, known or not, only what fits, and not the sums that its own probe has tried: what it
    lacks ends it."""
    with_sums = not gpu_checks.verdicts_of_servers(found)
    is_known, wanted = found.is_serving or bool((found.status or {}).get("processes")), PROBE_MIB * (1 + with_sums)
    tried = [gpu for gpu in found.smi.gpus if gpu.index in found.used]
    used = [gpu for gpu in tried if is_known or gpu.memory_used > gpu_checks.IDLE_MEMORY_MIB]
    free = min((gpu.memory_free for gpu in used if gpu.memory_total), default=wanted)
    if free < wanted:
        return None, f"not tried beside a running server: it may take {wanted} MiB of a card, which has {free} free"
    console.say(f"doctor: copies between cards and host, {PROBE_SECONDS:.0f} s at most (--quick: none)", sys.stderr)
    return probe.run(facts.python(), PROBE_SECONDS, with_sums)


def applied(found: facts.Facts) -> frozenset[str] | None:
    """Patches that running processes report as applied; None where there are no reports."""
    processes = (found.status or {}).get("processes", [])
    rows = [row for process in processes for row in process["patches"]]
    return frozenset(row["patch"] for row in rows if row["state"] == "APPLIED") if processes else None


CHECKS = (gpu_checks, gpu_health, cpu_checks, host_checks, network_checks, software_checks)


def examine(found: facts.Facts) -> list[Finding]:
    """All findings about this machine."""
    return [f for module in CHECKS for f in module.checks(found)]


def show(findings: list[Finding]) -> None:
    if console.is_rich():
        rows = [(f.state, f.check, f.found, f.cost, f.fix) for f in findings]
        console.print_table("doctor", ("", "check", "found", "costs or breaks", "fix"), rows)
    else:
        width = max(len(f.check) for f in findings)
        for f in findings:
            console.say(f"{f.state:7}  {f.check:{width}}  {f.found}")
            for name, text in (("costs", f.cost), ("fix", f.fix)):
                if text:
                    console.say(f"{'':7}  {'':{width}}    {name}: {text}")
    counts = Counter(f.state for f in findings)
    console.say("\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
