"""The recorder around each release's own code on the CPU: the model's forward with two layers, the MTP block's, and the
words by which they, and the runner, are called. What is recorded is what their sublayers were given."""

import ast
import importlib
import inspect
import json
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.layers import asking, record
from deepseek_v4_sm120.patching.engine import NOT_APPLICABLE, READY, Engine
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import layer_record
from deepseek_v4_sm120.sglang_patches.names import DSPARK_SINCE, MODEL, PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.rows.layers import LAYERS
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.adapters.dealt_streams_model import Ranks, tokens
from tests.patching import test_wheel_mhc_dealt_streams as whole
from tests.patching import test_wheel_mtp_block as block
from tests.patching.test_wheel_mhc_dealt_streams import state  # noqa: F401  a fixture
from tests.patching.test_wheel_wo_a import definition
from tests.patching.test_wheels import inspect_wheel  # noqa: F401  a fixture
from tests.patching.wheels import every_release, since, tree

FIRST, ROWS = "0.5.14", 3
ASKED = {"id": "a1", "rows": 100, "bytes": 1 << 30}


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """One that is asked, in SGLang's place for what it asks for itself."""
    found = layer_record.Recorder(tmp_path, serves=lambda device: True)
    others = {
        MODEL: SimpleNamespace(get_is_capture_mode=lambda: False),
        PARALLEL_STATE: SimpleNamespace(_TP=SimpleNamespace(rank_in_group=0)),
    }
    real = importlib.import_module
    fake = SimpleNamespace(import_module=lambda name: others.get(name) or real(name))
    monkeypatch.setattr(layer_record, "importlib", fake)
    (tmp_path / asking.ASKED).write_text(json.dumps(ASKED))
    found.look(SimpleNamespace())
    return found


def batch_of(mode, **others):
    made = SimpleNamespace(forward_mode=SimpleNamespace(name=mode), **others)
    made.req_pool_indices, made.extend_seq_lens = torch.tensor([1]), torch.tensor([ROWS])
    return made


@every_release(FIRST)
def test_the_models_own_forward_is_recorded(version, sglang_wheel, recorder, tmp_path):
    replaced = layer_record.hooks_of(lambda: recorder)
    given, wheel = [], sglang_wheel(version)

    def noting(original):
        def forward(self, x, *args, **kwargs):
            given.append(x.clone())
            return original(self, x, *args, **kwargs)

        return forward

    def body(coordinator):
        model = whole.model_of(wheel, version, patched=False)
        plain = whole.run(model, ROWS)
        kinds = {part: type(getattr(model.layers[0], part)) for part in ("self_attn", "mlp")}
        for kind, name in ((kinds["self_attn"], "attention"), (kinds["mlp"], "experts")):
            kind.forward = replaced[name](noting(kind.forward))
        for layer in model.layers[1:]:
            for part, kind in kinds.items():
                if type(getattr(layer, part)) is not kind:
                    made = type(getattr(layer, part))
                    made.forward = replaced["attention" if part == "self_attn" else "experts"](noting(made.forward))
        batch = whole.batch_of(False)
        batch.forward_mode.name = "EXTEND"
        batch.req_pool_indices, batch.extend_seq_lens = torch.tensor([1]), torch.tensor([ROWS])
        forward = replaced["model"](type(model).forward)
        found = forward(model, tokens(ROWS), torch.arange(ROWS), batch, None)
        assert all(map(torch.equal, plain, found))
        return found[0]

    (out,) = Ranks(1).each(body)
    recorder.look(SimpleNamespace())
    (one,) = record.read(tmp_path / "a1")
    assert one["kind"] == "target" and torch.equal(one["out"], out) and len(one["y"]) == len(given) == 2 * whole.LAYERS
    assert all(map(torch.equal, one["y"], given)) and one["tokens"].tolist() == tokens(ROWS).tolist()


@every_release(FIRST)
def test_the_blocks_own_forward_is_recorded(version, recorder, tmp_path, monkeypatch):
    replaced = layer_record.hooks_of(lambda: recorder)
    given, taken = block.Weights(), block.take

    def taking(wheel, names, qualname, module):
        found = taken(wheel, names, qualname, module)
        if not qualname.endswith(".forward"):
            return found

        def forward(model, token_ids, positions, batch):
            mode = SimpleNamespace(name="EXTEND")
            vars(batch).update(forward_mode=mode, req_pool_indices=torch.tensor([1]))
            batch.extend_seq_lens = torch.tensor([len(positions)])
            return replaced["draft"](found)(model, token_ids, positions, batch)

        return forward

    monkeypatch.setattr(block, "take", taking)
    found, _ = block.by_sglang(version, given, ours=False)
    recorder.look(SimpleNamespace())
    (one,) = record.read(tmp_path / "a1")
    assert one["kind"] == "draft" and torch.equal(one["hidden"], given.streams.flatten(1))
    assert torch.equal(one["out"], found)


@pytest.mark.parametrize("version", ["0.5.13", "0.5.14", "0.5.23"])
def test_its_places_fit_where_a_record_is_asked_for(inspect_wheel, version):  # noqa: F811
    """In the releases that were looked at, behind all others of the same function; without the variable nothing is."""
    inspect_wheel(version, fresh=True)
    made, without = (Engine(TABLE, host="sglang", settings=Settings(layers=folder)) for folder in ("/record", None))
    made.survey()
    found = [one for one in made.records if one.patch is LAYERS]
    is_known = since(version, FIRST)
    told = {(one.state, one.review) for one in found}
    assert told == ({(READY, "reviewed")} if is_known else {(NOT_APPLICABLE, "")})
    of_release = [one for one in LAYERS.targets if one.sglang != DSPARK_SINCE or since(version, "0.5.16")]
    assert not is_known or len(found) == len(of_release)
    for one in found if is_known else ():
        assert [other.patch for other in made.records if other.where == one.where][-1] is LAYERS
    [left] = [one for one in without.records if one.patch is LAYERS]
    assert (left.state, left.reason) == (NOT_APPLICABLE, "only with DSV4_SM120_LAYERS")


def calls(tree_, name):
    return [n for n in ast.walk(tree_) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


@every_release(FIRST)
def test_what_is_replaced_is_called_so(version, sglang_wheel):
    """Attention with x first, or by that name; experts' inputs first."""
    model = tree(sglang_wheel(version), MODEL)
    for name, first, wrapper in (
        ("self.self_attn", "x", layer_record.replace_attention_forward),
        ("self.mlp", "hidden_states", layer_record.replace_experts_forward),
    ):
        found = calls(model, name)
        assert found
        for call in found:
            keywords = {one.arg: one.value for one in call.keywords if one.arg}
            signature = inspect.signature(wrapper(lambda: 0), follow_wrapped=False)
            given = signature.bind(None, *call.args, **keywords).arguments[first]
            assert given is (call.args[0] if call.args else keywords[first])
    for target in LAYERS.targets:
        if target.sglang == DSPARK_SINCE and not since(version, "0.5.16"):
            continue
        module, _, qualname = target.where.partition(":")
        assert definition(sglang_wheel(version), qualname, module) is not None
    runner = definition(sglang_wheel(version), "ModelRunner.forward", "sglang.srt.model_executor.model_runner")
    assert [one.arg for one in runner.args.args[:2]] == ["self", "forward_batch"]
