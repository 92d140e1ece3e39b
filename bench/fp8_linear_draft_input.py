#!/usr/bin/env python3
"""What a draft's block begins with: `python3 bench/fp8_linear_draft_input.py [--tokens 1,4,8] [--out FILE]`.

Beside the same in SGLang's launches: embedding, norm, product, norm, product, addition, with fp8_linear's products and
SGLang's norm where it can be imported (else torch's, which is said). Cold weights, as bench/fp8_linear.py has them; a
graph holds a call of each of them. Tokens are a step's: of a draft one a stream, of the pass behind verification four.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import needs_torch  # noqa: F401
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "bench")]

import common  # noqa: E402

from deepseek_v4_sm120.commands.plan.models import FLASH  # noqa: E402
from deepseek_v4_sm120.ops import fp8_linear as linear  # noqa: E402
from deepseek_v4_sm120.ops import fp8_linear_draft_input as op  # noqa: E402
from deepseek_v4_sm120.ops.shared import cuda_tensors, extension  # noqa: E402
from deepseek_v4_sm120.reference import fp8_linear as reference  # noqa: E402
from deepseek_v4_sm120.reference.accuracy import relative_error  # noqa: E402
from deepseek_v4_sm120.specs import bounds  # noqa: E402
from deepseek_v4_sm120.specs.fp8_linear import make_draft_input, make_weight  # noqa: E402

ISSUE, STREAMS = 7, 4
TOKENS = (1, 2, 4, 8, 16, 32, 64)
MIN_CALLS = 40  # of a graph
NORMS = (("sgl_kernel", "sgl_kernel"), ("flashinfer", "flashinfer.norm"))  # package, module


def sglangs_norm() -> tuple[str, Callable]:
    """(whose, norm(x, weight, eps))"""
    for package, module in NORMS:
        if importlib.util.find_spec(package) is not None:
            return package, importlib.import_module(module).rmsnorm
    return "torch", lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[1:], weight, eps)


def in_sglangs_launches(norm: Callable, hidden, table, of_hidden, of_embedded, ids):
    embedded = torch.nn.functional.embedding(ids, table)
    flat = hidden.view(-1, hidden.shape[2])
    of_streams = linear.fp8_linear(norm(flat, of_hidden.norm, of_hidden.eps), of_hidden.weight, of_hidden.weight_scale)
    of_token = norm(embedded, of_embedded.norm, of_embedded.eps)
    of_token = linear.fp8_linear(of_token, of_embedded.weight, of_embedded.weight_scale)
    return of_token[:, None, :] + of_streams.view(len(ids), STREAMS, -1)


def by_rows(hidden, table, of_hidden, of_embedded, ids):
    """As behind a sum of the cards' embeddings."""
    return op.draft_input(hidden, torch.nn.functional.embedding(ids, table), of_hidden, of_embedded)


def by_ids(hidden, table, of_hidden, of_embedded, ids):
    return op.draft_input(hidden, table, of_hidden, of_embedded, ids=ids)


def side_by_side(hidden, table, of_hidden, of_embedded, ids):
    """With one block a multiprocessor of each product, so that both may lie there."""
    sms = cuda_tensors.num_sms(hidden.device.index)

    def products(normed, *halves_and_splits):
        *halves, splits = halves_and_splits
        made = []
        for x, half in zip(normed, halves, strict=True):
            partial = torch.empty((splits, len(x), half.weight.shape[0]), dtype=torch.float32, device=x.device)
            tuning = (("blocks", max(1, sms // splits)),)
            given = (half.weight[None], half.weight_scale[None], None, linear.NO_ROTATION, tuning, partial)
            linear._launch(x[:, None], *given)
            made.append(partial)
        return made

    with mock.patch.object(op, "_products", products):
        return by_ids(hidden, table, of_hidden, of_embedded, ids)


def run_tokens(
    report: common.Report, tokens: int, layers: list, table, ids, hidden, whose: str, norm: Callable
) -> None:
    arguments = [(hidden[:tokens], table, *halves, ids[:tokens]) for halves in layers]
    first = arguments[0]
    name = f"a draft's input, {tokens} tokens of {STREAMS} streams"
    truth = reference.draft_input(*first[:4], ids=first[4])
    ways = {
        f"SGLang's launches, norm of {whose}": functools.partial(in_sglangs_launches, norm),
        "ours, embeddings given": by_rows,
        "ours": by_ids,
    }
    if tokens * STREAMS <= 8 and op._parts(tokens, STREAMS, layers[0][0].weight.shape, hidden.device.index) > 1:
        ways["ours, a block a multiprocessor"] = side_by_side
    found = {way: call(*first) for way, call in ways.items()}
    graphs = {}
    for way, call in ways.items():
        common.gate(f"{name}, {way}", relative_error(found[way], truth), bounds.DRAFT_INPUT.truth)
        repeated = arguments * -(-MIN_CALLS // len(arguments))
        graphs[way], _ = common.captured(lambda call=call, repeated=repeated: [call(*given) for given in repeated])
    bits = [way for way in ways if not torch.equal(found[way].view(torch.int16), found["ours"].view(torch.int16))]
    print(f"{name}: other bits than ours: {', '.join(bits) or 'none'}", flush=True)
    times = common.microseconds_in_turns(graphs, turns=5, replays=20)
    for way, microseconds in times.items():
        one = microseconds / len(repeated)
        report.add(common.row(ISSUE, name, way, "us", round(one, 2)))
        print(f"{name}: {one:7.2f} us  {way}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    common.require_gpu()
    report = common.Report("fp8_linear_draft_input", extension.build_info()["git_commit"], common.ceilings())
    chosen = [int(count) for count in arguments.tokens.split(",")]
    generator = torch.Generator("cuda").manual_seed(1)
    size = FLASH.hidden
    (hidden, table, *halves), by = make_draft_input(max(chosen), size, size, generator, entries=FLASH.vocab)
    count = common.layers_for_cold_caches(2 * size * size)
    layers = []
    for _ in range(count):
        made = [make_weight(1, size, size, generator) for _ in halves]
        layers.append([op.Half(half.norm, half.eps, w[0], s[0]) for half, (w, s) in zip(halves, made, strict=True)])
    whose, norm = sglangs_norm()
    print(torch.cuda.get_device_name(), f"norm of {whose}, {count} layers", flush=True)
    for tokens in chosen:
        run_tokens(report, tokens, layers, table.contiguous(), by["ids"], hidden, whose, norm)
    if arguments.out is not None:
        report.write(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
