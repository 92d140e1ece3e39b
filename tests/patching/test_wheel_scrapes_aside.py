"""The loop that answers over HTTP while /metrics is written: each release's own route, with ours and without."""

import asyncio
import re
import threading
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes.scrapes_aside import replace_add
from deepseek_v4_sm120.sglang_patches.rows.http_server import ADD_METRICS
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch

SCOPE = {"type": "http", "path": "/metrics", "query_string": b"name[]=x"}
LINES = [{"type": "http.response.start", "status": 200}, {"type": "http.response.body", "body": b"up 1\n"}]
LONG, SHORT = 20.0, 0.02  # seconds that it writes at most, unless the loop comes to a stream meanwhile

pytestmark = pytest.mark.usefixtures("served_card")


class Writing:
    """prometheus_client's app: it writes before it waits for anything."""

    def __init__(self, seconds):
        self.seconds, self.scopes, self.error = seconds, [], None
        self.stream_went_on = threading.Event()
        self.went_on = None

    async def app(self, scope, receive, send):
        self.scopes.append(scope)
        self.went_on = self.stream_went_on.wait(self.seconds)
        if self.error is not None:
            raise self.error
        if (await receive()).get("type") == "http.request":
            for message in LINES:
                await send(message)


class Mount:
    def __init__(self, path, app):
        self.path, self.app = path, app


def mounted(version, *, ours, seconds=SHORT):
    """(what writes, the route's app) of a server with --enable-metrics."""
    writing, server = Writing(seconds), SimpleNamespace(routes=[Mount("/v1", None)])
    given = {"make_asgi_app": lambda registry: writing.app, "multiprocess": QUIET, "CollectorRegistry": QUIET}
    names = {"GIVEN": given, "Mount": Mount, "re": re}
    add = take(fetch(version), names, ADD_METRICS.partition(":")[2], ADD_METRICS.partition(":")[0])
    (replace_add(add) if ours else add)(server)
    assert [route.path for route in server.routes] == ["/v1", "/metrics"] and server.routes[0].app is None
    return writing, server.routes[1].app


def scraped(writing, app, asked="http.request"):
    """What is sent, by the thread of the loop, in which a stream has its next turn while it is written, or behind."""

    async def run():
        sent = []

        async def receive():
            return {"type": asked}

        async def send(message):
            assert threading.current_thread() is threading.main_thread()
            sent.append(message)

        async def stream():
            while not writing.scopes:
                await asyncio.sleep(0.001)
            writing.stream_went_on.set()

        streams = asyncio.create_task(stream())
        try:
            await app(SCOPE, receive, send)
        finally:
            await streams
        return sent

    return asyncio.run(run())


@every_release()
def test_streams_go_on_while_the_lines_are_written(version):
    writing, app = mounted(version, ours=True, seconds=LONG)
    assert scraped(writing, app) == LINES and writing.scopes == [SCOPE] and writing.went_on
    writing, app = mounted(version, ours=False)
    assert scraped(writing, app) == LINES and not writing.went_on  # so the row is needed


def test_who_has_gone_is_sent_nothing():
    assert scraped(*mounted("0.5.23", ours=True), "http.disconnect") == []


def test_a_fault_is_the_servers_as_ever():
    writing, app = mounted("0.5.23", ours=True)
    writing.error = ValueError("a file of a process that is gone")
    with pytest.raises(ValueError, match="that is gone"):
        scraped(writing, app)


@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_it_stays_sglangs():
    writing, app = mounted("0.5.23", ours=True)
    assert scraped(writing, app) == LINES and not writing.went_on
