"""Clients that leave a stream: each release's own cleanup, and ours in front of it where it ends no request."""

import asyncio
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes.disconnects import replace_discard
from deepseek_v4_sm120.sglang_patches.rows.http_server import TOKENIZER_MANAGER
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, since

MODULE = TOKENIZER_MANAGER.partition(":")[0]
METHODS = ("_discard_pending_req_states", "abort_request", "create_abort_task")
AFFECTED = ("0.5.18", "0.5.19")


class Later:
    """BackgroundTasks: what is done when the response is over."""

    def add_task(self, task):
        self.task = task


def manager(version, *, ours):
    """The release's own methods over stand-ins; what it sends to the scheduler."""

    async def at_once(seconds):
        pass

    names = {
        "AbortReq": lambda **given: ("abort", given["rid"]),
        "BackgroundTasks": Later,
        "asyncio": SimpleNamespace(sleep=at_once),
        "get_serving": lambda: SimpleNamespace(tokenizer_worker_num=1),
        **{"hasattr": hasattr, "getattr": getattr},
    }
    methods = {name: take(fetch(version), names, f"TokenizerManager.{name}", MODULE) for name in METHODS}
    if ours:
        methods["_discard_pending_req_states"] = replace_discard(methods["_discard_pending_req_states"])
    made = type("TokenizerManager", (), methods)()
    made.sent, made.enable_metrics, made.server_args = [], False, SimpleNamespace(tokenizer_worker_num=1)
    made._dispatch_to_scheduler = made.sent.append
    made.rid_to_state = {
        name: SimpleNamespace(time_stats=SimpleNamespace(api_server_dispatch_time=went))
        for name, went in (("went", 12.5), ("also went", 12.5), ("not yet", 0.0))
    }
    return made


def leave(made, rid):
    """What happens when the client of a stream goes away: its handler is cancelled, then the response's task runs."""
    request = SimpleNamespace(rid=rid, is_single=isinstance(rid, str))
    made._discard_pending_req_states(request)
    asyncio.run(made.create_abort_task(request).task())
    return made.sent


pytestmark = pytest.mark.usefixtures("served_card")


@pytest.mark.parametrize("version", AFFECTED)
def test_a_request_whose_client_left_is_ended(version):
    assert leave(manager(version, ours=False), "went") == []  # so SGLang generates it to its end
    made = manager(version, ours=True)
    assert leave(made, "went") == [("abort", "went")] and "went" not in made.rid_to_state
    assert leave(manager(version, ours=True), ["went", "also went"]) == [("abort", "went"), ("abort", "also went")]


@pytest.mark.parametrize("version", AFFECTED)
def test_what_never_went_to_the_scheduler_or_is_over_is_dropped_alone(version):
    made = manager(version, ours=True)
    assert leave(made, "not yet") == [] and "not yet" not in made.rid_to_state
    assert leave(made, "answered before") == []


@pytest.mark.parametrize("version", AFFECTED)
def test_the_state_is_dropped_though_the_scheduler_cannot_be_told(version):
    made = manager(version, ours=True)

    def broken(request):
        raise OSError("no scheduler")

    made._dispatch_to_scheduler = broken
    with pytest.raises(OSError, match="no scheduler"):
        leave(made, "went")
    assert "went" not in made.rid_to_state


@pytest.mark.parametrize("version", AFFECTED)
def test_elsewhere_it_stays_sglangs(version, monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert leave(manager(version, ours=True), "went") == []


@every_release()
def test_only_these_releases_drop_what_they_should_end(version):
    """Up to 0.5.16 a cancelled handler drops nothing; 0.5.17, and 0.5.20 on, end what was dispatched."""
    text = content(fetch(version), f"{MODULE.replace('.', '/')}.py")
    handler = text.partition("async def generate_request(")[2].partition("\n    def ")[0]
    is_dropped = "except BaseException:" in handler
    cleanup = text.partition("    def _discard_pending_req_states(")[2].partition("\n    def ")[0]
    is_ended = "AbortReq(" in cleanup or "_release_req_states_on_failure(" in handler
    assert is_dropped == since(version, "0.5.17")
    assert (is_dropped and not is_ended) == (version in AFFECTED)
