"""An SGLang server over HTTP, with the standard library only. Every failure is one of `server_errors`.

`generate` and `stream` use SGLang's native /generate, which takes and gives token ids and log-probabilities; `chat` and
`chat_stream` use the OpenAI-compatible /v1/chat/completions.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.serving.answers import (
    Answer,
    JoinedMessage,
    mapping,
    message_of,
    parse,
    sequence,
    text_of,
    tokens,
)
from bench.serving.server_errors import ServerError, ServerGone, ServerNonsense, ServerRefused, ServerTimeout
from deepseek_v4_sm120.commands.disclosure import printable

TOTAL_S = 3600.0  # a request, however busily its bytes drip
KEY_STATUSES = (401, 403)  # of a server that wants a key, or another one
# what a server may have been started with others for (--preferred-sampling-params): the model's own answer is asked
PLAIN = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
PLAIN |= dict.fromkeys(("stop", "stop_token_ids", "logit_bias"))
MAX_BYTES = 64 << 20  # of an answer, or of one event of a stream


def plain_message(body: bytes) -> str:
    """The human part of an error answer, in one line: a proxy's is a page of HTML."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        error = found.get("error", found)
        error = error.get("message") or text if isinstance(error, dict) else error
        text = error if isinstance(error, str) else text
    return printable(" ".join(text.split())[:400])


class _Limited(io.RawIOBase):
    """Reads from a socket: no longer than `silence_s` for a byte, and not beyond `deadline` (time.monotonic)."""

    def __init__(self, sock: socket.socket, silence_s: float, deadline: float):
        self.sock, self.silence_s, self.deadline = sock, silence_s, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(min(self.silence_s, left))
        return self.sock.recv_into(buffer)


class _LimitedSocket:
    """What http.client needs of a socket, read through _Limited. Whoever made the socket closes it: http.client closes
    its own before the answer is read.
    """

    def __init__(self, sock: socket.socket, silence_s: float, deadline: float):
        self.sock, self.silence_s, self.deadline = sock, silence_s, deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Limited(self.sock, self.silence_s, self.deadline))

    def sendall(self, data: bytes) -> None:
        self.sock.sendall(data)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Interval:
    """When a streamed answer's first and last tokens came here (time.monotonic); None: it had no token."""

    first_s: float | None
    last_s: float | None


def _parts(url: str) -> urllib.parse.SplitResult:
    """The parts of an address; ValueError names it."""
    if any(not c.isprintable() or c.isspace() for c in url):
        raise ValueError(f"a server's address holds no spaces and no control characters, got {url!r}")
    try:
        found = urllib.parse.urlsplit(url)
        found.port  # noqa: B018  a property that raises
    except ValueError as error:
        raise ValueError(f"a server's address must look like http://host:port, got {url!r}: {error}") from error
    return found


def _addresses(host: str) -> set[str]:
    """All of a host; none where nobody knows it."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except (OSError, ValueError):
        return set()


class Endpoint:
    """A server at `url` (http://host:port); a new connection a request. `timeout_s`: the longest silence; `total_s`:
    the longest that a request may take, its answer included. `api_key` goes out with every request, into no message.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, api_key: str | None = None, total_s: float = TOTAL_S):
        parts = _parts(url if "//" in url else f"http://{url}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("a server's address must hold no user and no password: give the key by itself")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"a server's address must look like http://host:port, got {url!r}")
        self.host, self.port, self.prefix = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        if self.prefix.endswith("/v1"):
            raise ValueError(f"a server's address ends before /v1, which is asked with the rest: got {url!r}")
        self.url = f"http://{parts.netloc}{self.prefix}"
        self.timeout_s, self.total_s = timeout_s, total_s
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValueError("the API key must be of printable ASCII characters, as it stands in a header")
            self.headers["Authorization"] = f"Bearer {api_key}"

    @contextlib.contextmanager
    def _answer(self, path: str, body: dict | None, timeout_s: float | None) -> Iterator[http.client.HTTPResponse]:
        """The open answer to GET (no body) or POST; transport failures become ServerGone and ServerTimeout. `timeout_s`
        is for small answers: the longest silence and the longest time in all.
        """
        wait, total = (self.timeout_s, self.total_s) if timeout_s is None else (timeout_s, timeout_s)
        deadline = time.monotonic() + total
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(wait, total))
        what, sock = f"{'GET' if body is None else 'POST'} {self.url}{path}", None
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.connect()
            sock = connection.sock
            connection.sock = _LimitedSocket(sock, wait, deadline)
            connection.request("GET" if body is None else "POST", self.prefix + path, data, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                message = plain_message(response.read(MAX_BYTES))
                raise ServerRefused(f"{what}: status {response.status}: {message}", response.status)
            yield response
        except TimeoutError as error:
            if time.monotonic() >= deadline:
                raise ServerTimeout(f"{what}: no whole answer within {total:g} s") from error
            raise ServerTimeout(f"{what}: nothing for {wait:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{what}: {printable(f'{type(error).__name__}: {error}')}") from error
        finally:
            connection.close()
            if sock is not None:
                sock.close()

    def get(self, path: str, timeout_s: float | None = None) -> dict:
        with self._answer(path, None, timeout_s) as response:
            return self._whole(response, path)

    def post(self, path: str, body: dict, timeout_s: float | None = None) -> dict:
        with self._answer(path, body, timeout_s) as response:
            return self._whole(response, path)

    def _bytes(self, response: http.client.HTTPResponse, path: str) -> bytes:
        found = response.read(MAX_BYTES + 1)
        if len(found) > MAX_BYTES:
            raise ServerNonsense(f"{self.url}{path}: the answer has more than {MAX_BYTES >> 20} MiB")
        # a body that ends before its Content-Length: http.client says so only where all of it is asked for
        if response.length:
            raise ServerGone(f"{self.url}{path}: the answer ended {response.length} bytes before its end")
        return found

    def _whole(self, response: http.client.HTTPResponse, path: str) -> dict:
        what = f"{self.url}{path}"
        return mapping(parse(self._bytes(response, path), what), what)

    def events(self, path: str, body: dict) -> Iterator[dict]:
        """The JSON of each server-sent event. A stream that ends without [DONE] is ServerGone, an error in it
        ServerRefused.
        """
        what = f"POST {self.url}{path}"
        with self._answer(path, body, None) as response:
            while line := response.readline(MAX_BYTES + 1):
                if len(line) > MAX_BYTES:
                    raise ServerNonsense(f"{what}: an event has more than {MAX_BYTES >> 20} MiB")
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                found = mapping(parse(data, f"{what}: an event"), f"{what}: an event")
                if found.get("error") is not None:
                    error = found["error"]
                    code = error.get("code") if isinstance(error, dict) else None
                    message = f"{what}: an error in the stream: {plain_message(data)}"
                    raise ServerRefused(message, code if isinstance(code, int) else 500)
                yield found
            raise ServerGone(f"{what}: the stream ended without [DONE]")

    def text_of(self, path: str) -> str:
        with self._answer(path, None, 10.0) as response:
            return self._bytes(response, path).decode(errors="replace")

    def is_local(self) -> bool:
        """Whether the server's address is one of this machine's: only then do its clocks and devices say anything."""
        try:
            addresses = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.bind(address)
                return True
        return False

    def is_same_as(self, other: Endpoint) -> bool:
        """Whether both are one server, by its address in whatever words (localhost, 127.0.0.1)."""
        if (self.port, self.prefix) != (other.port, other.prefix):
            return False
        return self.host == other.host or not _addresses(self.host).isdisjoint(_addresses(other.host))

    def is_ready(self) -> bool:
        """/health is 503 while SGLang still warms up; /v1/models is asked where there is no /health."""
        try:
            self.text_of("/health")
        except ServerRefused as error:
            if error.status != 404:
                return False
        except ServerError:
            return False
        else:
            return True
        try:
            self.models()
        except ServerError:
            return False
        return True

    def server_info(self) -> dict:
        """/server_info, or its older name where that is all the server has."""
        try:
            return self.get("/server_info", timeout_s=30.0)
        except ServerRefused as error:
            if error.status != 404:
                raise
        return self.get("/get_server_info", timeout_s=30.0)

    def models(self) -> list[str]:
        """Names of the models that the server lists; at least one."""
        what = f"{self.url}/v1/models"
        listed = sequence(self.get("/v1/models", timeout_s=30.0).get("data"), what)
        names = [text_of(mapping(entry, what).get("id"), f"{what}: id") for entry in listed]
        if not all(names) or not names:
            raise ServerNonsense(f"{what}: the server lists no model by name")
        return names

    def check_model(self, name: str) -> None:
        """Raise ServerRefused unless the server serves `name`. (SGLang itself answers to any name.)"""
        served = self.models()
        if name not in served:
            raise ServerRefused(f"{self.url} serves {served}, not {name!r}", 404)

    def flush_cache(self) -> None:
        """Empty the prefix cache. SGLang answers in plain text."""
        with self._answer("/flush_cache", {}, 60.0) as response:
            response.read()

    def abort(self, rid: str) -> None:
        """End the request with this `rid` (a field of /generate's body), and those whose own begins with it; none where
        it is nobody's. SGLang answers nothing.
        """
        with self._answer("/abort_request", {"rid": rid}, 60.0) as response:
            response.read()

    def leave(self, path: str, body: dict, after_s: float) -> None:
        """Send a request and go away `after_s` later, whatever has come: a client that was closed."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            connection.request("POST", self.prefix + path, json.dumps(body).encode(), self.headers)
            time.sleep(after_s)
        except OSError as error:
            raise ServerGone(f"POST {self.url}{path}: {printable(f'{type(error).__name__}: {error}')}") from error
        finally:
            connection.close()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text` by the server's own tokenizer; special tokens written out in the text are recognised."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            return tokens(self.post("/v1/tokenize", body).get("tokens"), f"{self.url}/v1/tokenize: tokens")
        except ServerRefused as error:
            if error.status != 404:
                raise
        found = self.post("/tokenize", body)  # vLLM's name of it
        return tokens(found.get("tokens"), f"{self.url}/tokenize: tokens")

    def generate(
        self, prompt: Sequence[int] | str, max_new_tokens: int, top: int = 0, ignore_eos: bool = False
    ) -> Answer:
        """Greedy completion of token ids or text; with `top` the `top` greatest log-probabilities of every position."""
        found = self.post("/generate", self.generate_body(prompt, max_new_tokens, top, ignore_eos))
        what = f"{self.url}/generate"
        return self._to_all_of(prompt, Answer.of(found, what), what)

    def several(self, body: dict) -> list[Answer]:
        """The answers to a body of /generate that has several: `n` above 1, or a list of prompts."""
        what = f"{self.url}/generate"
        with self._answer("/generate", body, None) as response:
            found = parse(self._bytes(response, "/generate"), what)
        return [Answer.of(one, what) for one in sequence(found, what)]

    @staticmethod
    def _to_all_of(prompt: Sequence[int] | str, answer: Answer, what: str) -> Answer:
        """Raise ServerNonsense where the server counts other prompt tokens than it was sent (as one that truncates
        does). Of a request that was aborted while it waited SGLang counts none: it is the abort that is to be told.
        """
        if answer.finish == "abort" and not answer.prompt_tokens:
            return answer
        if not isinstance(prompt, str) and answer.prompt_tokens != len(prompt):
            raise ServerNonsense(f"{what}: it counts {answer.prompt_tokens} prompt tokens, {len(prompt)} were sent")
        return answer

    def stream(
        self,
        prompt: Sequence[int] | str,
        max_new_tokens: int,
        ignore_eos: bool = False,
        on_token: Callable[[], None] | None = None,
        temperature: float = 0.0,
    ) -> tuple[Answer, Interval]:
        """`generate`, streamed: the answer, and when its first and last tokens came. `on_token` is called with each
        event that brings one; above 0 `temperature` has the answer sampled.
        """
        what, whole, first, last = f"{self.url}/generate", Answer([], ""), None, None
        body = self.generate_body(prompt, max_new_tokens, 0, ignore_eos, temperature) | {"stream": True}
        for event in self.events("/generate", body):
            now, had = time.monotonic(), len(whole.ids)
            whole = whole.followed_by(Answer.of(event, what))
            if len(whole.ids) > had:
                first, last = now if first is None else first, now
                if on_token is not None:
                    on_token()
        if whole.completion_tokens not in (None, len(whole.ids)):
            said = whole.completion_tokens
            raise ServerNonsense(f"{what}: a stream of {len(whole.ids)} tokens that counts {said} of them")
        return self._to_all_of(prompt, whole, what), Interval(first, last)

    @staticmethod
    def generate_body(
        prompt: Sequence[int] | str,
        max_new_tokens: int,
        top: int = 0,
        ignore_eos: bool = False,
        temperature: float = 0.0,
    ) -> dict:
        if len(prompt) == 0:
            raise ValueError("generate: prompt must not be empty")
        body: dict = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        body["sampling_params"] = PLAIN | sampling
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": -1}
        return body

    def generate_many(self, prompts: Sequence[Sequence[int] | str], concurrency: int, **options) -> list[Answer]:
        """All prompts, `concurrency` at a time, answers in the order of the prompts. The first failure is raised."""
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def chat(self, body: dict) -> dict:
        """The message of a non-streamed chat completion: message_of's fields and finish_reason."""
        what = f"{self.url}/v1/chat/completions"
        found = self.post("/v1/chat/completions", {"temperature": 0.0, **body, "stream": False})
        choices = sequence(found.get("choices"), f"{what}: choices")
        if not choices:
            raise ServerNonsense(f"{what}: an answer without a choice")
        choice = mapping(choices[0], f"{what}: choices")
        message = message_of(choice.get("message"), f"{what}: message")
        return message | {"finish_reason": text_of(choice.get("finish_reason"), f"{what}: finish_reason") or None}

    def chat_stream(self, body: dict) -> dict:
        """The message of a streamed chat completion, its pieces joined as a client must join them."""
        joined = JoinedMessage(f"{self.url}/v1/chat/completions")
        for event in self.events("/v1/chat/completions", {"temperature": 0.0, **body, "stream": True}):
            joined.add(event)
        return joined.message()
