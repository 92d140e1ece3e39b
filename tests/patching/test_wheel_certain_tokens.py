"""What a draft is refused for where it is certain: each release's own kernel, in Triton's interpreter."""

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import certain_tokens
from deepseek_v4_sm120.sglang_patches.fixes.certain_tokens import OF_DRAFTS, PROBS, replace_verify
from tests.patching.wheels import RELEASES, since, unpacked

pytestmark = pytest.mark.usefixtures("opened")

DRAWS = """
import importlib.util, json, sys, torch
from deepseek_v4_sm120.sglang_patches.fixes import certain_tokens

certain_tokens.is_ours = lambda: True
V, T, X, GREATEST = 5000, 777, 4200, 1 - 2**-24

def drawn(verify, p, q, drafts, coin, last):
    # p: [requests, drafts + 1, V], q: [requests, drafts, V], coin: a number or [requests, drafts]
    requests, width = p.shape[:2]
    index = torch.arange(requests * width).view(requests, width)
    predicts, accepted = torch.zeros(requests * width, dtype=torch.int32), torch.empty(requests, dtype=torch.int32)
    coins = torch.as_tensor(coin, dtype=torch.float32).expand(requests, width - 1).contiguous()
    verify(
        predicts=predicts, accept_index=torch.full((requests, width), -1, dtype=torch.int32),
        accept_token_num=accepted, candidates=torch.cat([torch.zeros(requests, 1, dtype=torch.int64), drafts], 1),
        retrive_index=index, retrive_next_token=index, retrive_next_sibling=index,
        uniform_samples=coins, uniform_samples_for_final_sampling=torch.as_tensor(last).expand(requests).contiguous(),
        target_probs=p, draft_probs=q.clone(), threshold_single=1.0, threshold_acc=1.0, deterministic=True,
    )
    return [row[: number + 1] for row, number in zip(predicts.view(requests, width).tolist(), accepted.tolist())]

def places(verify):
    p, q = torch.zeros(1, 2, V), torch.full((1, 1, V), 1e-12)
    p[..., T], q[..., T] = GREATEST, 1.0
    given = {"refused": drawn(verify, p, q, torch.tensor([[T]]), GREATEST, 0.5)}
    p[..., T] = 1.0
    given["another one"] = drawn(verify, p, q, torch.tensor([[X]]), 0.5, 0.5)
    given["accepted"] = drawn(verify, p, q, torch.tensor([[T]]), GREATEST, 0.5)
    made = torch.Generator().manual_seed(7)
    p = torch.softmax(3 * torch.randn(12, 3, V, generator=made), -1)
    q = torch.softmax(p[:, :2].log() + torch.randn(12, 2, V, generator=made), -1)
    drafts = torch.multinomial(q.view(24, V), 1, generator=made).view(12, 2)
    coins, last = (torch.rand(shape, generator=made) for shape in ((12, 2), (12,)))
    given["ordinary"] = drawn(verify, p, q, drafts, coins, last)
    return given

found = {}
for number, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"kernel{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stock = module.chain_speculative_sampling_triton
    found[path] = [places(verify) for verify in (stock, certain_tokens.replace_verify(stock))]
print(json.dumps(found))
"""
LAST, TOKEN = 4999, 777


def kernels():
    """A release's file for each text that the releases have."""
    texts = {}
    for version in RELEASES:
        if since(version, "0.5.14"):
            folder = unpacked(version) / "sglang"
            name = "kernels/ops/speculative" if since(version, "0.5.16") else "srt/speculative"
            path = folder / name / "reject_sampling.py"
            texts[path.read_bytes()] = str(path)
    return list(texts.values())


def test_what_is_certain_is_drawn(python_with_torch, tmp_path):
    program = tmp_path / "draws.py"
    paths = kernels()
    program.write_text(f"import sys\nsys.argv[1:] = {paths!r}\n{DRAWS}")
    found = python_with_torch.json(program, env={"TRITON_INTERPRET": "1"}, timeout=600)
    assert list(found) == paths and len(paths) == 4
    for stock, ours in found.values():
        assert stock["refused"] == stock["another one"] == [[LAST]]  # so the row is needed
        assert ours["refused"] == [[TOKEN, TOKEN]] and ours["another one"] == [[TOKEN]]
        assert ours["accepted"] == stock["accepted"] == [[TOKEN, TOKEN]]
        assert ours["ordinary"] == stock["ordinary"] and len({len(row) for row in ours["ordinary"]}) == 3


def seen_of(**given):
    seen = []
    replace_verify(lambda *args, **kwargs: seen.append((args, kwargs)))("in front", **given)
    return seen


def test_a_later_release_that_calls_it_otherwise_draws_as_sglang(monkeypatch):
    told = []
    monkeypatch.setattr(certain_tokens.report, "warn_once", told.append)
    assert seen_of(other=1) == [(("in front",), {"other": 1})]
    assert told == ["certain_tokens does nothing: SGLang gives <lambda> no draft_probs"]


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", True), ("deepseek_v4", False), ("llama", True)])
def test_elsewhere_it_stays_sglangs(model, card, opened, monkeypatch):
    told = []
    opened(model, card)
    monkeypatch.setattr(certain_tokens.report, "warn_once", told.append)
    assert seen_of(other=1) and bool(told) is (model == "deepseek_v4" and card)
    probs = torch.full((2, 3), 0.5)
    ((args, kwargs),) = seen_of(**{PROBS: probs})
    assert args == ("in front",) and kwargs[PROBS] is probs
    assert probs.eq(0.5 * (OF_DRAFTS if model == "deepseek_v4" and card else 1.0)).all()
