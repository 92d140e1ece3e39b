"""One GET, or POST, to a server that may be slow, hostile or none of SGLang's: bounded in time and size, told in one
sentence."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request

from deepseek_v4_sm120.commands.console import CommandError, one_line

LIMIT_S = 10.0
LIMIT_BYTES = 16 << 20  # /server_info and /metrics have some hundred KB


def check_url(url: str) -> str:
    """The address without the slash at its end; CommandError for what is none of http://host:port."""
    what = f"--url must start with http:// or https://, like http://127.0.0.1:30000, got {one_line(url)!r}"
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError as error:  # a port that is no number or above 65535, brackets that do not close
        raise CommandError(f"{what}: {error}") from error
    if not known or any(not c.isprintable() or c.isspace() for c in url):
        raise CommandError(what)
    if parts.username is not None or parts.query or parts.fragment:
        raise CommandError("--url must be an address alone, without user, password, ? or #; a key goes into --api-key")
    if url.rstrip("/").endswith("/v1"):
        raise CommandError(f"--url is the server's address, without /v1 at its end, got {one_line(url)!r}")
    return url.rstrip("/")


def port_of(url: str) -> int:
    """Of an address that check_url has taken."""
    parts = urllib.parse.urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def get(url: str, api_key: str | None = None, sent: bytes | None = None, limit_s: float | None = None) -> str | None:
    """Body; None for 404 and 405. CommandError when there is nobody, no sense or no end. sent: a JSON text to POST;
    limit_s: LIMIT_S where none is given.

    A thread asks, and is left behind when the time is over: name look-up, connection, headers and body have one limit.
    """
    answers: queue.Queue = queue.Queue(1)

    limit_s = LIMIT_S if limit_s is None else limit_s

    def ask() -> None:
        try:
            answers.put(_read(url, api_key, sent, limit_s))
        except Exception as error:  # raised again by the one who waits
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=limit_s)
    except queue.Empty:
        raise CommandError(f"{url} has not answered whole after {limit_s:g} s") from None
    if isinstance(found, Exception):
        raise found
    return found


def generate(
    url: str, api_key: str | None, prompts: list[list[int]], new: int, limit_s: float
) -> tuple[list, str | None]:
    """(what /generate answers to prompts at once, of each `new` tokens behind it, greedily; its text). Of a server that
    answers otherwise than SGLang does the list has other things than an object for each prompt."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
    text = get(f"{url}/generate", api_key, body, limit_s)
    try:
        found = json.loads(text or "null")
    except ValueError:
        found = None
    return found if isinstance(found, list) else [found], text


class _SameServer(urllib.request.HTTPRedirectHandler):
    """SGLang itself redirects /metrics to /metrics/. Another server was not asked for, and must not get the key."""

    def redirect_request(self, request, fp, code, message, headers, newurl):
        here, there = (urllib.parse.urlsplit(u) for u in (request.full_url, newurl))
        if (here.scheme, here.netloc) != (there.scheme, there.netloc):
            target = one_line(f"{there.scheme}://{there.netloc}")
            raise CommandError(f"{request.full_url} redirects to another server, {target}: give --url that address")
        return super().redirect_request(request, fp, code, message, headers, newurl)


def _read(url: str, api_key: str | None, sent: bytes | None, limit_s: float) -> str | None:
    # no proxy: what is asked is this server
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameServer)
    request = urllib.request.Request(url, sent, headers={"Accept-Encoding": "identity"})
    if sent is not None:
        request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with opener.open(request, timeout=limit_s + 1) as answer:
            if (encoding := answer.headers.get("Content-Encoding", "identity").lower()) != "identity":
                raise CommandError(f"{url} answers in {one_line(encoding, 40)!r}, which was not asked for")
            body = answer.read(LIMIT_BYTES + 1)
            if answer.length and len(body) <= LIMIT_BYTES:
                raise CommandError(f"{url} ended its answer {answer.length} bytes too early")
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (404, 405):
                return None
            if error.code in (401, 403):
                raise CommandError(f"{url} answers {error.code}: it wants a key, see --api-key") from error
            raise CommandError(f"{url} answers {error.code} {one_line(error.reason, 80)}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CommandError(f"no server at {url}: {one_line(reason) or type(error).__name__}") from error
    if len(body) > LIMIT_BYTES:
        raise CommandError(f"{url} answers with more than {LIMIT_BYTES >> 20} MiB")
    return body.decode(errors="replace")
