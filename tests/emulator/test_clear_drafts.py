"""compressor.clear_drafts against SGLang's own method and Triton kernel of each release, both as PTX for SM120: the
same bits in every state, whatever was in them."""

from __future__ import annotations

import ast
import copy
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.patching.contract import find_definition
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import compressor_drafts as adapter
from deepseek_v4_sm120.sglang_patches.rows.compressor import CLEAR_DRAFTS
from deepseek_v4_sm120.specs.compressor import CLEANUP, CLEANUP_HOMES, make_drafts
from tests.emulator.emulated import emulated, ran
from tests.emulator.triton_kernels import on_emulator
from tests.patching.wheels import content, every_release, fetch, members, tree

SERVED = "0.5.15"  # and later
MODULE, METHOD = CLEAR_DRAFTS.split(":")
CHOICES = {"seed": 3, "most_instructions": 100, "multiprocessors": 4}
LAYERS = 3
_cases = {  # requests, tokens, ring, what is special
    "EAGLE 3/1/4": (5, 4, 256, ()),
    "two tokens": (2, 2, 256, ()),
    "eight tokens, a ring of one window": (3, 8, 128, ()),
    "all padded": (4, 4, 256, ("padded",)),
    "all accepted": (3, 4, 256, ("accepted",)),
    "nothing accepted, and less": (3, 6, 256, ("rejected",)),
    "parts of tables": (3, 4, 256, ("views",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cleanup")


def kernels_text(version: str) -> str:
    files = [f"{home.replace('.', '/')}.py" for home in CLEANUP_HOMES]
    (home,) = members(fetch(version)).intersection(files)
    return content(fetch(version), home)


def kernels(version: str, folder):
    """The wheel's module with the kernel and the function that launches it."""
    file = folder / f"cleanup_{version.replace('.', '_')}.py"
    file.write_text(kernels_text(version))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def method(version: str, module, online=False):
    """The pool's method out of the wheel."""
    node = copy.deepcopy(find_definition(tree(fetch(version), MODULE), METHOD))
    names = {"torch": torch, "ONLINE_C128": online}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), "wheel", "exec"), names)
    found, names[node.name] = names[node.name], getattr(module, CLEANUP)  # both have one name
    return found


def make(case: str):
    requests, tokens, ring, special = _cases[case]
    made = make_drafts(requests, tokens, LAYERS, ring=ring, seed=tokens, device="cpu")
    if "padded" in special:  # as rows of a captured graph are
        made.requests.zero_()
        made.lengths.fill_(1)
    if "accepted" in special:
        made.accepted.copy_(torch.tensor([tokens, tokens + 1, tokens]))
    if "rejected" in special:
        made.accepted.copy_(torch.tensor([0, -1, 0]))
    if "views" in special:
        for name in ("requests", "lengths", "accepted"):
            whole = torch.full((requests + 2,), 77, dtype=getattr(made, name).dtype)
            whole[1:-1] = getattr(made, name)
            setattr(made, name, whole[1:-1])
    return made


def pool_of(made):
    """Beside layers without a compressor, and with groups of 4."""

    def layer(state, ratio=128):
        return SimpleNamespace(ratio=ratio, ring_size=made.ring, kv_score_buffer=SimpleNamespace(kv_score=state))

    pools = [None, layer(torch.ones(8, 2048), 4)]
    for state in made.states:
        pools += [layer(state), None, layer(torch.ones(8, 2048), 4)]
    return SimpleNamespace(compress_state_pools=pools)


def given(made):
    return made.requests, made.lengths, made.accepted, made.tokens


@pytest.fixture(scope="module")
def agreed():
    """(kernel's file, method, case) that have agreed: most releases have the texts of the one before."""
    return set()


@every_release(SERVED)
@pytest.mark.parametrize("case", _cases)
def test_each_releases_method(version, case, folder, monkeypatch, agreed):
    texts = kernels_text(version), ast.unparse(find_definition(tree(fetch(version), MODULE), METHOD)), case
    if texts in agreed:
        return
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    module, stock = kernels(version, folder), make(case)
    ours = stock.copy()
    original = method(version, module)
    with emulated(**CHOICES), on_emulator(module):
        original(pool_of(stock), *given(stock))
    with emulated(**CHOICES):
        adapter.replace_clear_drafts(original)(pool_of(ours), *given(ours))
    assert ran("clear_drafts_kernel") == 1
    before = make(case)
    for mine, theirs, was in zip(ours.states, stock.states, before.states, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        assert torch.equal(was.view(torch.int32), theirs.view(torch.int32)) == (case == "all accepted")
    agreed.add(texts)


@every_release(SERVED)
def test_running_sums_are_left_alone(version, folder, monkeypatch):
    """The wheel's method returns where they are on, and the adapter leaves their states to it."""
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    made = make("EAGLE 3/1/4")
    made.states = [torch.zeros(64, 1536) for _ in made.states]
    made.ring = 1
    replaced = adapter.replace_clear_drafts(method(version, kernels(version, folder), online=True))
    with emulated(**CHOICES):
        replaced(pool_of(made), *given(made))
    assert not ran("clear_drafts_kernel") and not any(state.any() for state in made.states)
