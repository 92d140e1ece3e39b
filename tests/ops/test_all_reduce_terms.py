"""The terms of the test of many sums, and its look at them, by Triton's interpreter: it must find what is wrong."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CODE = """
import sys, torch
sys.path.insert(0, {repo!r})
from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference
from tests.ops import all_reduce_terms
from tests.ops.all_reduce_terms import NAN, Terms

all_reduce_terms.BLOCK = 8192  # two of all places: the interpreter takes its time for each

def bits(x):
    return x.view(torch.int16).int() & 0xFFFF

seen = []
for ranks in (2, 8):
    parts = [Terms([1, 3, 2], 2048, rank, ranks, 7 + ranks, "cpu") for rank in range(ranks)]
    for turn in range(2):
        for part in parts:
            part.fill()
        terms = [part.x for part in parts]
        for one, other in zip(terms, terms[1:]):
            assert (bits(one) != bits(other)).float().mean() > 0.99
        finite = terms[0][~terms[0].isnan()].float()
        assert 0.5 < finite.std() < 0.75 and abs(finite.mean()) < 0.03 and finite.abs().min() >= 2**-7
        nothing = sum(int((bits(term).view(-1, 2) == 0xFFFF).all(1).sum()) for term in terms)
        assert 0 < nothing < 30 * ranks
        seen += [term.clone() for term in terms]
        sums = reference(terms)
        words = torch.where(sums.isnan(), torch.full_like(bits(sums), NAN), bits(sums)).short()
        for part in parts[:: ranks - 1]:
            before = part.wrong
            part.out.view(torch.int16).copy_(words)
            part.check()
            assert part.wrong == before
            part.out.view(torch.int16)[5, 17] ^= 1  # each the only one of its block
            part.out.view(torch.int16)[0, 0] ^= 0x40
            part.check()
            assert part.wrong == before + 2
            part.state[0] += 1
            part.check()  # sums of the round before
            part.state[0] -= 1
            assert part.wrong - before > 0.9 * words.numel()
        for part in parts:
            part.next_round()
assert all((bits(a) != bits(b)).float().mean() > 0.99 for i, a in enumerate(seen) for b in seen[:i])
assert [tuple(x.shape) for x, out in parts[0].pairs()] == [(1, 2048), (3, 2048), (2, 2048)]
print("all is well")
"""


def test_terms_and_what_is_wrong_with_sums(torch_python):
    """In a process of its own: the variable is read when Triton is imported."""
    done = subprocess.run(
        [*torch_python(), "-c", CODE.format(repo=str(REPO))],
        env={"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "all is well\n", done.stderr
