"""`python3 -m deepseek_v4_sm120 status|selftest|doctor|plan|serve|calibrate`. Exit status: 0 fine, 1 something is wrong
with what was looked at, 2 the command could not do what was asked (one sentence says why)."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import deepseek_v4_sm120
from deepseek_v4_sm120 import models_table
from deepseek_v4_sm120.console import BAD_INPUT, CommandError
from deepseek_v4_sm120.patching.spec import PatchError

COMMANDS = {  # name -> (what it does, module with add_arguments(parser) and run(arguments) -> exit status)
    "doctor": ("what in this machine, container or running server costs speed or breaks", "doctor.command"),
    "plan": ("what fits these cards, with which flags, and how fast it can be at best", "plan.command"),
    "serve": ("start SGLang as planned, wait until it answers, show what is patched", "serve.command"),
    "calibrate": ("check and time every implementation on this card, write a profile", "calibrate.command"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m deepseek_v4_sm120", description=deepseek_v4_sm120.__doc__)
    parser.add_argument("--version", action="version", version=deepseek_v4_sm120.__version__)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    status_parser = commands.add_parser("status", help="which patches fit the SGLang found here; needs no GPU")
    status_parser.add_argument("--json", action="store_true", help="machine-readable")
    status_parser.add_argument("--model", metavar="MODEL", help="which operators serve it: flash, pro, or its folder")
    status_parser.add_argument("--tp", type=int, default=1, help="cards that share the model given by --model")
    commands.add_parser("selftest", help="every operator against its reference, on this machine", add_help=False)
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        importlib.import_module(f"deepseek_v4_sm120.{module}").add_arguments(command)
    argv = sys.argv[1:] if argv is None else argv
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    if arguments.command == "selftest":
        from deepseek_v4_sm120 import selftest

        return selftest.main(rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        return _run(arguments)
    except (CommandError, PatchError) as error:
        print(f"deepseek_v4_sm120 {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: argparse.Namespace) -> int:
    from deepseek_v4_sm120.settings import settings

    try:
        settings()
    except ValueError as error:
        raise CommandError(str(error)) from error
    if arguments.command in COMMANDS:
        return importlib.import_module(f"deepseek_v4_sm120.{COMMANDS[arguments.command][1]}").run(arguments)
    found = status()
    if arguments.model is not None:
        if arguments.tp < 1:
            raise CommandError(f"--tp must be 1 or more, got {arguments.tp}")
        found["model"] = models_table.of_model(arguments.model, arguments.tp)
    print(json.dumps(found, indent=1) if arguments.json else status_text(found))
    return 1 if any(row["state"] == "BROKEN" for row in found["patches"]) else 0


def status() -> dict:
    """What would be patched in this interpreter, by looking at the files only; and what running processes reported."""
    from deepseek_v4_sm120 import extension, patching
    from deepseek_v4_sm120.patching import report
    from deepseek_v4_sm120.patching.engine import Engine
    from deepseek_v4_sm120.settings import settings
    from deepseek_v4_sm120.sglang_patches import INDEXER_CHOICES, TABLE

    engine = Engine(TABLE, host=patching.HOST, settings=settings())
    engine.survey()
    found = report.as_dict(engine)
    found["unknown_choices"] = engine.steering.problem()
    found["build"] = extension.describe()
    found["indexer_choices"] = {name: os.environ[name] for name in INDEXER_CHOICES if os.environ.get(name)}
    found["processes"] = processes(settings().report)
    found["models"], found["model"] = models_table.overview(), None
    return found


def processes(folder: str | None) -> list[dict]:
    """The reports that patched processes wrote to DSV4_SM120_REPORT, but for our own."""
    if folder is None or not os.path.isdir(folder):
        return []
    files = sorted(Path(folder).glob("*.json"), key=lambda path: int(path.stem) if path.stem.isdigit() else -1)
    return [json.loads(path.read_text()) for path in files if path.stem != str(os.getpid())]


def status_text(found: dict) -> str:
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.patching import profile, report

    host_version = found[patching.HOST] or "not found on this interpreter's path; ask SGLang's own Python, in its image"
    lines = [
        f"deepseek_v4_sm120 {found['deepseek_v4_sm120']}, Python {found['python']}",
        f"SGLang            {host_version}",
        f"build             {_build_text(found['build'])}",
    ]
    used = [f"{name}={value}" for name, value in found["settings"].items() if value and value != "raise"]
    lines += [f"settings          {', '.join(used)}"] if used else []
    if found["indexer_choices"]:
        chosen = ", ".join(f"{name}={value}" for name, value in found["indexer_choices"].items())
        lines.append(f"SGLang's indexer  {chosen}: respected where it picks other logits or another top-k than ours")
    rows = [("patch", "state", "target", "reason")]
    for row in found["patches"]:
        rows.append((row["patch"], row["state"], row["target"], _reason(row)))
    lines += ["", report.table(rows), "", report.table(_setting_rows(found))]
    if found["profile"]:
        described = found["profile"]
        told = described["problem"] or (described["warnings"] or [profile.verdicts(described)])[0]
        lines += ["", f"profile           {told}"]
    lines += ["", *_model_lines(found)]
    if found["unknown_choices"]:
        lines += ["", found["unknown_choices"]]
    for process in found["processes"]:
        applied = sorted({row["patch"] for row in process["patches"] if row["state"] == "APPLIED"})
        broken = sorted({row["patch"] for row in process["patches"] if row["state"] == "BROKEN"})
        lines.append(f"\npid {process['pid']}: applied {', '.join(applied) or 'nothing'}")
        lines += [f"  BROKEN: {', '.join(broken)}"] if broken else []
        lines += [f"  {line}" for line in (*process.get("notes", ()), *process["shadow_summary"])]
    return "\n".join(lines)


def _model_lines(found: dict) -> list[str]:
    """Which operators serve the model that was asked about, or the models with a name."""
    from deepseek_v4_sm120.patching import report

    model = found["model"]
    if model is None:
        return [report.table(models_table.overview_text(found["models"]))]
    title = f"model             {model['model']}" + (f": {model['note']}" if model["note"] else "")
    return [title, report.table(models_table.of_model_text(model))]


def _setting_rows(found: dict) -> list[tuple[str, ...]]:
    rows = [("setting", "state", "value", "reason")]
    for row in [row for row in found["table_settings"] if row["state"] != "NOT APPLICABLE"]:
        value = " ".join(row["applied"]) or row["would_set"]
        rows.append((row["setting"], row["state"], value if len(value) < 61 else value[:57] + "...", row["reason"]))
    return rows if len(rows) > 1 else [("settings", "none for this SGLang", "", "")]


def _build_text(build: dict) -> str:
    if build["problem"]:
        return build["problem"]
    archs = ", ".join(f"sm_{arch}" for arch in build["archs"] or ())
    return f"{build['version']}, git {build['git_commit']}, CUDA {build['cuda_version']}, {archs}; {build['file']}"


def _reason(row: dict) -> str:
    return "; ".join(text for text in (row["reason"], row["review"]) if text)


if __name__ == "__main__":
    sys.exit(main())
