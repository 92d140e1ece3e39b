"""The transport: time and size limits, streams of both kinds, answers of other shapes; and how many ran at once."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
import threading
import time
import zipfile

import pytest

from bench.quality import in_flight, whole
from bench.serving import endpoint as transport
from bench.serving.answers import Answer
from bench.serving.endpoint import Endpoint, Interval
from bench.serving.server_errors import ServerGone, ServerNonsense, ServerRefused, ServerTimeout
from deepseek_v4_sm120.commands.disclosure import printable
from tests.serving.conftest import VERSIONS, wheel


@pytest.fixture
def raw():
    """raw(bytes, ...) -> the address of a server that sends the pieces 0.05 s apart, then closes."""
    sockets, over = [], threading.Event()

    def start(*pieces: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                with contextlib.suppress(OSError):  # the client has had enough
                    for piece in pieces:
                        connection.sendall(piece)
                        if over.wait(0.05):
                            return
                    connection.shutdown(socket.SHUT_WR)  # what the client still sends must not end in a reset
                    while connection.recv(65536):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    over.set()
    for one in sockets:
        one.close()


HEAD = b"HTTP/1.1 200 OK\r\n"


def test_a_connection_that_is_closed_after_the_answer(raw):
    """Connection: close, and HTTP/1.0 without a length: http.client closes its socket before the body is read."""
    assert Endpoint(raw(HEAD + b"Connection: close\r\nContent-Length: 7\r\n\r\n", b'{"a":1}')).get("/x") == {"a": 1}
    assert Endpoint(raw(b"HTTP/1.0 200 OK\r\n\r\n", b'{"a":', b"1}")).get("/x") == {"a": 1}


def test_an_answer_that_ends_early(raw):
    with pytest.raises(ServerGone, match="3 bytes before its end|IncompleteRead"):
        Endpoint(raw(HEAD + b"Content-Length: 10\r\n\r\n", b'{"a":1}')).get("/x")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    for pieces in ([b"9\r\ndata: {}\n\r\n", b"ff\r\ncut"], [b"9\r\ndata: {}\n\r\n", b"0\r\n\r\n"]):
        with pytest.raises(ServerGone, match="without .DONE.|IncompleteRead"):
            list(Endpoint(raw(chunked, *pieces)).events("/x", {}))


def test_time_in_all_and_time_of_silence(raw):
    begin = time.monotonic()
    with pytest.raises(ServerTimeout, match="no whole answer within 0.3 s"):
        Endpoint(raw(HEAD + b"Content-Length: 999\r\n\r\n", *[b" "] * 100), 5, total_s=0.3).get("/x")
    with pytest.raises(ServerTimeout, match="no whole answer within 0.3 s"):
        list(Endpoint(raw(HEAD + b"\r\n", *[b"data: {}\n"] * 100), 5, total_s=0.3).events("/x", {}))
    with pytest.raises(ServerTimeout, match="nothing for 0.2 s"):
        Endpoint(raw(HEAD, *[b""] * 100), 0.2).get("/x")
    assert time.monotonic() - begin < 3


def test_an_answer_and_an_event_without_end(raw, monkeypatch):
    monkeypatch.setattr(transport, "MAX_BYTES", 1000)
    with pytest.raises(ServerNonsense, match="more than"):
        Endpoint(raw(HEAD + b"\r\n", b" " * 2000)).get("/x")
    with pytest.raises(ServerNonsense, match="an event has more than"):
        list(Endpoint(raw(HEAD + b"\r\n", b"data: " + b"1" * 2000)).events("/x", {}))


def test_a_page_of_a_proxys_is_one_line(raw):
    page = b"<html>\r\n<h1>502 Bad Gateway</h1>\r\n\n# PASSED\r\n</html>"
    with pytest.raises(ServerRefused) as refused:
        Endpoint(raw(b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n", page)).get("/x")
    assert str(refused.value).endswith("/x: status 502: <html> <h1>502 Bad Gateway</h1> # PASSED </html>")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h ost:80", "holds no spaces"),
        ("http://host:80\x1b", "holds no spaces"),
        ("http://host:99999", "got 'http://host:99999': Port out of range"),
        ("http://[::1", "got 'http://[::1': Invalid IPv6"),
        ("https://host:80", "must look like http://host:port"),
        ("http://host:80/v1/", "ends before /v1"),
    ],
)
def test_an_address_that_is_none(url, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Endpoint(url)


def test_one_server_by_two_names():
    assert Endpoint("http://127.0.0.1:3").is_same_as(Endpoint("http://localhost:3/"))
    assert not Endpoint("http://127.0.0.1:3").is_same_as(Endpoint("http://localhost:4"))
    assert not Endpoint("http://127.0.0.1:3").is_same_as(Endpoint("http://127.0.0.2:3"))


def test_a_key_is_no_part_of_an_address():
    with pytest.raises(ValueError, match="give the key by itself") as refused:
        Endpoint("http://user:secret@127.0.0.1:1")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_streamed_answer_is_the_one_not_streamed(incremental, serve):
    """--incremental-streaming-output: each event has only what is new."""
    sent = []

    def lie(handler, content):
        if not handler.streaming or not incremental or "output_ids" not in content:
            return content
        new = content["output_ids"][sum(sent) :]
        sent.append(len(new))
        return content | {"output_ids": new, "text": f"<{len(new)}>"}

    endpoint = Endpoint(serve(lie=lie, step_s=0.001, stream_interval=3).url, 5)
    answer, times = endpoint.stream([5, 6, 7], 20, ignore_eos=True)
    assert answer.ids == endpoint.generate([5, 6, 7], 20, ignore_eos=True).ids and answer.finish == "length"
    assert times.first_s < times.last_s
    assert not incremental or answer.text == "".join(f"<{count}>" for count in sent)


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_stream_that_is_aborted_in_the_queue_repeats_its_end(coalesced):
    """tokenizer_manager._handle_abort_req, --incremental-streaming-output, a request that was retracted before."""

    def event(ids, text, made, finish=None):
        return Answer.of({"output_ids": ids, "text": text, "meta_info": {"completion_tokens": made}
                          | {"finish_reason": finish}})  # fmt: skip

    abort = {"type": "abort", "message": "Abort in waiting queue"}
    answer = Answer([], "")
    last = [event([7], " c", 3), event([7], "a b c", 3, abort)]
    for one in (event([5, 6], "a b", 2), *([event([7, 7], " ca b c", 3, abort)] if coalesced else last)):
        answer = answer.followed_by(one)
    assert (answer.ids, answer.text, answer.completion_tokens) == ([5, 6, 7], "a b c", 3)
    assert (answer.finish, answer.finish_message) == ("abort", "Abort in waiting queue")
    nothing = Answer([], "").followed_by(event([], "", 0, abort))  # before its first token
    assert (nothing.ids, nothing.finish) == ([], "abort")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_is_aborted_while_it_waits_says_so(is_stream, serve):
    """tokenizer_manager._handle_abort_req of every release: no prompt_tokens, no output."""
    finish = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "1", "finish_reason": finish, "weight_version": "default", "e2e_latency": 0.1, "completion_tokens": 0}
    endpoint = Endpoint(serve(lie=lambda *_: {"text": "", "output_ids": [], "meta_info": meta}).url, 5)
    answer = endpoint.stream([5, 6, 7], 20)[0] if is_stream else endpoint.generate([5, 6, 7], 20)
    assert (answer.finish, answer.finish_message, answer.ids) == ("abort", finish["message"], [])


@pytest.mark.parametrize("version", VERSIONS)
def test_what_an_abort_in_the_queue_tells(version):
    module = ast.parse(zipfile.ZipFile(wheel(version)).read("sglang/srt/managers/tokenizer_manager.py"))
    (found,) = (n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "_handle_abort_req")
    text = ast.unparse(found)
    assert "'finish_reason': finish_reason" in text and "prompt_tokens'" not in text
    assert "output_ids = [output_ids[-1]]" in text and "meta_info['completion_tokens'] = len(output_ids)" in text


def test_a_stream_that_miscounts(serve):
    def lie(handler, content):
        if handler.streaming:
            content["meta_info"]["completion_tokens"] += 1
        return content

    with pytest.raises(ServerNonsense, match="a stream of"):
        Endpoint(serve(lie=lie).url, 5).stream([5, 6, 7], 4, ignore_eos=True)


def test_an_error_in_a_stream(serve):
    server = serve(lie=lambda handler, content: {"error": {"message": "no room\x1b[2J", "code": 503}})
    with pytest.raises(ServerRefused, match=r"an error in the stream: no room\\x1b\[2J") as refused:
        Endpoint(server.url, 5).stream([5], 4)
    assert refused.value.status == 503


def test_what_a_terminal_would_obey_is_written_out():
    assert printable("a\x1b[31mb\n\u202ec\ud800") == "a\\x1b[31mb\n\\u202ec\\ud800"


def test_how_many_ran_at_once():
    none = Interval(None, None)
    assert in_flight.most_at_once([Interval(0, 2), Interval(1, 3), Interval(2, 4), none]) == 2
    assert in_flight.most_at_once([Interval(0, 9), Interval(1, 9), Interval(2, 3), Interval(4, 5)]) == 3
    assert in_flight.most_at_once([Interval(1, 1)] * 5 + [none]) == 0  # all tokens at one moment: buffered
    assert in_flight.around([Interval(0, 9), Interval(0, 3), Interval(3, 9), none], 1, 5) == 1


def test_answers_that_say_nothing():
    many = [list(range(index, index + 24)) for index in range(4)]
    assert not whole.says_nothing(many)
    assert "4 repeat" in whole.says_nothing([[index] * 24 for index in range(4)])
    assert "0 repeat at most 4 tokens to their end and 3 are the same" in whole.says_nothing([many[0]] * 4)
    assert whole.is_stuck([9, 8, 7, 6] + [1, 2, 3] * 8) and whole.is_stuck([1, 2] * 6)
    assert not whole.is_stuck([1, 1, 1, 1] + list(range(20))) and not whole.is_stuck([3, 3])


def test_a_number_that_is_no_log_probability():
    for value in (True, "1", 10**400, [1]):
        with pytest.raises(ServerNonsense, match="a log-probability"):
            Answer.of({"meta_info": {"output_token_logprobs": [[value, 3, None]]}})
    for value in (-1, 2**40, True, None, 1.0):
        with pytest.raises(ServerNonsense, match="a token id"):
            Answer.of({"output_ids": [value], "meta_info": {}})


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_server_prefers_changes_no_answer(version):
    """Penalties and stops of --preferred-sampling-params, which a release puts under what is asked."""
    with zipfile.ZipFile(wheel(version)) as archive:
        source = archive.read("sglang/srt/sampling/sampling_params.py").decode()
        merges = archive.read("sglang/srt/managers/tokenizer_manager.py").decode()
    assert "{**self.preferred_sampling_params, **obj.sampling_params}" in merges
    (found,) = (one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "SamplingParams")
    (init,) = [one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"] or [None]
    fields = {one.target.id: one.value for one in found.body if isinstance(one, ast.AnnAssign)}
    if init is not None:
        fields = dict(zip([one.arg for one in init.args.args[1:]], init.args.defaults, strict=True))
    sent = Endpoint.generate_body([1], 8)["sampling_params"]
    assert {name: ast.literal_eval(fields[name]) for name in transport.PLAIN} == transport.PLAIN
    prefers = {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5, "stop": ["."]}
    assert {**prefers, "stop_token_ids": [1], "logit_bias": {"5": 9.0}, "max_new_tokens": 3, **sent} == sent
