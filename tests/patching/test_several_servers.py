"""Several servers of one process (SGLang's engine in a script or notebook), of our model and of others, and a server
that such a process starts: each release's own resolution of arguments, one server behind the other, on two faked SM120
cards. A server is told what it would be told alone."""

import json

import pytest

from deepseek_v4_sm120.patching import report
from tests.patching.started import RESOLVES
from tests.patching.wheels import since

SERVERS = (
    RESOLVES
    + """    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.patching import report
    from deepseek_v4_sm120.sglang_patches import models_served
    engine, found = patching.active_engine(), []
    for folder, more, *variables in MORE:
        os.environ.update(*variables)
        given = {"model_path": folder or MODEL, "tp_size": 2, "skip_tokenizer_init": True}
        arguments = ServerArgs(**given | more)
        if hasattr(arguments, "resolve_once"):
            arguments.resolve_once()
        found.append({
            "environment": {k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "_DSV4"))},
            "states": {c.default: [c.state, c.reason, c.applied] for c in engine.steering.outcomes} if engine else {},
            "notes": [say() for say, _ in report._notes.values()],
            "told": models_served.announced(),
        })
    print(json.dumps(found))
"""
)
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 32, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 4096}
SET = {"DSV4_SM120_SET": "reproducible=on"}  # with a variable on releases that have no other
# the two forms of the place, one release after the other
some_releases = pytest.mark.parametrize("version", ["0.5.12", "0.5.17", "0.5.23"], scope="module")
FOR_GOOD = ("_DSV4_SM120_TOLD", "_DSV4_SM120_VERDICT")  # of the machine and the release, not of a model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


_behind_ours: dict[tuple, list] = {}


def behind_ours(run, llama, version, **environment):
    """What one process tells of a server of ours, and of another model's behind it; once, whichever test asks."""
    key = version, *sorted(environment.items())
    if key not in _behind_ours:
        _behind_ours[key] = run(SERVERS, more=repr([(None, {}), (llama, {})]), version=version, **environment)
    return _behind_ours[key]


def environment(found):
    return {name: value for name, value in found["environment"].items() if name not in FOR_GOOD}


@some_releases
def test_another_models_server_behind_ours_is_told_nothing(run, llama, version):
    ours, other = behind_ours(run, llama, version, **(SET if since(version, "0.5.14") else {}))
    _, without = behind_ours(run, llama, version, DSV4_SM120="off")
    assert ours["told"]["on_served_card"] and "_DSV4_SM120_CHILD_ENVIRONMENT" in ours["environment"]
    assert other["told"] is None and environment(other) == environment(without)


@some_releases
def test_nor_is_one_that_a_process_of_ours_starts(run, llama, version):
    more = SET if since(version, "0.5.14") else {}
    ours, _ = behind_ours(run, llama, version, **more)
    [other] = run(SERVERS, more=repr([(llama, {})]), version=version, **ours["environment"], **more)
    _, without = behind_ours(run, llama, version, DSV4_SM120="off")
    assert other["told"] is None and environment(other) == environment(without)


@some_releases
def test_a_server_of_ours_is_told_the_same_behind_any_other(run, llama, version):
    own = {"prefill_decode_interval": 3} if since(version, "0.5.20") else {}
    asked = [(None, {}), (None, {"enable_torch_compile": True}), (None, {"disable_custom_all_reduce": True, **own})]
    alone = [run(SERVERS, more=repr([one]), version=version)[0] for one in asked]
    behind = [one for one in asked for one in ((llama, {}), one)]
    for order in (behind, [asked[2], asked[1], asked[0], asked[1], asked[2]]):
        found = run(SERVERS, more=repr(order), version=version)
        for one, told in zip(order, found, strict=True):
            if one in asked:
                expected = alone[asked.index(one)]
                assert {**told, "environment": {}} == {**expected, "environment": {}}, one
                handed = "_DSV4_SM120_CHILD_ENVIRONMENT"
                assert told["environment"].get(handed) == expected["environment"].get(handed), one


@some_releases
def test_a_front_that_is_not_pythons_is_noted(run, llama, version):
    """SGLang's Rust server, which 0.5.12 does not have: of our model, and no other, where it is asked for."""
    asked = [(folder, {}, {"SGLANG_RUST_SERVER": word}) for word in ("1", "0", "1") for folder in (None, llama)]
    found = run(SERVERS, more=repr(asked), version=version)
    noted = [sum(note.startswith("SGLANG_RUST_SERVER") for note in one["notes"]) for one in found]
    there = int(since(version, "0.5.17"))
    assert noted == [there, 0, 0, 0, there, 0]


def test_what_was_noted_of_a_server_before_is_not_this_ones(monkeypatch):
    monkeypatch.setattr(report, "_notes", {})
    report.add_note("profile", lambda: "of other cards")
    report.forget_notes()
    assert report._notes == {}
