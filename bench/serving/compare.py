#!/usr/bin/env python3
"""Two ways of serving a model, measured against each other, alternating in one session on one host.

  python3 bench/serving/compare.py --change patch --out results/patch \\
    --a-label stock   --a-cmd "python3 -m sglang.launch_server --port 30001 FLAGS" \\
    --b-label patched --b-cmd "PYTHONPATH=build python3 -m sglang.launch_server --port 30001 FLAGS"

The load generator is SGLang's own bench_serving, so run it with SGLang's Python (or name that with --python). A side is
a command, which is started and stopped here, or an address (--a-url) of a server that runs already. Writes
OUT/result.json after every cell, and at the end OUT/report.md and OUT/report.html.

Keys, tokens and passwords of commands and environments are in none of these files. For servers with an API key:
SGLANG_API_KEY in the environment (or --api-key, which others can read in the list of processes).

Exit codes: 0 compared; 2 wrong usage; 3 refused, the sides differ in more than --change or in their clocks; 4
incomplete or not everything could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

from bench.serving import cells, identity, machine, plots, report  # noqa: E402
from bench.serving.endpoint import Endpoint  # noqa: E402
from bench.serving.generator_process import Generator, GeneratorFailed  # noqa: E402
from bench.serving.help_text import tell_defaults  # noqa: E402
from bench.serving.load_generator import PATHS  # noqa: E402
from bench.serving.session import FORMAT, Session, Settings, Side  # noqa: E402
from deepseek_v4_sm120.commands.disclosure import API_KEY, printable, redacted, shown  # noqa: E402
from deepseek_v4_sm120.commands.ending import as_interrupts  # noqa: E402
from deepseek_v4_sm120.patching.json_file import JsonFileError, load  # noqa: E402

# bench_serving sends these with every request: a user's key for another service is none of the server's business
GENERATOR_KEYS = ("OPENAI_API_KEY", "API_KEY")
COMPARED, USAGE, REFUSED, INCOMPLETE = 0, 2, 3, 4
MOST_SECONDS, MOST_ROUNDS = 10_000_000, 1000
MOST_RESULT_BYTES = 1 << 30


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
    found.add_argument("--matrix", default="quick", choices=sorted(cells.MATRICES), help="how many points")
    found.add_argument("--only", metavar="WORDS", help="only cells whose name contains one of these, comma-separated")
    found.add_argument("--prompts", default="text", choices=("text", "random"), help="random: token ids, no tokenizer")
    found.add_argument(
        "--natural-end",
        action="store_true",
        help="the model may end its answer (not of streams that a prompt intrudes into)",
    )
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--api-key", help=f"of both servers; default: {API_KEY} of the environment")
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
    tell_defaults(found)
    return found


def url_of(letter: str, command: str | None, url: str | None) -> str:
    if url is None and command is None:
        raise ValueError(f"side {letter.upper()} needs --{letter}-cmd or --{letter}-url")
    if url is None:
        port = port_of(command)
        if not 1 <= port <= 65535:
            raise ValueError(f"--{letter}-cmd: --port must be 1 to 65535, got {port}")
        url = f"http://127.0.0.1:{port}"
    return Endpoint(url).url


def port_of(command: str) -> int:
    """The last --port of a shell line, in whatever quotes; SGLang's default where there is none that can be read."""
    found = re.findall(r"""--port["']?(?:=|\s+)["']?(\d{1,9})\b""", command)
    return int(found[-1]) if found else 30000


def make_sides(options: argparse.Namespace, extra_flags: str) -> tuple[Side, Side]:
    found = []
    for letter in "ab":
        command = getattr(options, f"{letter}_cmd")
        url = url_of(letter, command, getattr(options, f"{letter}_url"))
        if command and extra_flags:
            command = f"{command} {extra_flags}"
        label, backend = getattr(options, f"{letter}_label"), getattr(options, f"{letter}_backend")
        known = getattr(options, f"{letter}_report"), getattr(options, f"{letter}_pid")
        found.append(Side(letter.upper(), label, url, command, backend, *known, options.api_key))
    return found[0], found[1]


def check_values(options: argparse.Namespace) -> None:
    """Raise ValueError for a value that no run can use; the message names the argument."""
    for name in ("start_timeout", "cell_timeout", "limit_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= MOST_SECONDS:  # nor what is no number
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most {MOST_SECONDS} s, got {value:g}")
    if not 1 <= options.rounds <= MOST_ROUNDS:
        raise ValueError(f"--rounds must be 1 to {MOST_ROUNDS}, got {options.rounds}")
    given = ("a_label", "b_label", "a_cmd", "b_cmd", "a_url", "b_url", "spec", "only", "model", "title", "commit")
    for name in (*given, "api_key", "python"):
        if getattr(options, name) is not None and not getattr(options, name).strip():
            raise ValueError(f"nothing is given for --{name.replace('_', '-')}")
    for letter in "ab":
        folder, pid = getattr(options, f"{letter}_report"), getattr(options, f"{letter}_pid")
        if pid is not None and not Path(f"/proc/{pid}").is_dir() or pid is not None and pid < 1:
            raise ValueError(f"--{letter}-pid: there is no process {pid} here")
        if folder is not None and not folder.is_dir() and not getattr(options, f"{letter}_cmd"):
            raise ValueError(f"--{letter}-report: there is no folder {folder}")
    if shutil.which(options.python) is None:
        raise ValueError(f"--python: there is no program {options.python}")


def check_out(folder: Path) -> None:
    """Try before the run what is written after every cell; raise ValueError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / "result.json.new"
        trial.write_text("")
        trial.unlink()
        if (folder / "result.json").is_dir():
            raise ValueError(f"--out: {folder / 'result.json'} is a folder")
    except OSError as error:
        raise ValueError(f"--out: {folder} cannot be written to: {error.strerror or error}") from error


def keep_earlier(folder: Path) -> None:
    """Set an earlier run's result aside: hours of it may not go because somebody starts the command again."""
    path, number = folder / "result.json", 1
    if not path.exists():
        return
    while (aside := folder / f"result.json.old{number if number > 1 else ''}").exists():
        number += 1
    path.rename(aside)
    print(f"compare: {path} of an earlier run is kept as {shown(str(aside))}", file=sys.stderr)


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for what cannot work, before anything is started."""
    if not options.change:
        raise ValueError("name the intended change: --change patch, version, model, flag:NAME, env:NAME or nothing")
    identity.check_changes(options.change)
    check_values(options)
    a, b = make_sides(options, "")
    if options.spec and not (a.command and b.command):
        raise ValueError("--spec needs both sides as commands: the flags are added to them")
    if a.endpoint.is_same_as(b.endpoint) and (options.both_at_once or not (a.command and b.command)):
        raise ValueError(f"A and B have the same address, {' and '.join(dict.fromkeys((a.url, b.url)))}")
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
    temporary.write_text(json.dumps(redacted(result), indent=1) + "\n")
    temporary.replace(folder / "result.json")


def write_reports(result: dict, folder: Path) -> None:
    result = redacted(result)
    text = printable(report.markdown(result))
    missing = plots.problem()
    images = {} if missing else plots.draw(result)
    page = printable(report.html_page(result, images, missing))
    (folder / "report.md").write_text(text)
    for caption, image in images.items():
        (folder / (re.sub(r"\W+", "_", caption.lower()).strip("_") + ".png")).write_bytes(image)
    (folder / "report.html").write_text(page)
    print(text)
    if missing:
        print(missing, file=sys.stderr)


def earlier(path: Path) -> dict:
    """The result of an earlier run; ValueError says why the file is none."""
    try:
        result = load(path, MOST_RESULT_BYTES)
    except JsonFileError as error:
        raise ValueError(f"--from: {path} {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"--from: {path} is no {FORMAT}")
    try:
        report.html_page(result, {}, None)
        exit_code(result)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"--from: {path} is damaged ({type(error).__name__}: {error})") from error
    return result


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
        "command": "python3 " + shlex.join(redacted(sys.argv)),
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
    environment = {name: value for name, value in os.environ.items() if name not in GENERATOR_KEYS}
    environment |= {GENERATOR_KEYS[0]: options.api_key} if options.api_key else {}
    with Generator(options.python, options.out / "load_generator.log", environment=environment) as generator:
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

            session = Session(
                make_sides(options, flags), settings, generator, options.out, choose, options.change, save
            )
            session.run()
            if session.interrupted:  # whoever wants it to end does not want the next servers either
                left = [name for name, _ in variants(options)[len(result["variants"]) :]]
                result["notes"] += [f"interrupted: {name!r} was not begun" for name in left]
                write(result, options.out)
                break
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a model's name in a terminal without its letters
    try:
        if options.from_file is not None:
            folder, result = options.from_file.parent, earlier(options.from_file)
        else:
            options.api_key = options.api_key if options.api_key is not None else os.environ.get(API_KEY) or None
            check(options)
            check_out(options.out)
            keep_earlier(options.out)
            with as_interrupts():
                folder, result = options.out, compare(options)
        write_reports(result, folder)
    except KeyboardInterrupt:
        print("compare: interrupted; what was measured until then, if anything, is in result.json", file=sys.stderr)
        return INCOMPLETE
    except (ValueError, GeneratorFailed) as error:
        print(f"compare: {shown(str(error))}", file=sys.stderr)
        return USAGE
    except OSError as error:  # a full disk: what was written until then is there
        print(f"compare: {shown(str(error))}", file=sys.stderr)
        return INCOMPLETE
    return exit_code(result)


if __name__ == "__main__":
    sys.exit(main())
