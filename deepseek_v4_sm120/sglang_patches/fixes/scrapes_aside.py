"""While /metrics is written, the streams go on.

What answers over HTTP is one loop. With --enable-metrics whoever asks for /metrics, as Prometheus does each few
seconds, has the files of all processes read and their lines written in that loop, and all streams stand still for 50 to
60 ms (prometheus_client's ASGI app, 1,450 lines).

Here that app answers in a thread of its own, which lets the loop in between every few milliseconds: the same app, the
same lines. This runs where no GPU is asked.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches import models_served


def replace_add(original: Callable) -> Callable:
    """For add_prometheus_middleware(app), which adds a route to the app's."""

    @functools.wraps(original)
    def add_prometheus_middleware(app):
        known = len(app.routes)
        original(app)
        for route in app.routes[known:]:
            route.app = aside(route.app)

    return add_prometheus_middleware


def aside(app: Callable) -> Callable:
    """The ASGI app of one answer, made in a thread."""

    async def answered(scope, receive, send):
        if not models_served.has_served_card():
            return await app(scope, receive, send)
        for message in await asyncio.to_thread(_answer, app, scope, await receive()):
            await send(message)

    return answered


def _answer(app: Callable, scope: dict, asked: dict) -> list[dict]:
    sent = []

    async def receive():
        return asked

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent
