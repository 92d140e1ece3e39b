"""Draws by a request's seed: each release's own sampling on the CPU, over a stand-in for the hash, with ours in it and
without."""

import functools

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.seeded_draws import kept_probabilities, replace_sampling
from deepseek_v4_sm120.sglang_patches.rows.sampling import DRAW
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch, since

FIRST, VOCABULARY, ROWS = "0.5.14", 20, 32
MODULE, _, NAME = DRAW.partition(":")
ALL = 1 << 30
SEEDS, PLACES = torch.arange(ROWS), torch.full((ROWS,), 9)

pytestmark = pytest.mark.usefixtures("opened")


def multinomial_with_seed(logprobs, seed, positions):
    """As SGLang's: noise by seed, position and column, and the greatest with it."""
    x = seed[:, None] * 7919 + positions[:, None] * 104729 + torch.arange(logprobs.shape[1]) * 1299709
    noise = (torch.sin(x.double()) * 43758.5453).frac().abs().clamp(1e-9, 1 - 1e-9)
    return (logprobs.double() - noise.log().neg().log()).argmax(-1, keepdim=True)


def functions(version, *, ours):
    """(the draw where something is left out, the one where nothing is)."""
    names = {"torch": torch, "multinomial_with_seed": multinomial_with_seed, "envs": QUIET}
    simple = take(fetch(version), names, "sampling_from_probs_torch", MODULE)
    draw = take(fetch(version), names, NAME, MODULE)
    draw = functools.update_wrapper(functools.partial(draw), draw)  # as another of ours around it
    return (replace_sampling(draw) if ours else draw), simple


def probabilities():
    generator = torch.Generator().manual_seed(3)
    return torch.softmax(torch.randn(ROWS, VOCABULARY, generator=generator) * 2, -1)


def drawn(version, *, ours, top_ks=ALL, top_ps=1.0, min_ps=0.0, seeds=SEEDS, **more):
    """Of all rows, whose first one's top_k is another's that is greedy."""
    asked = torch.full((ROWS,), top_ks), torch.full((ROWS,), top_ps), torch.full((ROWS,), min_ps)
    asked[0][0] = 1
    draw, _ = functions(version, ours=ours)
    return draw(probabilities(), *asked, min_ps > 0, seeds, PLACES, **more)


@every_release(FIRST)
def test_a_request_draws_what_it_draws_alone(version):
    _, simple = functions(version, ours=True)
    alone = simple(probabilities(), sampling_seed=SEEDS, positions=PLACES)[1:]
    mixed, stock = (drawn(version, ours=ours)[1:] for ours in (True, False))
    assert torch.equal(mixed, alone) and mixed.dtype == alone.dtype
    assert (stock != alone).sum() > ROWS // 2  # so the row is needed
    assert drawn(version, ours=True)[0] == probabilities()[0].argmax()


@every_release(FIRST)
def test_what_is_left_out_is_sglangs(version):
    for asked in ({"top_ks": 3}, {"top_ps": 0.4}, {"top_ks": 5, "top_ps": 0.6}):
        found, stock = set(), set()
        for step in range(8):
            found.update(enumerate(drawn(version, ours=True, seeds=SEEDS + step, **asked).tolist()))
            stock.update(enumerate(drawn(version, ours=False, seeds=SEEDS + step, **asked).tolist()))
        top_ks = torch.full((ROWS,), asked.get("top_ks", ALL)).index_fill(0, torch.tensor([0]), 1)
        kept = kept_probabilities(probabilities(), top_ks, torch.full((ROWS,), asked.get("top_ps", 1.0)), None)
        there = set(map(tuple, kept.nonzero().tolist()))
        assert found <= there and stock <= there and len(found) > len(there) // 2


EIGHTHS = torch.tensor([[0.125, 0.5, 0.125, 0.25]])


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ((ALL, 1.0, None), [0.125, 0.5, 0.125, 0.25]),
        ((2, 1.0, None), [0, 0.5, 0, 0.25]),
        ((1, 1.0, None), [0, 0.5, 0, 0]),
        ((ALL, 0.5, None), [0, 0.5, 0, 0.25]),  # the one that goes beyond it is the last
        ((ALL, 0.49, None), [0, 0.5, 0, 0]),
        ((ALL, 1.0, 0.5), [0, 0.5, 0, 0.25]),  # as many as that are enough
        ((ALL, 1.0, 0.51), [0, 0.5, 0, 0]),
    ],
)
def test_what_the_three_leave(asked, left):
    assert kept_probabilities(EIGHTHS, *(None if one is None else torch.tensor([one]) for one in asked)).tolist() == [
        left
    ]


@every_release(FIRST)
@pytest.mark.parametrize("asked", [(3, 1.0), (ALL, 0.5), (5, 0.6)])
def test_as_much_is_left_as_by_sglang(version, asked):
    """Which draws from what it has sorted."""
    seen = []
    names = {"torch": torch, "envs": QUIET}
    names["multinomial_with_seed"] = lambda logprobs, *_: seen.append(logprobs) or logprobs.argmax(-1, keepdim=True)
    draw = take(fetch(version), names, NAME, MODULE)
    for probs in (probabilities(), EIGHTHS):
        top_ks, top_ps = (torch.full((len(probs),), one) for one in asked)
        draw(probs.clone(), top_ks, top_ps, torch.zeros(len(probs)), False, SEEDS[: len(probs)], PLACES[: len(probs)])
        ours = kept_probabilities(probs, top_ks, top_ps, None).sort(dim=-1, descending=True)[0]
        assert torch.equal(ours.double().log(), seen.pop())


@every_release(FIRST)
def test_min_p_with_a_seed(version):
    with pytest.raises(AssertionError, match="sampling seed"):  # so the row is needed
        drawn(version, ours=False, min_ps=0.3)
    tokens, probs = drawn(version, ours=True, min_ps=0.3).long(), probabilities()
    drawn_at = probs.gather(-1, tokens[:, None])[:, 0]
    assert (drawn_at >= 0.3 * probs.amax(-1)).all() and (drawn_at < probs.amax(-1)).any()


@every_release(FIRST)
def test_without_seeds_it_is_sglangs(version):
    torch.manual_seed(0)
    theirs = drawn(version, ours=False, top_ks=5, seeds=None)
    torch.manual_seed(0)
    assert torch.equal(drawn(version, ours=True, top_ks=5, seeds=None), theirs)
    if since(version, "0.5.20"):
        more = [drawn(version, ours=ours, top_ks=5, return_filtered_probs=True) for ours in (True, False)]
        assert all(map(torch.equal, *more)) and len(more[0]) == 4


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    assert torch.equal(drawn("0.5.23", ours=True), drawn("0.5.23", ours=False))
