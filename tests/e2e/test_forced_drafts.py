"""The plugin that forces drafts: what it writes over a request's, and the places of SGLang's that it hooks."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.patching.test_wheel_wo_a import definition
from tests.patching.wheels import fetch

PLUGIN = Path(__file__).resolve().parent / "drafts_plugin" / "forced_drafts.py"
RELEASES = ("0.5.17", "0.5.23")  # that the stages run


@pytest.fixture
def plugin():
    spec = importlib.util.spec_from_file_location("forced_drafts", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_how_many_verifications(plugin):
    assert [plugin.verifications("none", 96, n) for n in (1, 3, 5)] == [95, 95, 95]
    assert [plugin.verifications("all", 96, n) for n in (1, 3, 5)] == [48, 24, 16]
    halves = [plugin.verifications("half", 96, n) for n in (1, 3, 5)]
    assert halves == sorted(halves, reverse=True) and 95 / halves[1] == pytest.approx(1.9, abs=0.3)
    accepted = set()
    for start in range(1, 90):
        accepted.add(next((i for i in range(3) if not plugin.is_right("half", start + i)), 3))
    assert accepted == {0, 1, 2, 3}, "all of it occurs"
    assert plugin.forced("none", [0, 5]) == [1, 4] and plugin.forced("all", [0, 5]) == [0, 5]


@pytest.mark.parametrize("kind", ["none", "half", "all"])
def test_what_a_verification_gets(plugin, tmp_path, monkeypatch, kind):
    """As SGLang would verify it greedily: the text is the plain one, after as many verifications as are reckoned."""
    texts = {5: [7, 3, 9, 9, 0, 4, 8, 1, 6, 2, 5, 3], 9: list(range(20, 32))}
    file = tmp_path / "text.json"
    answers = {"single": {"1x5": {"ids": texts[5]}}, "batch": {"8x9": {"ids": texts[9]}}}
    file.write_text(json.dumps(answers))
    monkeypatch.setenv("E2E_TEXT", str(file))
    monkeypatch.setenv("E2E_DRAFTS", kind)
    prompts, drafts = [9, 4, 5], 3
    said, counts = {n: [text[0]] for n, text in texts.items()}, dict.fromkeys(texts, 0)
    while any(len(said[n]) < 12 for n in said):
        lengths = [n + len(said.get(n, [0])) - 1 for n in prompts]
        batch = SimpleNamespace(
            reqs=[SimpleNamespace(origin_input_ids=[1] * n) for n in prompts],
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            forward_mode=SimpleNamespace(is_idle=lambda: False),
        )
        tokens = torch.full((3, drafts), -5, dtype=torch.int64)

        def verify(batch, draft_input, parents, scores, drafts, *rest, device):
            return drafts

        given = plugin.of_eagle(verify)(batch, None, None, None, tokens, None, device="cpu")
        assert given is tokens and (tokens[1] == -5).all(), "a prompt that nobody asked keeps its own"
        for row, n in ((0, 9), (2, 5)):
            if len(said[n]) >= 12:
                continue
            counts[n] += 1
            for draft in [*tokens[row].tolist(), None]:
                if len(said[n]) < 12:
                    said[n].append(texts[n][len(said[n])])
                if draft != said[n][-1]:
                    break
    assert said == texts and set(counts.values()) == {plugin.verifications(kind, 12, drafts)}


def test_dsparks_proposal_is_written_where_it_is_read(plugin, tmp_path, monkeypatch):
    (tmp_path / "text.json").write_text(json.dumps({"single": {"1x5": {"ids": [1, 2, 3, 4]}}, "batch": {}}))
    monkeypatch.setenv("E2E_TEXT", str(tmp_path / "text.json"))
    monkeypatch.setenv("E2E_DRAFTS", "all")
    buffer = torch.zeros(8, dtype=torch.int64)
    proposal = SimpleNamespace(draft_block=SimpleNamespace(draft_tokens=buffer[:3].view(1, 3)))
    batch = SimpleNamespace(reqs=[SimpleNamespace(origin_input_ids=[0] * 5)], seq_lens=torch.tensor([5]))
    propose = plugin.of_dspark(lambda self, *, batch, bs: proposal)
    assert propose(None, batch=batch, bs=1) is proposal and buffer[:3].tolist() == [2, 3, 4]
    proposal.verify_ids = torch.zeros(1, 4, dtype=torch.int64)
    propose(None, batch=batch, bs=1)
    assert proposal.verify_ids.tolist() == [[0, 2, 3, 4]]


def test_both_are_hooked_once_a_scheduler_is_made(plugin, monkeypatch):
    asked, propose = [], lambda self, *, batch: None
    eagle, dspark = SimpleNamespace(build_eagle_verify_input=len), SimpleNamespace(DraftBlockProposer=SimpleNamespace())
    dspark.DraftBlockProposer.propose = propose
    modules = {
        plugin.EAGLE: eagle,
        plugin.DSPARK: dspark,
        "sglang.srt.plugins.hook_registry": SimpleNamespace(
            HookRegistry=SimpleNamespace(register=lambda *call: asked.append(call)),
            HookType=SimpleNamespace(AFTER="after"),
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.delenv("E2E_DRAFTS", raising=False)
    plugin.register()
    assert asked == []
    monkeypatch.setenv("E2E_DRAFTS", "half")
    plugin.register()
    assert asked == [(plugin.SCHEDULER, plugin.hook, "after")]
    assert plugin.hook(None, "a scheduler", port=1) is None
    assert (
        eagle.build_eagle_verify_input.__wrapped__ is len and dspark.DraftBlockProposer.propose.__wrapped__ is propose
    )


def call_of(node, name):
    (found,) = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(name)]
    return found


@pytest.mark.parametrize("version", RELEASES)
def test_the_places_are_there(plugin, version):
    wheel = fetch(version)
    classes = ("EagleDraftWorker", "EagleDraftWorkerBase")
    draft = next(d for c in classes if (d := definition(wheel, f"{c}.draft", plugin.EAGLE)))
    given = [ast.unparse(a) for a in call_of(draft, plugin.BUILD).args]
    assert given[:5] == ["batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens"]
    common = "sglang.srt.speculative.eagle_worker_common"
    made = [a.arg for a in definition(wheel, plugin.BUILD, common).args.args]
    assert made[:5] == given[:5]
    propose = definition(wheel, f"{plugin.PROPOSER}.{plugin.PROPOSE}", plugin.DSPARK)
    assert "batch" in [a.arg for a in propose.args.kwonlyargs] and [a.arg for a in propose.args.args] == ["self"]
    made = call_of(propose, "DraftProposal")
    assert {"draft_block"} <= {k.arg for k in made.keywords}
    assert ("verify_ids" in {k.arg for k in made.keywords}) == (version == "0.5.23")
    module, _, qualname = plugin.SCHEDULER.partition(".Scheduler.")
    assert definition(wheel, f"Scheduler.{qualname}", module) is not None
    registry = definition(wheel, "HookRegistry.register", "sglang.srt.plugins.hook_registry")
    assert [a.arg for a in registry.args.args] == ["cls", "target", "hook", "hook_type"]
