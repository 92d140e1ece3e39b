#!/usr/bin/env python3
"""The offline engine behind /health and /generate, for a machine that lacks what SGLang's own server imports.

usage: faults_engine.py --port N --engine JSON

One request at a time, of one prompt or several. The processes are those of a server, but for the HTTP front.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    engine = None

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
        if self.path == "/generate":
            self.answer(self.engine.generate(**asked))
        else:  # /release_memory_occupation and its like
            self.answer(getattr(self.engine, self.path.strip("/"))(**asked))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, required=True)
    options = parser.parse_args()
    import sglang

    Handler.engine = sglang.Engine(**options.engine, port=options.port + 1000)
    HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
