#!/usr/bin/env python3
"""Whether the engine computes the model: the inputs of every sublayer, beside float64 from the checkpoint's files.

usage: layers_stage.py [--harness DIR] [--patch build] [--out $OUT] [--only CASE ..] [--jobs 3] [--limit-s 400]

Ours and stock can be wrong alike, where SGLang's own code is: positions, windows, what a draft sees, which layers have
which angles. Users ask the same of their engine by `layers`; here all rows are judged, and stock's (layers_plugin)
beside ours. Six layers and the MTP block, with a checkpoint that SGLang loads as users' (layers_weights.py); engines
with CUDA graphs, prompts in chunks of 512, in a batch and from the prefix cache, single tokens, drafts and their
verification. commands/layers/judge.py says what is compared, and how a fault of a few per cent is told from rounding.
OUT/stage_layers.json is what collect.py reads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(HERE)]

import experts_stage  # noqa: E402
from faults_stage import release  # noqa: E402
from stages import EVERY_CALL, PAGED_EXTEND, PAGED_INDEX, SIDE_BY_SIDE_ENVIRONMENT, TWO_CARDS, eagle  # noqa: E402
from what_ran import commit, device, read_json  # noqa: E402

STAGE, MODEL = "layers", "layers6"
PLUGIN = HERE / "layers_plugin"
OPTIONS = ["--variant", MODEL, "--load-format", "auto", "--chunk", "512", "--new", "12", "--mem", "0.9"]
OPTIONS += ["--graph-bs", "1", "2", "4", "--max-total-tokens", "40000", "--context", "8192", "--max-running", "8"]
ASKED = ["--lengths", "5", "130", "700", "2600", "--batch", "9", "64", "300", "1000", "--prefix", "2600", "--radix"]
DRAFTED = ["--lengths", "5", "130", "700", "--batch", "9", "300"]
FP4_INDEX = ["--set", "enable_deepseek_v4_fp4_indexer=true"]
STOCK = PAGED_EXTEND | PAGED_INDEX
BLIND = {"DSV4_SM120_SET": "draft_chain=off"}
CASES = {  # name -> (is it patched, its environment, what it is asked)
    "layers_ours": (True, EVERY_CALL, ASKED),
    "layers_fp4_index": (True, EVERY_CALL | {experts_stage.VARIABLE: "fp4_cache"}, ASKED + FP4_INDEX),
    "layers_eagle314": (True, EVERY_CALL, DRAFTED + eagle(3)),
    "layers_eagle314_blind": (True, EVERY_CALL | BLIND, DRAFTED + eagle(3)),
    "layers_stock": (False, STOCK, ASKED),
    "layers_stock_eagle314": (False, STOCK, DRAFTED + eagle(3)),
    "layers_ours_tp2": (True, EVERY_CALL, ASKED + TWO_CARDS),
    "layers_eagle314_tp2": (True, EVERY_CALL, DRAFTED + eagle(3) + TWO_CARDS),
}
OF_ONE_CARD = [name for name in CASES if not name.endswith("_tp2")]


def environment(name: str, work: Path) -> dict:
    """Of an engine: where it records, by ours or by the plugin, and a copy of the compiled modules, to which others
    would add, too."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "E2E_"))}
    patched, chosen, _ = CASES[name]
    own = SIDE_BY_SIDE_ENVIRONMENT | chosen | {"DSV4_SM120_LAYERS" if patched else "E2E_LAYERS": str(work / name)}
    plugins = [*([] if patched else [PLUGIN]), *([experts_stage.PLUGIN] if experts_stage.VARIABLE in chosen else [])]
    if plugins:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (*map(str, plugins), os.environ.get("PYTHONPATH"))))
    if shelf := os.environ.get("E2E_JIT_SHELF"):
        own["E2E_JIT_SHELF"] = str(work / f"{name}_shelf")
        shutil.copytree(shelf, own["E2E_JIT_SHELF"], dirs_exist_ok=True)
    return kept | own


def run(words: list, log: Path, env: dict, deadline: float):
    """The exit code, or what stands for it."""
    with open(log, "a") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            return process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "stopped at the limit"


def run_case(name: str, number: int, arguments, deadline: float) -> dict:
    """The engine, then the comparison of what it wrote."""
    patched, _, asked = CASES[name]
    started, records = time.monotonic(), arguments.work / name
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    port = arguments.first_port + 500 * number
    words = [sys.executable, str(HERE / "layers_engine.py"), "--harness", str(arguments.harness)]
    words += ["--record", str(records), *asked, *OPTIONS]
    words += ["--name", name, "--models", str(arguments.models), "--set", f"port={port}"]
    words += ["--set", f"nccl_port={port + 100}", *(["--patch", str(arguments.patch)] if patched else [])]
    log = arguments.out / f"{name}.log"
    log.unlink(missing_ok=True)
    code = run(words, log, environment(name, arguments.work), deadline)
    found = arguments.work / f"{name}.json"
    found.unlink(missing_ok=True)
    compare = [sys.executable, str(HERE / "layers_compare.py"), str(arguments.models / MODEL), str(records), str(found)]
    compare.append(f"{0.9 / arguments.jobs:.2f}")
    compared = run(compare, log, dict(os.environ), deadline) if code == 0 else None
    print(f"== {name}: exit {code}, compared {compared}, {time.monotonic() - started:.0f} s", flush=True)
    if code or compared:
        print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n   | ", flush=True)
    seen = read_json(found) or {"passes": 0, "groups": []}
    return {"exit": code, "compared": compared, "patched": patched, **seen}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=Path, default=Path(os.environ.get("E2E_HARNESS", REPO / ".e2e/tools")))
    parser.add_argument("--patch", type=Path, default=REPO / "build", help="the built folder that users mount")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--models", type=Path, default=Path("/tmp/models_layers"))
    parser.add_argument("--work", type=Path, default=Path(f"/tmp/dsv4_sm120_{STAGE}"))
    parser.add_argument("--only", nargs="+", choices=CASES, default=OF_ONE_CARD)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--first-port", type=int, default=14000)
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--commit", help="of the patch, where this is a copy without git")
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse(sys.argv[1:])
    for folder in ("harness", "patch", "out", "models", "work"):
        setattr(arguments, folder, getattr(arguments, folder).resolve())
    deadline = time.monotonic() + arguments.limit_s
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    model = arguments.models / MODEL
    if not (model / "model.safetensors.index.json").exists():
        write = [sys.executable, str(HERE / "layers_weights.py"), str(model), str(arguments.harness)]
        if code := run(write, arguments.out / "layers_weights.log", dict(os.environ), deadline):
            raise SystemExit(f"layers_stage: no checkpoint ({code}): {arguments.out / 'layers_weights.log'}")
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        pending = {name: pool.submit(run_case, name, i, arguments, deadline) for i, name in enumerate(arguments.only)}
        cases = {name: future.result() for name, future in pending.items()}
    table = {"stage": STAGE, "device": device(), "date": time.strftime("%Y-%m-%d")}
    table |= {"commit": arguments.commit or commit(arguments.patch), "cases": {}, "differences": []}
    table["command"] = f"python3 tests/e2e/layers_stage.py --only {' '.join(arguments.only)}"
    table[STAGE] = {"sglang": release(), "cases": cases}
    path = arguments.out / f"stage_{STAGE}.json"
    path.write_text(json.dumps(table, indent=1))
    collect = HERE / "collect.py"
    return subprocess.run([sys.executable, str(collect), str(path)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
