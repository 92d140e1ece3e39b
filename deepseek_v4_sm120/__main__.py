"""`python3 -m deepseek_v4_sm120 status|selftest|layers|doctor|plan|serve|calibrate`. Exit status: 0 fine, 1 something
is wrong with what was looked at, 2 the command could not do what was asked (one sentence says why)."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator

import deepseek_v4_sm120
from deepseek_v4_sm120.commands import console, models_table
from deepseek_v4_sm120.commands.console import BAD_INPUT, INTERRUPTED, CommandError, print_json, say
from deepseek_v4_sm120.commands.disclosure import redacted
from deepseek_v4_sm120.patching.spec import PatchError

COMMANDS = {  # name -> (what it does, module with add_arguments(parser) and run(arguments) -> exit status)
    "doctor": ("what in this machine, container or running server costs speed or breaks", "doctor.command"),
    "plan": ("what fits these cards, with which flags, and how fast it can be at best", "plan.command"),
    "serve": ("start SGLang as planned, wait until it answers, show what is patched", "serve.command"),
    "layers": ("whether a running server computes the model, layer by layer", "layers.command"),
    "calibrate": ("check and time every implementation on this card, write a profile", "calibrate.command"),
}


def main(argv: list[str] | None = None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 for as long as the process lives
    about = (deepseek_v4_sm120.__doc__ or "").partition(".")[0]  # python3 -OO drops it
    parser = argparse.ArgumentParser(prog="python3 -m deepseek_v4_sm120", description=about)
    parser.add_argument("--version", action="version", version=deepseek_v4_sm120.__version__)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    status_parser = commands.add_parser("status", help="which patches fit the SGLang found here; needs no GPU")
    status_parser.add_argument("--json", action="store_true", help="machine-readable")
    status_parser.add_argument("--model", metavar="MODEL", help="which operators serve it: as plan's --model")
    status_parser.add_argument("--tp", type=int, help="cards that share the model given by --model (default: 1)")
    commands.add_parser("selftest", help="every operator against its reference, on this machine", add_help=False)
    for name, (summary, module) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        importlib.import_module(f"deepseek_v4_sm120.commands.{module}").add_arguments(command)
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    arguments, rest = parser.parse_known_args(argv[:end])
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return BAD_INPUT
    hint, arguments.extra = "", argv[end + 1 :]
    if arguments.command == "serve":
        hint = "; those of sglang.launch_server go behind --"
    elif end < len(argv):
        rest += argv[end:]
    if rest and arguments.command != "selftest":
        commands.choices[arguments.command].error(f"unknown arguments: {' '.join(redacted(rest))}{hint}")
    try:
        if arguments.command == "selftest":
            from deepseek_v4_sm120.commands import selftest

            return selftest.main(rest)
        return _run(arguments)
    except (CommandError, PatchError) as error:
        say(f"deepseek_v4_sm120 {arguments.command}: {str(error).removeprefix('deepseek_v4_sm120: ')}", sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        say(f"deepseek_v4_sm120 {arguments.command}: interrupted", sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except console.Unwritable as error:  # a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        say(f"deepseek_v4_sm120 {arguments.command}: {error}", sys.stderr)
        return BAD_INPUT


def _run(arguments: argparse.Namespace) -> int:
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.settings import settings

    patching.make_absolute()
    if settings().wrong:
        raise CommandError("; ".join(settings().wrong))
    if arguments.command in COMMANDS:
        return importlib.import_module(f"deepseek_v4_sm120.commands.{COMMANDS[arguments.command][1]}").run(arguments)
    if arguments.tp is not None and arguments.model is None:
        raise CommandError("--tp says how many cards share the model, so it wants --model")
    found = status()
    if arguments.model is not None:
        found["model"] = models_table.of_model(arguments.model, 1 if arguments.tp is None else arguments.tp)
    if arguments.json:
        print_json(found)
    else:
        say(status_text(found))
    is_wrong = found["stops"] or found["unknown_choices"] or found["report_problem"] or _broken(found)
    return 1 if is_wrong else 0


def status() -> dict:
    """What would be patched in this interpreter, by looking at the files only; and what running processes reported.

    stops           why a server of this model on a GPU that we serve would not start
    report_problem  why no process can write its report; that stops no server
    processes       the reports of those that run here; where none does, of those of which that cannot be seen
    not_hooked      why a server that is started like this interpreter has us late, or not at all
    surroundings    variables that are none of ours, relative paths, further copies of us, a build of another state
                    of the checkout
    """
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.ops.shared import extension
    from deepseek_v4_sm120.patching import lifetime, report, report_files
    from deepseek_v4_sm120.patching.engine import Engine
    from deepseek_v4_sm120.settings import settings
    from deepseek_v4_sm120.sglang_patches.rows.index_select import INDEXER_CHOICES
    from deepseek_v4_sm120.sglang_patches.table import TABLE

    engine = Engine(TABLE, host=patching.HOST, settings=settings())
    engine.survey()
    found = report.as_dict(engine)
    found["unknown_choices"] = engine.steering.problem()
    found["unparsable"] = engine.unparsable
    found["build"] = extension.describe()
    package = engine.sources.path(patching.HOST)
    found["host_folder"] = None if package is None else str(package.parent)
    found["indexer_choices"] = {name: os.environ[name] for name in INDEXER_CHOICES if os.environ.get(name)}
    found["not_hooked"] = patching.not_hooked() if package is not None else None
    found["surroundings"] = [*report.surroundings(), *filter(None, [extension.stale()])]
    folder = settings().report
    found["report_problem"] = report_files.problem(folder) if folder else None
    reports, found["strange_reports"] = report_files.read(folder) if folder else ([], [])
    others = [one for one in reports if one["pid"] != os.getpid()]
    found["ended_processes"] = [one for one in others if lifetime.has_ended(one)]
    found["unseen_processes"] = [one for one in others if lifetime.is_elsewhere(one)]
    aside = [*found["ended_processes"], *found["unseen_processes"]]
    found["processes"] = [one for one in others if one not in aside] or found["unseen_processes"]
    found["models"], found["model"] = models_table.overview(), None
    return found


def status_text(found: dict) -> str:
    return "\n".join(line for part in STATUS_PARTS for line in part(found))


def _head_part(found: dict) -> Iterator[str]:
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.settings import Settings

    absent = "not found on this interpreter's path; ask SGLang's own Python, in its image"
    host_version = found[patching.HOST] or ("tells no version" if found["host_folder"] else absent)
    yield f"deepseek_v4_sm120 {found['deepseek_v4_sm120']}, Python {found['python']}"
    yield f"SGLang            {host_version}" + (f", {found['host_folder']}" if found["host_folder"] else "")
    yield f"build             {_build_text(found['build'])}"
    used = [f"{name}={value}" for name, value in found["settings"].items() if value != getattr(Settings(), name)]
    if used:
        yield f"settings          {', '.join(used)}"
    if found["indexer_choices"]:
        chosen = ", ".join(f"{name}={value}" for name, value in found["indexer_choices"].items())
        yield f"SGLang's indexer  {chosen}: respected where it picks other logits or another top-k than ours"


def _table_part(found: dict) -> Iterator[str]:
    from deepseek_v4_sm120.patching import report

    rows = [(row["patch"], row["state"], _short(row["target"]), _reason(row)) for row in found["patches"]]
    if len({row[1:] for row in rows}) == 1:  # without SGLang, say
        rows = [(f"all {len(rows)}", *rows[0][1:])]
    rows.insert(0, ("patch", "state", "target", "reason"))
    yield from ("", report.table(rows), "", report.table(_default_rows(found)))


def _profile_part(found: dict) -> Iterator[str]:
    from deepseek_v4_sm120.patching import profile

    if found["profile"]:
        described = found["profile"]
        told = described["problem"] or (described["warnings"] or [profile.verdicts(described)])[0]
        yield from ("", f"profile           {told}")
        yield from [described["outdated"]] if described["outdated"] else []
    yield from ("", *found["unparsable"]) if found["unparsable"] else ()


def _model_part(found: dict) -> Iterator[str]:
    """Which operators serve the model that was asked about, or the models with a name."""
    from deepseek_v4_sm120.patching import report

    model = found["model"]
    absent = models_table.not_here(found["patches"]) if found["host_folder"] else {}  # without SGLang by shapes alone
    if model is None:
        yield from ("", report.table(models_table.overview_text(found["models"], absent)))
        return
    yield ""
    yield f"model             {model['model']}" + (f": {model['note']}" if model["note"] else "")
    yield report.table(models_table.of_model_text(model, absent))


def _problem_part(found: dict) -> Iterator[str]:
    from deepseek_v4_sm120.patching import report
    from deepseek_v4_sm120.settings import REPORT

    if found["stops"]:
        does = "starts, with this told" if found["settings"]["on_broken"] == "warn" else "does not start"
        yield from ("", f"A server of this model on a GPU that we serve {does}:")
        yield from (f"  {problem}" for problem in report.by_reason(found["stops"]))
    elif any(row["state"] == "READY" for row in found["patches"]):
        yield from ("", "A server of this model on a GPU that we serve starts, with what is READY.")
    if found["unknown_choices"] and found["unknown_choices"] not in found["stops"]:
        yield from ("", found["unknown_choices"])
    if found["report_problem"]:
        yield from ("", f"{REPORT}: {found['report_problem']}; servers run, without reports")
    yield from (f"\nwarning: {text}" for text in (found["not_hooked"], *found["surroundings"]) if text)


def _process_part(found: dict) -> Iterator[str]:
    from deepseek_v4_sm120.patching import lifetime

    unseen = [process for process in found["unseen_processes"] if process not in found["processes"]]
    for process in (*found["processes"], *unseen, *found["ended_processes"]):
        applied = sorted({row["patch"] for row in process["patches"] if row["state"] == "APPLIED"})
        broken = sorted({row["patch"] for row in process["patches"] if row["state"] == "BROKEN"})
        ended = ", which has ended" if process in found["ended_processes"] else ""
        ended = f", {lifetime.ELSEWHERE}, if it runs" if process in found["unseen_processes"] else ended
        yield f"\npid {process['pid']}{ended}: applied {', '.join(applied) or 'nothing'}"
        if broken:
            yield f"  BROKEN: {', '.join(broken)}"
        yield from (f"  {line}" for line in (*process.get("notes", ()), *process["shadow_summary"]))
    yield from (f"\nno report of ours: {text}" for text in found["strange_reports"])


# found -> lines, in this order
STATUS_PARTS = (_head_part, _table_part, _profile_part, _model_part, _problem_part, _process_part)


def _broken(found: dict) -> bool:
    return any(row["state"] == "BROKEN" for row in found["patches"])


def _default_rows(found: dict) -> list[tuple[str, ...]]:
    rows = [("default", "state", "value", "reason")]
    for row in [row for row in found["defaults"] if row["state"] != "NOT APPLICABLE"]:
        number = str(row["value"] or "") if row["state"] == "ON" else ""  # of those that set nothing of SGLang's
        value = " ".join(row["applied"]) or row["would_set"] or number
        rows.append((row["default"], row["state"], value if len(value) < 61 else value[:57] + "...", row["reason"]))
    return rows if len(rows) > 1 else [("defaults", "none for this SGLang", "", "")]


def _build_text(build: dict) -> str:
    if build["problem"]:
        return build["problem"].removeprefix("deepseek_v4_sm120: ")
    archs = ", ".join(f"sm_{arch}" for arch in build["archs"] or ())
    return f"{build['version']}, git {build['git_commit']}, CUDA {build['cuda_version']}, {archs}; {build['file']}"


def _short(target: str) -> str:
    """Of the module its last part; --json has the whole."""
    package, dot, rest = target.partition(":")[0].rpartition(".")
    return f"...{target.removeprefix(f'{package}.')}" if dot else target


def _reason(row: dict) -> str:
    return "; ".join(text for text in (row["reason"], row["review"]) if text)


if __name__ == "__main__":
    sys.exit(main())
