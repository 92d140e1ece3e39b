"""An SGLang server over HTTP, with the standard library only. Every failure is one of three clear errors.

`generate` and `stream` use SGLang's native /generate, which takes and gives token ids and log-probabilities; `chat` and
`chat_stream` use the OpenAI-compatible /v1/chat/completions.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.parse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field


class ServerError(Exception):
    """Base of what can go wrong with a server."""


class ServerGone(ServerError):
    """No connection, or one that broke before the answer was whole."""


class ServerTimeout(ServerError):
    """No byte within the time allowed."""


class ServerRefused(ServerError):
    """An answer with a status other than 200."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass
class Answer:
    """One completion. `tops[i]` are the most likely tokens at output position i as (log-probability, id), best
    first.
    """

    ids: list[int]
    text: str
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None

    @classmethod
    def of(cls, found: dict) -> Answer:
        """From the JSON of /generate."""
        meta = found.get("meta_info") or {}
        finish = meta.get("finish_reason")
        chosen = meta.get("output_token_logprobs") or []
        ids = found.get("output_ids")
        if ids is None:
            ids = [entry[1] for entry in chosen]
        return cls(
            ids=list(ids),
            text=found.get("text") or "",
            logprobs=[entry[0] for entry in chosen],
            tops=[[(t[0], t[1]) for t in step or []] for step in meta.get("output_top_logprobs") or []],
            prompt_tokens=meta.get("prompt_tokens") or 0,
            cached_tokens=meta.get("cached_tokens") or 0,
            finish=finish.get("type") if isinstance(finish, dict) else finish,
        )


def plain_message(body: bytes) -> str:
    """The human part of an error answer."""
    text = body.decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return text[:400]
    if isinstance(found, dict):
        error = found.get("error", found)
        text = error.get("message") or text if isinstance(error, dict) else str(error)
    return text[:400]


class Endpoint:
    """A server at `url` (http://host:port). `timeout_s`: the longest silence; a new connection a request."""

    def __init__(self, url: str, timeout_s: float = 600.0, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"a server's address must look like http://host:port, got {url!r}")
        self.host, self.port, self.prefix = parts.hostname, parts.port or 80, parts.path.rstrip("/")
        self.url = f"http://{parts.netloc}{self.prefix}"
        self.timeout_s = timeout_s
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    @contextlib.contextmanager
    def _answer(self, path: str, body: dict | None, timeout_s: float | None) -> Iterator[http.client.HTTPResponse]:
        """The open answer to GET (no body) or POST; transport failures become ServerGone and ServerTimeout."""
        wait = self.timeout_s if timeout_s is None else timeout_s
        connection = http.client.HTTPConnection(self.host, self.port, timeout=wait)
        what = f"{'GET' if body is None else 'POST'} {self.url}{path}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", self.prefix + path, data, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                message = plain_message(response.read())
                raise ServerRefused(f"{what}: status {response.status}: {message}", response.status)
            yield response
        except TimeoutError as error:
            raise ServerTimeout(f"{what}: nothing for {wait:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def get(self, path: str, timeout_s: float | None = None) -> dict:
        with self._answer(path, None, timeout_s) as response:
            return self._whole(response, path)

    def post(self, path: str, body: dict, timeout_s: float | None = None) -> dict:
        with self._answer(path, body, timeout_s) as response:
            return self._whole(response, path)

    def _whole(self, response: http.client.HTTPResponse, path: str) -> dict:
        text = response.read()
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerGone(f"{self.url}{path}: the answer is no JSON: {text[:80]!r}") from error

    def events(self, path: str, body: dict) -> Iterator[dict]:
        """The JSON of each server-sent event. A stream that ends without [DONE] is ServerGone."""
        with self._answer(path, body, None) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    found = json.loads(data)
                except ValueError as error:
                    raise ServerGone(f"POST {self.url}{path}: an event is no JSON: {data[:80]!r}") from error
                yield found
            raise ServerGone(f"POST {self.url}{path}: the stream ended without [DONE]")

    def text_of(self, path: str) -> str:
        with self._answer(path, None, 10.0) as response:
            return response.read().decode(errors="replace")

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
        return [entry["id"] for entry in self.get("/v1/models", timeout_s=30.0).get("data", [])]

    def check_model(self, name: str) -> None:
        """Raise ServerRefused unless the server serves `name`. (SGLang itself answers to any name.)"""
        served = self.models()
        if name not in served:
            raise ServerRefused(f"{self.url} serves {served}, not {name!r}", 404)

    def flush_cache(self) -> None:
        """Empty the prefix cache. SGLang answers in plain text."""
        with self._answer("/flush_cache", {}, 60.0) as response:
            response.read()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text` by the server's own tokenizer; special tokens written out in the text are recognised."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            return self.post("/v1/tokenize", body)["tokens"]
        except ServerRefused as error:
            if error.status != 404:
                raise
        return self.post("/tokenize", body)["tokens"]  # vLLM's name of it

    def generate(
        self, prompt: Sequence[int] | str, max_new_tokens: int, top: int = 0, ignore_eos: bool = False
    ) -> Answer:
        """Greedy completion of token ids or text; with `top` the `top` greatest log-probabilities of every position."""
        return Answer.of(self.post("/generate", self.generate_body(prompt, max_new_tokens, top, ignore_eos)))

    @staticmethod
    def generate_body(prompt: Sequence[int] | str, max_new_tokens: int, top: int = 0, ignore_eos: bool = False) -> dict:
        if len(prompt) == 0:
            raise ValueError("generate: prompt must not be empty")
        body: dict = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos}
        body["sampling_params"] = sampling
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": -1}
        return body

    def generate_many(self, prompts: Sequence[Sequence[int] | str], concurrency: int, **options) -> list[Answer]:
        """All prompts, `concurrency` at a time, answers in the order of the prompts. The first failure is raised."""
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **options), prompts))

    def chat(self, body: dict) -> dict:
        """The message of a non-streamed chat completion."""
        found = self.post("/v1/chat/completions", {"temperature": 0.0, **body, "stream": False})
        try:
            choice = found["choices"][0]
            return choice["message"] | {"finish_reason": choice.get("finish_reason")}
        except (KeyError, IndexError, TypeError) as error:
            raise ServerGone(f"{self.url}: an answer without a message: {str(found)[:120]}") from error

    def chat_stream(self, body: dict) -> dict:
        """The message of a streamed chat completion, its pieces joined as a client must join them."""
        content, reasoning, finish = [], [], None
        calls: dict[int, dict] = {}
        for event in self.events("/v1/chat/completions", {"temperature": 0.0, **body, "stream": True}):
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                content.append(delta.get("content") or "")
                reasoning.append(delta.get("reasoning_content") or "")
                finish = choice.get("finish_reason") or finish
                for piece in delta.get("tool_calls") or []:
                    call = calls.setdefault(piece.get("index") or 0, {"name": "", "arguments": ""})
                    function = piece.get("function") or {}
                    call["name"] += function.get("name") or ""
                    call["arguments"] += function.get("arguments") or ""
        return {
            "content": "".join(content),
            "reasoning_content": "".join(reasoning),
            "tool_calls": [{"function": calls[index]} for index in sorted(calls)],
            "finish_reason": finish,
        }
