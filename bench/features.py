#!/usr/bin/env python3
"""Makes docs/features.md from bench/results/e2e_features_sglang_*.json; with `--check` it only tells whether that is
stale.

What users combine, on the real engine: a line a feature, a table a release, with the commit that ran. What is asked of
each stands in tests/e2e/features_stage.py; what no release has run yet is listed from there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO)]

from bench.measured import age, origin, write_or_check  # noqa: E402
from bench.serving.report import markdown_table  # noqa: E402
from tests.e2e import features_stage  # noqa: E402

RESULTS, PAGE = REPO / "bench/results", REPO / "docs/features.md"
PREFIX, COMMAND = "e2e_features_sglang_", "python3 bench/features.py"

WITHOUT = {  # what engines of other weights are held against
    "loaded": "the checkpoint's, loaded as ever, wo_a and mxfp4_moe off",
    "loaded_stock": "the checkpoint's, loaded by SGLang alone",
    "alone_stock": "SGLang alone, in one process",
    "sharded_off": "the same, wo_a and mxfp4_moe off",
}

HEAD = f"""# Features together

Made by `{COMMAND}` from `bench/results/{PREFIX}*.json`; a test says when it is stale. Do not edit it.

Each feature runs in an engine of six layers with random weights, on an H200 or H100 with our operators in SGLang's
place (`DSV4_SM120_FORCE=ops`), beside the same engine without it. `reproducible=on` gives all sums one order, so what
keeps the arithmetic must give the same bits of all log-probabilities; engines that speculate, or have a grammar, the
same greedy text; and where the cards share the work in another way an engine is compared with itself, each prompt
alone and all at once. A feature counts only where its log and its answers say that it acted. No line here is of an
SM120 card.

| state | meaning |
|---|---|
| same bits, same text | as without the feature |
| refused | SGLang or we say no, in words that are quoted |
| turned off by SGLang | the server starts without it, and says so |
| fails in stock too | SGLang alone fails with it as well; its words are quoted |
| differs in stock too | SGLang alone gives other answers with it as well |
| differs from run to run | SGLang's own layers, asked twice: what differs there is asked for no bits below it |
| did not act in stock either | nothing says that it acted, and of SGLang alone nothing does either |
| differs, fails, did not act | **a defect**, until somebody shows whose |
| not run | and why |
"""


def cell(text: object) -> str:
    return str(text).replace("\n", " ")


def beside(line: dict) -> str:
    if line["against"] == line["engine"]:
        at_once = "round" in features_stage.ENGINES[line["engine"]].steps
        return f"itself: each prompt alone, {'all at once' if at_once else 'and once more'}"
    usual = line["against"] in (features_stage.BASE, features_stage.TEXT_BASE)
    return f"{line['same']} of {'the same without' if usual else WITHOUT[line['against']]}"


def seen(line: dict) -> str:
    answers = f"{line['answers']} answers" if line.get("answers") else ""
    checks = f"{line['checks']} checks" if line.get("checks") else ""
    return "; ".join(filter(None, (answers, checks, line.get("detail"))))


def table(lines: list[dict]) -> str:
    header = ("feature", "arguments", "compared with", "state", "seen")
    is_defect = features_stage.STATES
    return markdown_table(
        header,
        (
            (
                cell(line["feature"]),
                f"`{cell(line['flags'])}`" if line["flags"] else "",
                beside(line),
                f"**{line['state']}**" if is_defect[line["state"]] else line["state"],
                cell(seen(line)),
            )
            for line in lines
        ),
    )


def section(stem: str, found: dict) -> str:
    lines = found["features"]
    counted = ", ".join(f"{number} {state}" for state, number in Counter(line["state"] for line in lines).items())
    parts = (
        f"## SGLang {stem.removeprefix(PREFIX)}",
        origin(found),
        f"{len(lines)} features: {counted}.",
        table(lines),
    )
    return "\n\n".join(parts)


def asked() -> str:
    """Without any result: what the stage asks."""
    listed = (f"- {feature.what}" for feature in features_stage.FEATURES)
    told = "No release has run yet. The stage `features` of [tests/e2e](../tests/e2e/README.md) asks:"
    return "\n".join((told, "", *listed))


def page(files: dict[str, dict]) -> str:
    sections = [section(stem, found) for stem, found in files.items()] or [asked()]
    return "\n\n".join((HEAD.strip(), *sections)) + "\n"


def results() -> dict[str, dict]:
    stems = sorted((path.stem for path in RESULTS.glob(f"{PREFIX}*.json")), key=age)
    return {stem: json.loads((RESULTS / f"{stem}.json").read_text()) for stem in stems}


def main(arguments: list[str] | None = None) -> int:
    return write_or_check(PAGE, page(results()), __doc__, COMMAND, arguments)


if __name__ == "__main__":
    sys.exit(main())
