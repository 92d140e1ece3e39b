#!/usr/bin/env python3
"""Two ways of serving a model, measured against each other, alternating in one session on one host.

  python3 bench/serving/compare.py --change patch --out results/patch \\
    --a-label stock   --a-cmd "python3 -m sglang.launch_server --port 30001 FLAGS" \\
    --b-label patched --b-cmd "PYTHONPATH=build python3 -m sglang.launch_server --port 30001 FLAGS"

The load generator is SGLang's own bench_serving, so run it with SGLang's Python (or name that with --python). A side is
a command, which is started and stopped here, or an address (--a-url) of a server that runs already. Writes
OUT/result.json after every cell, and at the end OUT/report.md and OUT/report.html.

Exit codes: 0 compared; 2 wrong usage; 3 refused, the sides differ in more than --change or in their clocks; 4
incomplete or not everything could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving import cells, identity, machine, plots, report  # noqa: E402
from bench.serving.endpoint import Endpoint  # noqa: E402
from bench.serving.generator_process import Generator, GeneratorFailed  # noqa: E402
from bench.serving.load_generator import PATHS  # noqa: E402
from bench.serving.session import FORMAT, Session, Settings, Side  # noqa: E402

COMPARED, USAGE, REFUSED, INCOMPLETE = 0, 2, 3, 4


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for letter in "ab":
        group = found.add_argument_group(f"side {letter.upper()}")
        group.add_argument(f"--{letter}-label", default=letter.upper(), help="what the reports call it")
        group.add_argument(f"--{letter}-cmd", help="shell command that starts the server in the foreground")
        group.add_argument(f"--{letter}-url", help="its address; default: from --port in the command")
        group.add_argument(f"--{letter}-backend", default="sglang", choices=sorted(PATHS), help="of bench_serving")
        group.add_argument(
            f"--{letter}-pid", type=int, help="with an address on this host: whose environment to look at"
        )
        group.add_argument(f"--{letter}-report", type=Path, help="folder of the server's DSV4_SM120_REPORT")
    found.add_argument("--change", action="append", default=[], metavar="WHAT", help="the one intended change: patch, "
                       "version, model, flag:NAME, env:NAME, nothing (an A/A run); may be repeated")  # fmt: skip
    found.add_argument("--spec", metavar="FLAGS", help="also run both commands with these speculation flags added")
    found.add_argument("--matrix", default="quick", choices=sorted(cells.MATRICES))
    found.add_argument("--only", metavar="WORDS", help="only cells whose name contains one of these, comma-separated")
    found.add_argument("--prompts", default="text", choices=("text", "random"), help="random: token ids, no tokenizer")
    found.add_argument(
        "--natural-end",
        action="store_true",
        help="the model may end its answer (not of streams that a prompt intrudes into)",
    )
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--model", help="the served model's name, checked on both sides")
    found.add_argument("--both-at-once", action="store_true", help="both commands up together (room for both needed)")
    found.add_argument(
        "--python", default=sys.executable, help="an interpreter that has SGLang, for the load generator"
    )
    found.add_argument("--start-timeout", type=float, default=1800.0, metavar="S")
    found.add_argument("--cell-timeout", type=float, default=3600.0, metavar="S")
    found.add_argument("--limit-s", type=float, metavar="S", help="start no round that would not end by then")
    found.add_argument("--title", default="Serving comparison")
    found.add_argument("--note", action="append", default=[], help="a sentence for the reports; may be repeated")
    found.add_argument("--commit", help="of this checkout, where it is a copy without git")
    found.add_argument("--out", type=Path, default=Path("serving_comparison"))
    found.add_argument("--from", dest="from_file", type=Path, help="write the reports of an earlier result.json again")
    return found


def url_of(letter: str, command: str | None, url: str | None) -> str:
    if url is None and command is None:
        raise ValueError(f"side {letter.upper()} needs --{letter}-cmd or --{letter}-url")
    if url is None:
        port = re.findall(r"--port[= ]+(\d+)", command)
        url = f"http://127.0.0.1:{port[-1] if port else 30000}"
    return Endpoint(url).url


def make_sides(options: argparse.Namespace, extra_flags: str) -> tuple[Side, Side]:
    found = []
    for letter in "ab":
        command = getattr(options, f"{letter}_cmd")
        url = url_of(letter, command, getattr(options, f"{letter}_url"))
        if command and extra_flags:
            command = f"{command} {extra_flags}"
        label, backend = getattr(options, f"{letter}_label"), getattr(options, f"{letter}_backend")
        known = getattr(options, f"{letter}_report"), getattr(options, f"{letter}_pid")
        found.append(Side(letter.upper(), label, url, command, backend, *known))
    return found[0], found[1]


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for what cannot work, before anything is started."""
    if not options.change:
        raise ValueError("name the intended change: --change patch, version, model, flag:NAME, env:NAME or nothing")
    identity.check_changes(options.change)
    if options.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {options.rounds}")
    a, b = make_sides(options, "")
    if options.spec and not (a.command and b.command):
        raise ValueError("--spec needs both sides as commands: the flags are added to them")
    if a.url == b.url and (options.both_at_once or not (a.command and b.command)):
        raise ValueError(f"A and B have the same address, {a.url}")
    if bool(a.command) != bool(b.command):
        raise ValueError("one side is a command and the other an address: then they cannot take turns on the GPUs; "
                         "give both as commands, or start both yourself")  # fmt: skip
    cells.select(options.matrix, options.only, None)


def variants(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(name, flags to add)"""
    if not options.spec:
        return [("A against B", "")]
    return [("without speculation", ""), (f"with speculation: {options.spec}", options.spec)]


def write(result: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "result.json.new"
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(folder / "result.json")


def write_reports(result: dict, folder: Path) -> None:
    text = report.markdown(result)
    (folder / "report.md").write_text(text)
    missing = plots.problem()
    images = {} if missing else plots.draw(result)
    for caption, image in images.items():
        (folder / (re.sub(r"\W+", "_", caption.lower()).strip("_") + ".png")).write_bytes(image)
    (folder / "report.html").write_text(report.html_page(result, images, missing))
    print(text)
    if missing:
        print(missing, file=sys.stderr)


def exit_code(result: dict) -> int:
    if any(variant["refused"] for variant in result["variants"]):
        return REFUSED
    cells_ = [entry for variant in result["variants"] for entry in variant["cells"]]
    whole = cells_ and not any(report.problems_of(entry) for entry in cells_)
    return COMPARED if whole and not any(variant["incomplete"] for variant in result["variants"]) else INCOMPLETE


def start_of(options: argparse.Namespace) -> dict:
    return {
        "format": FORMAT,
        "title": options.title,
        "command": "python3 " + shlex.join(sys.argv),
        "machine": machine.describe(REPO) | ({"commit": options.commit} if options.commit else {}),
        "matrix": options.matrix + (f", only {options.only}" if options.only else ""),
        "changes": options.change,
        "notes": list(options.note),
        "settings": {},
        "generator": "",
        "versions": {},
        "variants": [],
    }


def compare(options: argparse.Namespace) -> dict:
    result = start_of(options)
    with Generator(options.python, options.out / "load_generator.log") as generator:
        generator.start()
        result["generator"], result["versions"] = generator.module, generator.versions
        for name, flags in variants(options):
            settings = Settings(
                rounds=options.rounds,
                seed=options.seed,
                prompts=options.prompts,
                both_at_once=options.both_at_once,
                natural_end=options.natural_end or bool(options.spec),
                model=options.model,
                start_s=options.start_timeout,
                cell_s=options.cell_timeout,
                limit_s=options.limit_s,
            )
            result["settings"] = dataclasses.asdict(settings)
            result["variants"].append({})

            def save(found: dict, name: str = name) -> None:
                result["variants"][-1] = {"name": name, **found}
                write(result, options.out)

            def choose(limit: int | None) -> list[cells.Cell]:
                chosen, left_out = cells.select(options.matrix, options.only, limit)
                result["notes"] += [note for note in left_out if note not in result["notes"]]
                return chosen

            Session(make_sides(options, flags), settings, generator, options.out, choose, options.change, save).run()
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.from_file:
        result = json.loads(options.from_file.read_text())
        if result.get("format") != FORMAT:
            print(f"compare: {options.from_file} is no {FORMAT}", file=sys.stderr)
            return USAGE
        write_reports(result, options.from_file.parent)
        return exit_code(result)
    try:
        check(options)
        options.out.mkdir(parents=True, exist_ok=True)
        result = compare(options)
    except (ValueError, GeneratorFailed) as error:
        print(f"compare: {error}", file=sys.stderr)
        return USAGE
    write_reports(result, options.out)
    return exit_code(result)


if __name__ == "__main__":
    sys.exit(main())
