"""SGLang's clearing of rejected drafts; the reference is in the operator's place, and in the original's. The wheels'
own method and kernel: tests/emulator/test_clear_drafts.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.reference import compressor as reference
from deepseek_v4_sm120.sglang_patches import device_gate, shadow
from deepseek_v4_sm120.sglang_patches.adapters import compressor_drafts as adapter
from deepseek_v4_sm120.specs.compressor import make_drafts

LAYERS = 3


@pytest.fixture
def calls(monkeypatch):
    """Layers of each call of the operator."""
    found = []

    def clear_drafts(requests, lengths, accepted, *, states, ring, tokens):
        found.append(len(states))
        reference.clear_drafts(requests, lengths, accepted, states=states, ring=ring, tokens=tokens)

    monkeypatch.setattr(adapter.op, "clear_drafts", clear_drafts)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter.op, "most_states", lambda: LAYERS)
    return found


def pool_of(made, **of_first):
    def layer(state, **other):
        given = {"ratio": 128, "ring_size": made.ring, "kv_score_buffer": SimpleNamespace(kv_score=state), **other}
        return SimpleNamespace(**given)

    first, *others = made.states
    others = [layer(state) for state in others]
    return SimpleNamespace(compress_state_pools=[None, layer(first, **of_first), layer(None, ratio=4), *others])


def run(made, pool, tokens=None) -> int:
    """How often the original ran."""
    seen = []

    def original(self, req_pool_indices, seq_lens, accept_lens, num_draft_tokens):
        seen.append(num_draft_tokens)
        reference.clear_drafts(**made.arguments())

    replaced = adapter.replace_clear_drafts(original)
    replaced(pool, made.requests, made.lengths, made.accepted, num_draft_tokens=tokens or made.tokens)
    return len(seen)


def bits(made) -> list[torch.Tensor]:
    return [state.view(torch.int32) for state in made.states]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def made_for(layers=LAYERS, requests=4):
    return make_drafts(requests, 3, layers, ring=128, device="cpu")


@pytest.mark.parametrize("requests", [1, 4])
def test_a_step_is_one_call_of_all_layers(calls, requests):
    made, expected = made_for(requests=requests), made_for(requests=requests)
    reference.clear_drafts(**expected.arguments())
    assert run(made, pool_of(made)) == 0 and calls == [LAYERS] and same(made, expected)


def _with(name, value):
    return lambda made: setattr(made, name, value(getattr(made, name)))


OTHERS = {
    "requests as int32": _with("requests", lambda t: t.int()),
    "lengths as int32": _with("lengths", lambda t: t.int()),
    "accepted as int64": _with("accepted", lambda t: t.long()),
    "accepted of more requests": _with("accepted", lambda t: torch.cat([t, t])),
    "requests of a stride": _with("requests", lambda t: torch.stack([t, t], dim=1)[:, 0]),
    "two dimensions": lambda made: [
        setattr(made, name, getattr(made, name)[:, None]) for name in ("requests", "lengths", "accepted")
    ],
    "no requests": lambda made: [
        setattr(made, name, getattr(made, name)[:0]) for name in ("requests", "lengths", "accepted")
    ],
    "a bf16 state": lambda made: made.states.__setitem__(0, made.states[0].bfloat16()),
    "states of two sizes": lambda made: made.states.__setitem__(0, made.states[0][:-128]),
    "states of a stride": lambda made: made.states.__setitem__(
        slice(None), [torch.zeros(len(s), 2048)[:, :1024] for s in made.states]
    ),
    "another width": lambda made: made.states.__setitem__(slice(None), [torch.zeros(9, 1536) for _ in made.states]),
    "another device": lambda made: made.states.__setitem__(0, made.states[0].to("meta")),
    "no layers": lambda made: made.states.clear(),
    "too many layers": lambda made: made.states.append(made.states[0].clone()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_take_is_the_originals(calls, monkeypatch, name):
    made = made_for()
    OTHERS[name](made)
    monkeypatch.setattr(reference, "clear_drafts", lambda *_, **__: None)
    pool = pool_of(made) if made.states else SimpleNamespace(compress_state_pools=[None])
    assert run(made, pool) == 1 and calls == []


@pytest.mark.parametrize("what", ["one token", "two rings", "another GPU"])
def test_and_so_are(calls, monkeypatch, what):
    made = made_for()
    if what == "another GPU":
        monkeypatch.setattr(device_gate, "serves", lambda device: False)
    pool = pool_of(made, **({"ring_size": 256} if what == "two rings" else {}))
    assert run(made, pool, tokens=1 if what == "one token" else None) == 1 and calls == []


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("mode", ["1", "ours"])
def test_shadow_mode_compares_every_slot_and_leaves_the_rest_to_the_original(calls, monkeypatch, mode, wrong):
    shadow.reset()
    monkeypatch.setattr(shadow, "_start_writer", lambda: None)
    monkeypatch.setattr(adapter, "settings", lambda: SimpleNamespace(shadow=mode))
    made, expected = made_for(), made_for()
    reference.clear_drafts(**expected.arguments())
    if wrong:  # a score of one slot that is another infinity
        right = adapter.op.clear_drafts

        def clear_drafts(*given, states, **named):
            right(*given, states=states, **named)
            states[1][:, -1] = states[1][:, -1].abs()

        monkeypatch.setattr(adapter.op, "clear_drafts", clear_drafts)
    assert run(made, pool_of(made)) == 1 and calls == [LAYERS] and same(made, expected)
    (record,) = shadow.report()
    assert (record["patch"], record["calls"], record["bad_calls"]) == ("compressor_drafts", 1, int(wrong))
    assert record["shape"] == {"rows": 4, "tokens": 3}
    shadow.reset()
