"""doctor --url against servers that are slow, endless, elsewhere, or answer anything but what SGLang does."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import http_get, server
from deepseek_v4_sm120.commands.doctor.finding import NOT_RUN
from tests.doctor.test_server import PLANNED, STOCK

REPO = Path(__file__).resolve().parents[2]
OK_HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


def answer(body, *headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return OK_HEAD + b"".join(f"{h}\r\n".encode() for h in headers) + b"\r\n" + data


@pytest.fixture
def raw():
    """raw({path: bytes, or a function(connection)}) -> base URL; `raw.seen`: every request's text."""
    listeners, seen = [], []

    def start(answers):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve(connection):
            with connection:
                try:
                    request = connection.recv(65536).decode()
                    seen.append(request)
                    found = answers.get(request.split(" ")[1], b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
                    found(connection) if callable(found) else connection.sendall(found)
                except OSError:
                    pass  # the client went away, as it should

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    start.seen = seen
    yield start
    for listener in listeners:
        listener.close()


def drip(head):
    def send(connection):
        connection.sendall(head)
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    return send


def flood(connection):
    connection.sendall(OK_HEAD + b"\r\n")
    while True:
        connection.sendall(b" " * 65536)


def hang(connection):
    time.sleep(5)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (drip(OK_HEAD + b"\r\n"), "has not answered whole after 0.5 s"),
        (drip(OK_HEAD + b"X-Long: "), "has not answered whole after 0.5 s"),
        (drip(OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"), "no server at|has not answered whole"),
        (hang, "has not answered whole after 0.5 s"),
        (flood, "answers with more than 1 MiB"),
        (answer(b"\x1f\x8b\x08", "Content-Encoding: gzip"), "answers in 'gzip'"),
        (b"220 mail.example ESMTP\r\n", "no server at"),
        (b"", "no server at"),
        (OK_HEAD + b"Content-Length: 99\r\n\r\n{}", "97 bytes too early"),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", "wants a key, see --api-key"),
        (answer(b"[" * 100_000), "is not what SGLang answers"),
        (answer(b'{"version":' + b"[" * 100_000), "is not what SGLang answers"),
        (answer(b'{"version": ' + b"9" * 5000 + b"}"), "is not what SGLang answers"),
        (answer(None), "is not what SGLang answers"),
        (answer("version"), "is not what SGLang answers"),
        (answer(["version"]), "is not what SGLang answers"),
    ],
    # the same in every process of the tests: a function's own text has an address
    ids=lambda given: given.__qualname__.partition(".")[0] if callable(given) else str(given)[:60],
)
def test_a_server_that_will_not_answer_is_one_sentence_in_time(raw, monkeypatch, behaviour, words):
    monkeypatch.setattr(http_get, "LIMIT_S", 0.5)
    monkeypatch.setattr(http_get, "LIMIT_BYTES", 1 << 20)
    start = time.monotonic()
    with pytest.raises(CommandError, match=words):
        server.ask(raw({"/server_info": behaviour}))
    assert time.monotonic() - start < 3


def test_metrics_without_end_leave_what_the_server_told(raw, monkeypatch):
    monkeypatch.setattr(http_get, "LIMIT_S", 0.5)
    found = server.ask(raw({"/server_info": answer(PLANNED), "/metrics": drip(OK_HEAD + b"\r\n")}))
    checks = {f.check: f for f in server.checks(found)}
    assert checks["metrics"].state == NOT_RUN and "has not answered whole" in checks["metrics"].found


def redirect(url):
    return f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {url}\r\nConnection: close\r\n\r\n".encode()


def test_another_server_is_not_asked_and_does_not_get_the_key(raw):
    other = raw({"/server_info": answer(PLANNED)})
    with pytest.raises(CommandError, match=f"redirects to another server, {other}"):
        server.ask(raw({"/server_info": redirect(f"{other}/server_info")}), "CaNaRy")
    with pytest.raises(CommandError, match="not allowed"):
        server.ask(raw({"/server_info": redirect("file:///etc/passwd")}))
    assert len(raw.seen) == 2  # nobody came to the other one


def test_a_redirect_on_the_same_server_is_followed(raw):
    found = server.ask(raw({"/server_info": answer(PLANNED), "/metrics": redirect("/metrics/"),
                            "/metrics/": answer(b"sglang:token_usage 0.5\n")}), "CaNaRy")  # fmt: skip
    assert found.metrics == {"token_usage": 0.5}
    assert all("Authorization: Bearer CaNaRy" in request for request in raw.seen)


@pytest.mark.parametrize("name", sorted(server.FIELDS))
@pytest.mark.parametrize(
    "value",
    [None, "", "8192", "x" * 100_000, [], {}, [[]], True, 0, -1, 1e308, 10**400, float("nan"), float("inf"), "\ud800"],
    ids=lambda value: str(value)[:10],
)
def test_any_shape_of_a_field_gives_findings_and_no_exception(name, value):
    for whole in (PLANNED, STOCK):
        found = list(server.checks(server.Answers(whole | {name: value}, {"token_usage": 0.1})))
        assert found and all(len(f.found) < 1000 for f in found)


@pytest.mark.parametrize("name", sorted(name for name, (_, needed) in server.FIELDS.items() if needed))
def test_what_is_not_told_or_is_of_another_kind_does_not_pass(name):
    for info in ({k: v for k, v in PLANNED.items() if k != name}, PLANNED | {name: [1]}, PLANNED | {name: None}):
        checks = {f.check: f for f in server.checks(server.Answers(info, {"token_usage": 0.1}))}
        assert checks["arguments"].state == NOT_RUN and name in checks["arguments"].found


def test_numbers_as_words_are_told():
    checks = {f.check: f for f in server.checks(server.Answers(PLANNED | {"max_running_requests": "8"}, {}))}
    assert "max_running_requests is '8', not a whole number" in checks["arguments"].found
    assert checks["load"].state == NOT_RUN  # no metric of SGLang's among them


def test_metrics_that_are_no_numbers():
    text = "sglang:token_usage nan\nsglang:num_queue_reqs 1e999\nsglang:x{ 3\nsglang:y 2\nsglang:\n\nsglang:z 1e99"
    assert server.read_metrics(text) == {"x": 3.0, "y": 2.0}


def test_counters_are_summed_over_what_they_are_split_by():
    """Requests by whether they are streamed, cached tokens by where they lay; of others the greatest."""
    text = """sglang:num_requests_total{is_streaming="false"} 50
sglang:num_requests_total{is_streaming="true"} 1000
sglang:prompt_tokens_total{is_streaming="false"} 900000
sglang:prompt_tokens_total{is_streaming="true"} 800000
sglang:cached_tokens_total{cache_source="device"} 100
sglang:cached_tokens_total{cache_source="host"} 20
sglang:token_usage{tp_rank="0"} 0.5
sglang:token_usage{tp_rank="1"} 0.25
"""
    totals = {"num_requests_total": 1050.0, "prompt_tokens_total": 1.7e6, "cached_tokens_total": 120.0}
    assert server.read_metrics(text) == totals | {"token_usage": 0.5}


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://", "here", "file:///etc/passwd", "http://h:99999", "http://h:0", "http://h:x", "http://[::1"),
        *("http://h /", "http://h\n", "http://h/\x1b[2J", "http://user:CaNaRy@h", "http://h?x=1"),
    ],
)
def test_what_is_no_address_is_refused_before_anybody_is_asked(url):
    with pytest.raises(CommandError, match="--url must") as caught:
        server.ask(url)
    assert "CaNaRy" not in str(caught.value)


def test_a_terminal_sees_no_escape_and_no_key(raw):
    """The whole command: a server that answers with escapes, line ends, half characters, and its own keys."""
    evil = "DeepSeek-V4\x1b[2J\x1b]0;title\x07\n\r\u202e\ud800 https://u:CaNaRy@h"
    info = PLANNED | {"model_path": evil, "api_key": "CaNaRy", "moe_runner_backend": ["CaNaRy"]}
    url = raw({"/server_info": answer(info), "/metrics": answer(b'sglang:token_usage{a="\x1b[2J"} 0.5\n')})
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
    environment = kept | {"PYTHONPATH": str(REPO), "PYTHONIOENCODING": "ascii", "http_proxy": "http://127.0.0.1:9"}
    for words in ([], ["--json"]):
        line = [sys.executable, "-m", "deepseek_v4_sm120", "doctor", "--url", url, "--api-key", "CaNaRyToo", *words]
        done = subprocess.run(line, env=environment, capture_output=True, timeout=60)
        text = (done.stdout + done.stderr).decode("ascii")
        assert "DeepSeek-V4" in text and "CaNaRy" not in text and "Traceback" not in text
        assert not set(text) & set(map(chr, [*range(9), *range(11, 32), 127]))
