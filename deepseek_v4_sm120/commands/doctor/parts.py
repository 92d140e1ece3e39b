"""Parts of the file that `doctor --out` writes, each printed by a process of its own, for any may hang or crash:

`python3 -m deepseek_v4_sm120.commands.doctor.parts NAME ARGUMENT ..`; NAME: a function of PARTS. The key of a server
comes by the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from deepseek_v4_sm120.__main__ import main as commands
from deepseek_v4_sm120.commands import console
from deepseek_v4_sm120.commands.console import CommandError, say
from deepseek_v4_sm120.commands.disclosure import API_KEY, redacted
from deepseek_v4_sm120.commands.doctor import command, facts, nvidia_smi, server, server_figures, server_log
from deepseek_v4_sm120.commands.models_table import TENSOR_PARALLEL
from deepseek_v4_sm120.ops.shared import extension
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.patching.spec import PatchError

WATCHED = ("DSV4", "SGLANG_", "NCCL_", "CUDA_", "NVIDIA_VISIBLE", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "OMP_")
WATCHED += ("TVM_FFI_", "TILELANG_", "GLOO_", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH")
NOT_TOLD = ("template", "served_model_name")  # in a server's arguments: of words, and of what its owner calls it
WIDTH, MOST = 140, 400  # signs of a line, and of a value
MOST_FOUND = 20_000  # signs of what a report found
CALIBRATE_S = 240
HELD_MIB = 8 << 10  # of a card: a server; a desktop has less


def machine(url: str, quick: str) -> int:
    """What doctor reads, as it is, then what it says of it."""
    asked = argparse.Namespace(url=url or None, api_key=None, quick=quick == "quick")
    try:
        found, findings = command.look(asked)
    except CommandError as error:  # of the server: the machine is here all the same
        say(f"without the server: {error}\n")
        asked.url = None
        found, findings = command.look(asked)
    command.show(findings)
    for line in _read_lines(found):
        say(line)
    return int(any(f.state == command.FAIL for f in findings))


def _read_lines(found: facts.Facts) -> Iterator[str]:
    smi = found.smi
    yield f"\nLinux {os.uname().release} {os.uname().machine}, {_system()}, Python {sys.version.split()[0]}"
    yield f"driver {smi.driver}, CUDA {smi.cuda}; nvidia-smi: {smi.problem or f'{len(smi.gpus)} GPUs'}"
    yield f"packages: {', '.join(f'{name} {version}' for name, version in found.versions.items())}"
    yield f"build: {extension.describe()}"
    wanted = {name: found.pins[name] for name in found.versions if name in found.pins}
    yield f"SGLang asks for: {', '.join(f'{name} {version}' for name, version in wanted.items()) or '-'}"
    mib = {name: value if value < 0 else f"{value >> 10} Ki" for name, value in found.limits.items()}
    yield f"container: {found.is_container}; ulimits (-1: none): {mib}; /dev/shm: {found.shm_bytes} bytes"
    yield f"host's memory (MiB: all, available): {found.host_memory}; nvcc: {found.nvcc}"
    cpus = asdict(found.cpus) | {"allowed": len(found.cpus.allowed or ())}
    cpus["nodes"] = {node: len(those) for node, those in found.cpus.nodes.items()}
    yield f"processors: {cpus}"
    yield f"IOMMU groups: {found.iommu_groups}; ASPM: {found.aspm or 'not told'}; Xids: {found.xids}"
    for gpu, path in zip(smi.gpus, found.pci, strict=False):
        told = {name: value for name, value in asdict(gpu).items() if name not in ("uuid", "processes")}
        yield from _wrapped(f"GPU {gpu.index}: ", [f"{name}={value}" for name, value in told.items()])
        yield f"  compute on it: {', '.join(f'{one.memory} MiB' for one in gpu.processes) or 'nobody that is seen'}"
        yield from _wrapped("  its way: ", [f"{name}={value}" for name, value in asdict(path).items()])
    yield f"topology: {', '.join(f'{a}-{b} {how}' for (a, b), how in smi.topology.items()) or 'not told'}"
    how = found.probe_problem or ("all asked" if found.probe else "no card")
    yield f"copies and sums: {json.dumps(found.probe)[:MOST_FOUND]} ({how})"
    yield from _wrapped("variables here: ", _watched(found.environ))
    for pid, variables in found.server_environ.items():
        if pid == found.servers.get(pid):
            yield from _wrapped(f"variables of server {pid}: ", _watched(variables))
    yield from _of_reports(found)


def _of_reports(found: facts.Facts) -> Iterator[str]:
    """What the processes of servers have found out, each once; `status` has their notes."""
    told: list[dict] = []
    status = found.status or {}
    for one in (*status.get("processes", ()), *status.get("ended_processes", ())):
        if (text := one.get("found")) and text not in told:
            told.append(text)
            yield f"found by pid {one['pid']}: {json.dumps(text)[:MOST_FOUND]}"


def _system() -> str:
    try:
        lines = Path("/etc/os-release").read_text(errors="replace").splitlines()
    except OSError:
        return "no os-release"
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "-")


def _watched(variables: Mapping[str, str]) -> list[str]:
    kept = {name: value for name, value in sorted(variables.items()) if name.startswith(WATCHED)}
    return [f"{name}={value[:MOST]}" for name, value in redacted(kept).items()]


def _wrapped(head: str, words: list[str]) -> list[str]:
    """In lines; words: without secrets, of which a line's end could leave a half."""
    how = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(head + ("; ".join(words) or "none"), WIDTH, **how)


def torch() -> int:
    """What torch has of each card."""
    import torch as installed

    cuda = installed.version.cuda
    say(f"torch {installed.__version__}, CUDA {cuda}, cuDNN {installed.backends.cudnn.version()}")
    if not installed.cuda.is_available():
        say("it sees no CUDA device")
        return 1
    say(f"NCCL {installed.cuda.nccl.version()}")
    for i in range(installed.cuda.device_count()):
        say(f"cuda:{i}: {installed.cuda.get_device_properties(i)}")
        say(f"  MiB free, of all: {[part >> 20 for part in installed.cuda.mem_get_info(i)]}")
    return 0


def served(url: str) -> int:
    """A server's arguments, what it says of itself, and its times."""
    key = os.environ.get(API_KEY)
    answers = server.ask(url, key)
    states = answers.info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    told = {name: value for name, value in inner.items() if name not in answers.info} | answers.info
    kept = {
        name: value
        for name, value in sorted(told.items())
        if value not in (None, "", [], {}) and name != "internal_states" and not any(part in name for part in NOT_TOLD)
    }
    words = [f"{name}={json.dumps(value)[:MOST]}" for name, value in redacted(kept).items()]
    for line in _wrapped("arguments and state: ", words):
        say(line)
    say(f"metrics: {answers.metrics if answers.metrics is not None else answers.metrics_problem}")
    say("\ntimes, of random tokens (which drafts guess worse than text):")
    for line in server_figures.figures(server.check_url(url), key, answers):
        say(line)
    return 0


def log(path: str) -> int:
    try:
        with open(path, errors="replace") as file:
            for line in server_log.excerpt(file):
                say(line)
    except OSError as error:
        raise CommandError(f"--log: {path} cannot be read: {error.strerror}") from error
    return 0


def calibrated(path: str) -> int:
    """The table of a profile that is there."""
    from deepseek_v4_sm120.commands.calibrate import command as calibrate

    found = profile.read(path)
    say(f"made on {found.get('date')}, of {found.get('plan')}, build {found.get('build')}")
    calibrate.show(found)
    return 0


def selftest() -> int:
    _free_cards()
    return commands(["selftest"])


def calibration() -> int:
    """A new one, which is not kept; of a plan of as many cards as there are."""
    there = _free_cards()
    cards = max((n for n in TENSOR_PARALLEL if n <= there), default=1)
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", os.path.join(folder, "profile.json"), "--limit-s", str(CALIBRATE_S)]
        return commands(["calibrate", "--gpus", str(cards), *out])


def _free_cards() -> int:
    """How many cards there are; CommandError where somebody, a server, holds one, which could end by what it lacks."""
    gpus = nvidia_smi.read(facts.run_command).gpus
    if held := [f"GPU {gpu.index} ({gpu.memory_used} MiB)" for gpu in gpus if gpu.memory_used > HELD_MIB]:
        raise CommandError(f"NOT RUN: others hold {', '.join(held)}: ask again when the cards are free")
    return len(gpus)


PARTS = {one.__name__: one for one in (machine, torch, served, log, selftest, calibrated, calibration)}


def main(argv: list[str]) -> int:
    try:
        return PARTS[argv[0]](*argv[1:])
    except (CommandError, PatchError, profile.ProfileError) as error:
        say(str(error))
        return console.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
