"""long-chats and cancelled-requests: what their tables of lies (state_lies.py) cannot say, as it is in the server."""

from __future__ import annotations

import ast
import contextlib
import time
import zipfile

import pytest

from bench.quality import gates, server_load
from bench.serving.endpoint import Endpoint
from bench.serving.server_errors import ServerNonsense, ServerRefused
from tests.quality.test_gates import PACE, run  # noqa: F401
from tests.serving import fake_server
from tests.serving.conftest import wheel

SETTLE = ("--settle", "0.6")


@pytest.mark.parametrize("gate", ["long-chats", "cancelled-requests"])
@pytest.mark.parametrize("arguments", [(), ("--prompts", "random")])
def test_a_right_server_passes_with_any_prompts(gate, arguments, run, serve):  # noqa: F811
    code, found = run(gate, serve(**PACE), *arguments)
    assert code == gates.PASSED and found["findings"] == [], found


def test_a_chat_is_asked_grown_cold_and_again_and_shows_that_the_cache_was_used(run, serve):  # noqa: F811
    server, seen = serve(**PACE), []
    original = server.engine.find_cached

    def find_cached(ids):
        seen.append((len(ids), original(ids)))
        return seen[-1][1]

    server.engine.find_cached = find_cached
    code, found = run("long-chats", server)
    assert code == gates.PASSED and found["figures"]["answers_compared"] == 2 * (3 + 2)
    grown, asked_twice = seen[:3], seen[3:9]
    assert [cached > 0 for _, cached in grown] == [False, True, True]
    assert [length for length, _ in asked_twice[::2]] == [length for length, _ in grown], "the same prompts"
    assert all(cached == 0 for _, cached in asked_twice[::2]) and all(cached > 0 for _, cached in asked_twice[1::2])
    assert found["figures"]["least_cached_share"] > 0.5 and grown[2][0] > grown[1][0] > grown[0][0] > 400


def test_thoughts_are_left_out_of_the_next_prompt(run, serve):  # noqa: F811
    server, prompts = serve(**PACE), []
    original = server.engine.find_cached
    server.engine.find_cached = lambda ids: prompts.append(server.engine.tokens.text(ids)) or original(ids)
    steps = server.engine.steps
    thought = server.engine.tokens.ids("I think about it. </think> It is so.")

    def thinking(ids, limit, ignore_eos):
        for place, (token, *rest) in enumerate(steps(ids, limit, ignore_eos)):
            yield (thought[place] if place < len(thought) else token, *rest)

    server.engine.steps = thinking
    run("long-chats", server)
    chats = [text for text in prompts if text.endswith("<think>")]
    assert len(chats) == 3 * 3 and "<think>" not in chats[2][:-7] and "I think about it" not in chats[2]
    assert chats[2].count("</think> It is so.") == 2 and chats[2].count("<｜end▁of▁sentence｜><｜User｜>") == 2
    assert any(text.endswith("</think>") for text in prompts)


def test_a_tie_of_the_cache_is_stated_and_is_no_fault(run, serve):  # noqa: F811
    server = serve(**PACE)
    find, candidates = server.engine.find_cached, server.engine.candidates
    found_cached = []

    def find_cached(ids):
        found_cached.append(find(ids))
        return found_cached[-1]

    def flipped(state):  # one request at a time: the last prompt's is this one's
        best = candidates(state)
        return [best[1], best[0], *best[2:]] if found_cached[-1] and best[0][0] == best[1][0] else best

    server.engine.find_cached, server.engine.candidates = find_cached, flipped
    code, found = run("long-chats", server)
    assert code == gates.PASSED and found["figures"]["ties"] > 0
    assert all(finding.endswith("a tie") for finding in found["findings"])


def test_a_cache_that_is_not_emptied_is_incomplete(run, serve):  # noqa: F811
    server = serve(**PACE)

    class Kept(set):
        def clear(self):
            pass

    server.engine.cached = Kept()
    code, found = run("long-chats", server)
    assert code == gates.INCOMPLETE and "in an emptied cache" in found["incomplete"]


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_does_not_empty_its_cache_is_incomplete(status, run, serve):  # noqa: F811
    def say(handler, content):
        if handler.path == "/flush_cache":
            handler.path = "/elsewhere"
            handler.refuse("no", status)
            return None
        return content

    code, found = run("long-chats", serve(lie=say, **PACE))
    assert code == gates.INCOMPLETE and f"{status}: no" in found["incomplete"]


# --- cancelled requests


def test_a_storm_is_seen_and_its_figures_are_true(run, serve):  # noqa: F811
    server = serve(**PACE)
    code, found = run("cancelled-requests", server, "--requests", "16", "--rounds", "2")
    figures = found["figures"]
    assert code == gates.PASSED and figures["requests"] == 32 and figures["cancelled"] == 24
    assert figures["aborts_confirmed"] == 8 and figures["ran_at_once"] >= 8 and figures["tokens_in_use_max"] > 1000
    assert server.engine.requests.cancelled >= 16 and not server.engine.requests.live


def test_clients_that_leave_are_not_noticed(run, serve, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fake_server, "has_left", lambda _: False)
    original = fake_server.Handler.send_event

    def send_event(self, content):
        with contextlib.suppress(OSError):  # and on it goes
            original(self, content)

    monkeypatch.setattr(fake_server.Handler, "send_event", send_event)
    code, found = run("cancelled-requests", serve(**PACE), *SETTLE)
    assert code == gates.FAILED and "after every client has gone" in found["findings"][0]
    code, found = run("cancelled-requests", serve(**PACE), "--storm-new", "100")
    assert code == gates.INCOMPLETE and "their own end" in found["incomplete"]


def test_aborts_that_are_ignored_are_not_passed(run, serve):  # noqa: F811
    server = serve(**PACE)
    server.engine.requests.abort = lambda *_: None
    code, found = run("cancelled-requests", server, "--storm-new", "300")
    assert code == gates.INCOMPLETE and found["figures"]["aborts_confirmed"] == 0


def test_an_abort_that_ends_its_neighbours_fails(run, serve):  # noqa: F811
    server = serve(**PACE)
    original = server.engine.requests.abort
    server.engine.requests.abort = lambda rid, _: original("", True)
    code, found = run("cancelled-requests", server, "--new", "96")
    assert code == gates.FAILED and any("which nobody cancelled: aborted" in one for one in found["findings"])


def test_tokens_that_a_cancelled_request_keeps_fail(run, serve):  # noqa: F811
    server = serve(**PACE)
    original = server.engine.requests.end

    def end(live, cancelled):
        original(live, cancelled)
        server.engine.requests.held += live.tokens if cancelled else 0

    server.engine.requests.end = end
    code, found = run("cancelled-requests", server, *SETTLE)
    assert code == gates.FAILED and "of the KV cache are not given back" in found["findings"][0]


def test_a_cache_that_cannot_be_emptied_after_the_storm_fails(run, serve):  # noqa: F811
    def say(handler, content):
        if handler.path == "/flush_cache" and handler.engine.requests.cancelled:
            handler.path = "/elsewhere"
            handler.refuse("Cache not flushed because there are pending requests", 400)
            return None
        return content

    code, found = run("cancelled-requests", serve(lie=say, **PACE), *SETTLE)
    assert code == gates.FAILED and "the cache cannot be emptied" in str(found["findings"])


def test_a_server_that_dies_in_the_storm_is_incomplete(run, serve):  # noqa: F811
    code, found = run("cancelled-requests", serve("die_mid_stream", die_after=8, **PACE))
    assert code == gates.INCOMPLETE and "in the storm" in found["incomplete"]


def test_where_log_probabilities_are_refused_the_tokens_are_compared(run, serve):  # noqa: F811
    code, found = run("cancelled-requests", serve("rejects_logprobs", **PACE))
    assert code == gates.PASSED and "by their tokens alone" in found["notes"][0]


@pytest.mark.parametrize(
    ("gate", "arguments"),
    [
        ("long-chats", ("--chats", "0")),
        ("long-chats", ("--turns", "1")),
        ("long-chats", ("--new", "1")),
        ("cancelled-requests", ("--requests", "3")),
        ("cancelled-requests", ("--rounds", "0")),
        ("cancelled-requests", ("--num-prompts", "0")),
        ("cancelled-requests", ("--storm-new", "10")),
        ("cancelled-requests", ("--settle", "0")),
    ],
)
def test_a_run_that_would_prove_nothing_is_a_usage_error(gate, arguments, run, serve):  # noqa: F811
    assert run(gate, serve(**PACE), *arguments) == (gates.USAGE, None)


# --- what the server says of its load


def test_a_flush_that_comes_too_early_is_asked_again(serve):
    refused = []

    def say(handler, content):
        if handler.path == "/flush_cache" and len(refused) < 3:
            refused.append(1)
            handler.path = "/elsewhere"
            handler.refuse("pending requests", 400)
            return None
        return content

    endpoint = Endpoint(serve(lie=say).url, 5)
    server_load.empty_cache(endpoint)
    assert len(refused) == 3
    del refused[:]
    with pytest.raises(ServerRefused, match="400"):
        server_load.empty_cache(endpoint, 0.0)


def test_load_is_the_sum_of_all_ranks(serve):
    def say(handler, content):
        return {"loads": [content["loads"][0] | {"num_used_tokens": n, "num_running_reqs": 1} for n in (3, 4)]}

    load = server_load.load_of(Endpoint(serve(lie=say).url, 5))
    assert (load.running, load.waiting, load.used, load.is_idle) == (2, 0, 7, False)
    begin = time.monotonic()
    assert not server_load.until_idle(Endpoint(serve(lie=say).url, 5), 0.2)[0].is_idle
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("value", [None, True, "3", 1.5, []])
def test_a_load_of_another_type_is_refused(value, serve):
    def say(handler, content):
        return {"loads": [content["loads"][0] | {"num_used_tokens": value}]}

    with pytest.raises(ServerNonsense, match="num_used_tokens"):
        server_load.load_of(Endpoint(serve(lie=say).url, 5))


@pytest.mark.parametrize("version", ["0.5.12", "0.5.14", "0.5.17", "0.5.20", "0.5.23"])
def test_the_releases_have_what_the_gates_ask_for(version, serve):
    """The fake server's load has the real one's names, and the routes and fields that the gates use are there."""
    with zipfile.ZipFile(wheel(version)) as archive:
        names = set(archive.namelist())
        read = lambda name: archive.read(f"sglang/srt/{name}").decode()  # noqa: E731
        io_struct, http_server = read("managers/io_struct.py"), read("entrypoints/http_server.py")
        loads = read("entrypoints/v1_loads.py")
        snapshot = "managers/load_snapshot.py"
        told = io_struct + (read(snapshot) if f"sglang/srt/{snapshot}" in names else "")
    for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens"):
        assert f"{name}:" in told and name in serve().engine.requests.loads(0, version)["loads"][0], name
    assert '@router.get("/v1/loads")' in loads and '"loads": loads' in loads
    assert '"/abort_request"' in http_server and '"/flush_cache"' in http_server and "v1_loads_router" in http_server
    (abort,) = (one for one in ast.parse(io_struct).body if isinstance(one, ast.ClassDef) and one.name == "AbortReq")
    assert "abort_all" in {one.target.id for one in abort.body if isinstance(one, ast.AnnAssign)}
    assert "rid" in io_struct
