#!/usr/bin/env python3
"""The offline engine behind /health and /generate, for a machine that lacks what SGLang's own server imports.

usage: faults_engine.py --port N --engine JSON

One request at a time, of one prompt or several. The processes are those of a server, but for the HTTP front; and as
there the main thread is in the engine's event loop, so SGLang's own handlers end all on SIGTERM, and on the SIGQUIT by
which a child or the engine's watchdog says that a process died.
"""

import argparse
import asyncio
import json
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    ask = None  # staticmethod: (method, arguments) -> its answer

    def log_message(self, *_):
        pass

    def answer(self, value):
        data = json.dumps(value, default=str).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):  # noqa: N802
        self.answer({})

    def do_POST(self):  # noqa: N802
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # /generate, /release_memory_occupation and its like
        self.answer(self.ask(self.path.strip("/"), asked))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, required=True)
    options = parser.parse_args()
    import sglang

    engine, jobs = sglang.Engine(**options.engine, port=options.port + 1000), asyncio.Queue()
    # a server's first request, too: SGLang's handlers of signals are there from then on
    engine.generate(input_ids=[1] * 8, sampling_params={"temperature": 0, "max_new_tokens": 2}, return_logprob=True)

    def ask(method, asked):
        done = Future()
        engine.loop.call_soon_threadsafe(jobs.put_nowait, (method, asked, done))
        return done.result()

    Handler.ask = staticmethod(ask)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        method, asked, done = engine.loop.run_until_complete(jobs.get())
        try:
            done.set_result(getattr(engine, method)(**asked))
        except Exception as error:
            done.set_exception(error)  # of this request: whoever asked has it


if __name__ == "__main__":
    main()
