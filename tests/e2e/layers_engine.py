#!/usr/bin/env python3
"""An engine that is asked so that prompts in chunks, from the prefix cache and in a batch are recorded, and tokens and
drafts behind them.

usage: layers_engine.py --harness DIR --record DIR --lengths 5 700 --batch 9 64 --prefix 512 [options of run_engine.py]
"""

import argparse
import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
OTHERS = 50  # tokens behind the prefix that the longest prompt shares with the last one
ROWS, BYTES = 1 << 20, 1 << 40  # all there is


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--harness", required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--lengths", nargs="*", type=int, default=[])
    parser.add_argument("--batch", nargs="*", type=int, default=[])
    parser.add_argument("--prefix", type=int)
    own, rest = parser.parse_known_args()
    sys.path.insert(0, os.path.abspath(own.harness))
    import run_engine as harness

    options = harness.parse(["run", *rest])
    harness.__file__ = os.path.abspath(__file__)  # what its reexec starts again, with the engine's PYTHONPATH
    harness.reexec(options)
    import sglang

    arguments, model = harness.engine_args(options)
    vocabulary = harness.vocab_of(model)
    engine = sglang.Engine(**arguments)
    print(f"[{options.name}] engine up", flush=True)
    sampling = {"temperature": 0, "max_new_tokens": options.new, "ignore_eos": True}
    prompts = [[harness.ids(length, vocabulary, 1)] for length in own.lengths]
    prompts.append([harness.ids(length, vocabulary, 2) for length in own.batch])
    if own.prefix:
        prompts.append(
            [harness.ids(max(own.lengths), vocabulary, 1)[: own.prefix] + harness.ids(OTHERS, vocabulary, 3)]
        )
    sys.path.append(str(REPO))
    from deepseek_v4_sm120.commands.layers import asking

    sent = []
    with asking.asked(own.record.resolve(), ROWS, BYTES) as record:
        for together in filter(None, prompts):
            answers = engine.generate(input_ids=together, sampling_params=sampling)
            told = [(a["meta_info"]["prompt_tokens"], a["meta_info"].get("cached_tokens")) for a in answers]
            print(f"[{options.name}] {told}", flush=True)
            pairs = zip(together, answers, strict=True)
            sent += [{"input_ids": prompt, "output_ids": list(a["output_ids"])} for prompt, a in pairs]
        # what a request's last passes were is written when the model is called next
        engine.generate(input_ids=[[1, 2, 3]], sampling_params=sampling | {"max_new_tokens": 1})
    asking.keep(record, sent, None)
    engine.shutdown()


if __name__ == "__main__":
    main()
