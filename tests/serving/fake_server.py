#!/usr/bin/env python3
"""A small stand-in for an SGLang server, on loopback, standard library only, with faults to order.

Its "model" is deterministic: the next token depends on every token before it. It knows a few scripted skills (needle,
arithmetic, tool calls, reasoning), so that each gate has something to pass and, with a fault, something to catch. Its
answers have the shape of SGLang's 0.5.14 to 0.5.23 (tests/quality/test_lies.py compares the names).

In a test: `with FakeServer(faults={"foreign_script"}) as server: ... server.url`. As a process: `fake_server.py
--port N`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent.parent)]

from tests.serving import fake_info  # noqa: E402
from tests.serving.fake_engine import EOS, FAULTS, FOREIGN, Engine  # noqa: E402
from tests.serving.fake_scheduler import has_left  # noqa: E402


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer._Http
    streaming = False  # whether the answer's head has been sent, and events follow

    def log_message(self, *_):
        pass

    @property
    def engine(self) -> Engine:
        return self.server.engine

    # --- answers

    def send_whole(self, content, status: int = 200, kind: str = "application/json") -> None:
        """`content`: JSON, or text as it is. What the server's `lie` makes None of, it has answered itself."""
        if self.server.lie is not None and (content := self.server.lie(self, content)) is None:
            return
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.streaming = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_event(self, content) -> None:
        if self.server.lie is not None and content != "[DONE]" and (content := self.server.lie(self, content)) is None:
            return
        line = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.streaming = False
        self.send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def refuse(self, message: str, status: int = 400) -> None:
        self.send_whole({"error": {"message": message}}, status)

    # --- routes

    def may(self) -> bool:
        """Whether the key is right; if not, the answer is sent. As in srt/utils/auth.py."""
        if self.path.startswith(("/health", "/metrics")) or not self.server.api_key:
            return True
        if self.headers.get("Authorization") == f"Bearer {self.server.api_key}":
            return True
        self.send_whole({"error": "Unauthorized"}, 401)
        return False

    def do_GET(self):
        if not self.may():
            return None
        engine, faults = self.engine, self.engine.faults
        if self.path in ("/server_info", "/get_server_info"):
            if "no_server_info" in faults:
                return self.refuse("not found", 404)
            state = {"effective_max_running_requests_per_dp": engine.max_running}
            state |= {"avg_spec_accept_length": engine.accept_length} if engine.accept_length > 1 else {}
            made = self.server.version, self.server.flags, self.server.server_port
            return self.send_whole(fake_info.server_info(*made, state))
        if self.path == "/v1/models":
            return self.send_whole(fake_info.models(self.server.model))
        if self.path == "/model_info":
            return self.send_whole(fake_info.model_info(self.server.model))
        if self.path.split("?")[0] == "/v1/loads":
            return self.send_whole(engine.requests.loads(engine.active, self.server.version))
        if self.path == "/metrics":
            return self.send_whole(f"sglang:num_requests_total {engine.completions}\n", kind="text/plain")
        if self.path in ("/health", "/health_generate"):
            return self.send_whole("", kind="text/plain")
        return self.refuse(f"no {self.path}", 404)

    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
        if not self.may():
            return None
        try:
            body = json.loads(data)
        except ValueError as error:
            return self.refuse(f"JSON decode error: {error}")
        if self.path == "/flush_cache":
            self.engine.cached.clear()
            self.engine.flushed = True
            return self.send_whole("Cache flushed.\n", kind="text/plain")
        if self.path == "/abort_request":
            self.engine.requests.abort(body.get("rid") or "", body.get("abort_all", False))
            return self.send_whole("", kind="text/plain")
        if self.path == ("/tokenize" if "vllm_routes" in self.engine.faults else "/v1/tokenize"):
            if "no_tokenizer" in self.engine.faults:
                return self.refuse("the server was started with --skip-tokenizer-init")
            ids = self.engine.tokens.ids(body["prompt"])
            return self.send_whole({"tokens": ids, "count": len(ids), "max_model_len": 100_000})
        routes = {
            "/generate": self.generate,
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
        }
        if self.path not in routes:
            return self.refuse(f"no {self.path}", 404)
        if "error_500" in self.engine.faults:
            return self.refuse("out of memory", 500)
        self.engine.enter()
        try:
            if "hang" in self.engine.faults:
                self.engine.ended.wait(60)
                return None
            with self.engine.running:  # the others wait, as in a server's queue
                return routes[self.path](body)
        finally:
            self.engine.leave()

    def died(self) -> bool:
        if self.engine.is_dying():
            self.close_connection = True
            self.engine.die()
            return True
        return False

    def wrong(self, body) -> str:
        """What SGLang refuses a body of /generate for."""
        sampling = body.get("sampling_params", {})
        if not {"input_ids", "text"} & set(body):
            return "Either text, input_ids or input_embeds should be provided."
        if sampling.get("temperature", 1) < 0 or sampling.get("max_new_tokens", 1) < 0:
            return "temperature and max_new_tokens must be at least 0"
        if not 0 < sampling.get("top_p", 1) <= 1:
            return f"top_p must be in (0, 1], got {sampling['top_p']}."
        limit = self.server.flags.get("context_length")
        if limit and (given := len(body.get("input_ids", ()))) >= limit:
            return f"The input ({given} tokens) is longer than the model's context length ({limit} tokens)."
        return ""

    def generate(self, body):
        if said := self.wrong(body):
            return self.refuse(said)
        ids = body["input_ids"] if "input_ids" in body else self.engine.tokens.ids(body["text"])
        samples = body.get("sampling_params", {}).get("temperature", 1) > 0
        live = self.engine.requests.begin(body.get("rid"), len(ids), samples)
        send = None
        try:
            with self.engine.batch:
                send = self.generated(body, ids, live)
        finally:
            self.engine.requests.end(live, cancelled=send is None or live.is_aborted.is_set())
        if send is not None:  # behind the end of the request, as SGLang's scheduler forgets it before its client hears
            send()

    def generated(self, body, ids, live) -> Callable[[], object] | None:
        """Generate; what sends the last of the answer, or None where nobody is left to hear it."""
        engine = self.engine
        sampling = body.get("sampling_params", {})
        limit, wants = sampling.get("max_new_tokens", 16), body.get("return_logprob")
        if not ids:
            return lambda: self.refuse("The input is empty.")
        if wants and "rejects_logprobs" in engine.faults:
            return lambda: self.refuse("return_logprob is not supported with this speculative algorithm")
        cached = engine.find_cached(ids)
        engine.prefill(len(ids) - cached)
        made, logprobs, tops = [], [], []
        stream = body.get("stream")
        if stream:
            self.begin_stream()

        def answer(finish):
            meta = {"id": "1", "finish_reason": finish, "prompt_tokens": len(ids), "completion_tokens": len(made)}
            meta |= {"cached_tokens": cached, "weight_version": "default", "num_retractions": 0}
            if engine.accept_length > 1:
                meta["spec_accept_length"] = engine.accept_length
            if wants:
                meta["input_token_logprobs"] = []
                meta["output_token_logprobs"] = [[lp, i, None] for lp, i in zip(logprobs, made, strict=True)]
                meta["output_token_logprobs_length"] = len(made)
                meta["output_top_logprobs"] = tops
            found = {"output_ids": list(made), "meta_info": meta}
            return found if "no_text" in engine.faults else found | {"text": engine.tokens.text(made)}

        of_grammar = [int(word) for word in re.findall(r"w(\d+)", sampling.get("regex") or "")]
        drawn = {"samples": True} if engine.samples(sampling) else {}
        for token, logprob, top in engine.steps(ids, limit, sampling.get("ignore_eos", False), **drawn):
            token = of_grammar[len(made) % len(of_grammar)] if of_grammar else token
            made.append(token)
            logprobs.append(logprob)
            tops.append([[lp, i, None] for lp, i in top[: body.get("top_logprobs_num") or 0]])
            live.tokens += 1
            if live.is_aborted.is_set() or has_left(self.connection):
                break
            if len(made) % engine.accept_length == 0 or len(made) == 1:
                if self.died():
                    return None
                engine.step(len(made) == 1, len(made) > limit - engine.accept_length)
                if stream and (len(made) == 1 or len(made) % engine.stream_interval == 0):
                    self.send_event(answer(None))
        whole = len(made) == limit
        finish = {"type": "length", "length": limit} if whole else {"type": "stop", "matched": EOS}
        if live.is_aborted.is_set():
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        elif has_left(self.connection):
            self.close_connection = True
            return None
        if not stream:
            several = sampling.get("n", 1)
            return lambda: self.send_whole([answer(finish)] * several if several > 1 else answer(finish))
        return lambda: (self.send_event(answer(finish)), self.end_stream())

    def completions(self, body):
        """/v1/completions, streamed only: what the load generator's vllm backend uses."""
        engine = self.engine
        prompt = body["prompt"]
        ids = engine.tokens.ids(prompt) if isinstance(prompt, str) else prompt
        engine.prefill(len(ids) - engine.find_cached(ids))
        self.begin_stream()
        answer = engine.steps(ids, body["max_tokens"], body.get("ignore_eos", False))
        with engine.batch:
            for made, (token, _, _) in enumerate(answer, 1):
                if self.died():
                    return
                engine.step(made == 1, made == body["max_tokens"])
                usage = {"prompt_tokens": len(ids), "completion_tokens": made}
                self.send_event({"choices": [{"text": engine.tokens.text([token])}], "usage": usage})
        self.end_stream()

    def chat(self, body):
        if body.get("model") not in (None, "default", self.server.model):
            return self.refuse(f"The model {body['model']!r} does not exist.", 404)
        message = self.reply(body)
        if self.died():
            return None
        finish = {"finish_reason": "tool_calls" if message.get("tool_calls") else "stop", "matched_stop": None}
        head = {"id": "1", "created": 0, "model": self.server.model}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "logprobs": None} | finish
            usage = {"completion_tokens": body.get("max_tokens")}
            return self.send_whole(head | {"object": "chat.completion", "choices": [choice], "usage": usage})

        def send(delta, finish=None):
            choice = {"index": 0, "delta": delta} | (finish or {"finish_reason": None, "matched_stop": None})
            self.send_event(head | {"object": "chat.completion.chunk", "choices": [choice]})

        self.begin_stream()
        send({"role": "assistant", "content": ""})
        for key in ("reasoning_content", "content"):
            for piece in re.findall(r"\s*\S+", message.get(key) or ""):
                send({key: piece})
        for index, call in enumerate(message.get("tool_calls") or []):
            if "lost_tool_delta" in self.engine.faults:
                break
            arguments = call["function"]["arguments"]
            if "stream_differs" in self.engine.faults:
                arguments = arguments.replace("Paris", "London")
            name = call["function"]["name"]
            send({"tool_calls": [call | {"index": index, "function": {"name": name, "arguments": ""}}]})
            for part in (arguments[:5], arguments[5:]):
                piece = {"id": None, "index": index, "type": "function", "function": {"name": None, "arguments": part}}
                send({"tool_calls": [piece]})
        send({}, finish)
        return self.end_stream()

    def reply(self, body) -> dict:
        """The message of a chat completion."""
        faults = self.engine.faults
        text = " ".join(m["content"] for m in body["messages"] if isinstance(m.get("content"), str))
        thinks = (body.get("chat_template_kwargs") or {}).get("thinking")
        reasoning = "The user asks something, so I consider it first." if thinks else None
        names = [tool["function"]["name"] for tool in body.get("tools") or []]
        city = next((c for c in ("Paris", "Rome", "Oslo") if c in text), None)
        message: dict = {"role": "assistant", "content": "", "reasoning_content": reasoning}
        if names and city:
            arguments = json.dumps(
                {"city": city, "note": 'a "quoted" <tag> & more'} if "note" in text else {"city": city}
            )
            values = [arguments] + ([json.dumps({"city": "Rome"})] if city == "Paris" and "Rome" in text else [])
            calls = [
                {"id": f"call_{index}", "type": "function", "function": {"name": names[0], "arguments": one}}
                for index, one in enumerate(values)
            ]
            message["tool_calls"] = None if "empty_call" in faults else calls
            if "broken_arguments" in faults:
                calls[0]["function"]["arguments"] = '{"city": '
            if "markup_leak" in faults:
                message["content"] = '<｜DSML｜invoke name="get_weather">'
        else:
            scripted = self.engine.scripted(text)
            message["content"] = (scripted or " The answer is four, as two and two make four.").strip()
        if reasoning and "reasoning_leak" in faults:
            message["content"] = f"{reasoning}</think>{message['content']}"
            message["reasoning_content"] = None
        if "broken_markup" in faults:
            message["content"] += ' <｜DSML｜parameter name="x"'
        if "foreign_script" in faults:
            message["content"] += " " + FOREIGN[0] * 3
        return message


class FakeServer:
    """In-process server; `url` once entered. `flags` go into /server_info."""

    class _Http(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, *_):
            pass  # a client that went away, or a death to order

    def __init__(
        self, faults=(), port=0, version="0.5.23", model="fake/model", flags=None, api_key=None, lie=None, **engine
    ):
        """`lie`(handler, content) -> content: changes what is sent; None: it has answered itself."""
        self.engine = Engine(faults, on_death=self.die, **engine)
        self.http = self._Http(("127.0.0.1", port), Handler)
        self.http.engine, self.http.version, self.http.model = self.engine, version, model
        self.http.api_key, self.http.lie = api_key, lie
        self.http.flags = dict(flags or {})
        if self.engine.accept_length > 1:
            self.http.flags["speculative_algorithm"] = "EAGLE"
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.exits = False

    def die(self) -> None:
        if self.exits:
            os._exit(9)
        threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.engine.ended.set()
        self.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", action="append", default=[], choices=sorted(FAULTS))
    parser.add_argument("--step", type=float, default=0.0, metavar="S", help="seconds a token")
    parser.add_argument("--prefill", type=float, default=0.0, metavar="S", help="seconds a prompt token")
    parser.add_argument("--accept-length", type=int, default=1)
    parser.add_argument("--die-after", type=int, default=0, metavar="COMPLETIONS")
    parser.add_argument("--version", default="0.5.23")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="shown in /server_info")
    options = parser.parse_args()
    server = FakeServer(
        options.fault,
        options.port,
        options.version,
        flags=dict(flag.split("=", 1) for flag in options.flag),
        step_s=options.step,
        prefill_s=options.prefill,
        accept_length=options.accept_length,
        die_after=options.die_after,
    )
    server.exits = True
    server.http.serve_forever()


if __name__ == "__main__":
    main()
