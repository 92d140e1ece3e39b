#!/usr/bin/env python3
"""What an engine was seen to compute, beside the model in float64: `layers` (commands/layers) of all rows, in numbers.

usage: layers_compare.py MODEL RECORDS OUT.json SHARE

SHARE: of the card's memory that torch may hold here. Without, what it keeps for later grows until the card is full, and
others beside it have none (seen: 93 GiB).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPO)]

import torch  # noqa: E402

from deepseek_v4_sm120.commands.layers import record  # noqa: E402
from deepseek_v4_sm120.commands.layers.checkpoint import Checkpoint  # noqa: E402
from deepseek_v4_sm120.commands.layers.command import INDEX_FP4  # noqa: E402
from deepseek_v4_sm120.commands.layers.judge import Judge  # noqa: E402


def main():
    folder, records, out = map(Path, sys.argv[1:4])
    (told,) = records.glob(f"*/{record.SENT}")
    checkpoint, device = Checkpoint(folder), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(float(sys.argv[4]))
    judge = Judge(checkpoint.config, checkpoint, device, index_fp4=bool(record.facts_of(told.parent).get(INDEX_FP4)))
    sent, passes = record.Sent.of(json.loads(told.read_text())["requests"]), 0
    with torch.inference_mode():
        for one in record.read(told.parent):
            judge.take(one, sent.segments(one))
            passes += 1
        found = judge.finish()
    told = {"passes": passes, "groups": found, "tokens": judge.tokens, "missing": sent.missing()}
    out.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
