"""Repetition penalties: each release compiles what applies them; ours gives the same bits without."""

import ast

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import plain_scaling
from deepseek_v4_sm120.sglang_patches.rows.first_uses import REPETITION
from tests.patching.wheels import WheelSources, every_release, fetch

NAME = "apply_scaling_penalties"


def own(version):
    """The release's function, without the compiler."""
    (function,) = (
        node for node in WheelSources(fetch(version)).parse(REPETITION).tree.body if getattr(node, "name", "") == NAME
    )
    compiled = [ast.unparse(one) for one in function.decorator_list if "torch.compile" in ast.unparse(one)]
    assert compiled and "dynamic=True" in compiled[0]
    body = ast.Module([ast.FunctionDef(**{**vars(function), "decorator_list": []})], [])
    names = {"torch": torch}
    exec(compile(ast.fix_missing_locations(body), REPETITION, "exec"), names)
    return names[NAME]


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setattr(plain_scaling, "is_ours", lambda: True)

    def refused(*_):
        raise AssertionError("the compiled one is called")

    return plain_scaling.replace_apply(refused)


@every_release()
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits(version, kind, ours):
    made = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 400, generator=made) * 20).to(kind)
    logits[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30]).to(kind)
    penalties = torch.rand(5, 400, generator=made) * 1.9 + 0.1
    penalties[:, ::3] = 1.0  # tokens that were not said
    expected, found = logits.clone(), logits.clone()
    own(version)(expected, penalties)
    assert ours(found, penalties) is None
    whole = {2: torch.int16, 4: torch.int32}[kind.itemsize]
    assert torch.equal(found.view(whole), expected.view(whole)) and not torch.equal(found[1:], logits[1:])


def test_logits_in_part_of_a_buffer_are_changed_in_place(ours):
    buffer = torch.tensor([[1.0, -1.0, 7.0], [2.0, -2.0, 7.0]])
    ours(buffer[:, :2], torch.full((2, 2), 2.0))
    assert buffer.tolist() == [[0.5, -2.0, 7.0], [1.0, -4.0, 7.0]]


def test_another_model_or_card_has_sglangs_own(monkeypatch):
    monkeypatch.setattr(plain_scaling, "is_ours", lambda: False)
    assert plain_scaling.replace_apply(lambda *given: given)("logits", "penalties") == ("logits", "penalties")
