"""A request that replaces its whole session: each release's own Session, with and without ours."""

import time
import uuid
from array import array
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes.replaced_sessions import replace_create_request
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

MODULE = "sglang.srt.session.session_controller"

pytestmark = [pytest.mark.usefixtures("opened"), every_release()]


class Abort:
    pass


class Request:
    """As much of SGLang's as a session asks for."""

    def __init__(self, rid, origin_input_ids, **_):
        self.rid, self.origin_input_ids = rid, origin_input_ids
        self.origin_input_ids_unpadded = origin_input_ids
        self.output_ids, self.sampling_params = array("q", [9]), SimpleNamespace(max_new_tokens=5)
        self.finished_reason = self.to_finish = self.multimodal_inputs = None

    def finished(self):
        return self.finished_reason is not None

    def set_finish_with_abort(self, message):
        self.to_finish = message

    def inherit_mm_token_counts(self, _):
        pass


class Asked:
    def __init__(self, name, tokens, **params):
        self.rid, self.input_ids = name, array("q", tokens)
        kept = {"id": "a session", "rid": None, "offset": None, "replace": False, "drop_previous_output": False}
        self.session_params = SimpleNamespace(**kept | params)

    def __getattr__(self, name):
        return None


class Talk:
    """A release's session. ours: with what mends it."""

    def __init__(self, version, *, ours=True, streaming=False):
        names = {"FINISH_ABORT": Abort, "Req": Request, "time": time, "uuid": uuid, "array": array}
        for name in ("SessionReqNode", "Session"):
            kind = take(fetch(version), names, name, MODULE)
        create = replace_create_request(kind.create_req) if ours else kind.create_req
        self.session = kind(100, "a session", streaming=streaming)
        self.create = create.__get__(self.session)

    def ask(self, name, tokens, **params):
        return self.create(Asked(name, tokens, **params), None, 100)

    def ended(self, name, tokens, **params):
        request = self.ask(name, tokens, **params)
        request.finished_reason = "length"
        return request

    @property
    def kept(self):
        return list(self.session.req_nodes)


def grown(version, **given):
    """A session of two turns, a fork of the first, and one that runs."""
    talk = Talk(version, **given)
    first = talk.ended("first", [1, 2])
    others = [talk.ended(name, [3], rid="first") for name in ("second", "fork")]
    return talk, [first, *others, talk.ask("runs", [5], rid="second")]


def test_it_begins_anew(version):
    talk, requests = grown(version)
    fresh = talk.ask("fresh", [7, 8], replace=True)
    assert list(fresh.origin_input_ids) == [7, 8] and fresh.to_finish is None
    assert talk.kept == ["fresh"]
    assert [type(one.to_finish) for one in requests] == [type(None)] * 3 + [Abort]  # what runs ends
    fresh.finished_reason = "stop"
    assert list(talk.ask("next", [6], rid="fresh").origin_input_ids) == [7, 8, 9, 6]


@pytest.mark.parametrize("turns", [1, 2])
def test_sglang_alone_ends_its_scheduler(version, turns):
    talk = Talk(version, ours=False)
    for turn in range(turns):
        talk.ended(f"turn {turn}", [1])
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        talk.ask("fresh", [7], replace=True)


def test_an_empty_session_and_one_request_of_it_are_sglangs(version):
    assert Talk(version).ask("fresh", [7], replace=True).to_finish is None
    (talk, _), (theirs, _) = grown(version), grown(version, ours=False)
    mine, other = (one.ask("again", [6], rid="first", replace=True) for one in (talk, theirs))
    assert list(mine.origin_input_ids) == list(other.origin_input_ids) == [1, 2, 9, 6]
    assert talk.kept == theirs.kept == ["first", "again"]


def test_a_request_that_goes_on_from_none_takes_none_away(version):
    (talk, requests), (theirs, _) = grown(version), grown(version, ours=False)
    assert [list(one.ask("another", [7]).origin_input_ids) for one in (talk, theirs)] == [[7]] * 2
    assert talk.kept == theirs.kept == ["first", "second", "fork", "runs", "another"]
    assert [one.to_finish for one in requests] == [None] * 4


def test_a_streaming_session_refuses_it_and_keeps_its_turn(version):
    talk = Talk(version, streaming=True)
    node = SimpleNamespace(req=Request("first", array("q", [1])), abort=None)
    talk.session.req_nodes["first"] = node
    assert "replace" in talk.ask("fresh", [7], replace=True).to_finish and talk.kept == ["first"]


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    talk, _ = grown(version)
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        talk.ask("fresh", [7], replace=True)
