"""compare.py on servers with keys: they are measured, and no file, no line on a terminal holds what is secret."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from bench.serving import compare
from tests.serving.test_compare import free_port

REPO = Path(__file__).resolve().parents[2]
CANARY = "CaNaRy42"
SERVER = """
import argparse, sys
sys.path[:0] = [{repo!r}]
from tests.serving import fake_server

parser = argparse.ArgumentParser()
for name in ("port", "api-key", "admin-api-key", "ssl-keyfile-password", "header"):
    parser.add_argument("--" + name)
options = parser.parse_args()

class Guarded(fake_server.Handler):
    def is_known(self):
        return self.path == "/health" or self.headers.get("Authorization") == "Bearer " + options.api_key

    def do_GET(self):
        return super().do_GET() if self.is_known() else self.refuse("who are you", 401)

    def do_POST(self):
        return super().do_POST() if self.is_known() else self.refuse("who are you", 401)

fake_server.Handler = Guarded
print("server_args=ServerArgs(port=%s, api_key=%r, admin_api_key=%r)" % (
    options.port, options.api_key, options.admin_api_key), flush=True)
print("GET https://user:" + options.api_key + "@host/ with Bearer " + options.api_key, flush=True)
secrets = {{"api_key": options.api_key, "admin_api_key": options.admin_api_key,
           "ssl_keyfile_password": options.ssl_keyfile_password, "watermark_key_b": options.api_key,
           "hicache_storage_backend_extra_config": '{{"secret_key": "' + options.api_key + '"}}',
           "nested": {{"list": [{{"aws_secret_access_key": options.api_key}}]}}, "max_total_tokens": 4321}}
server = fake_server.FakeServer(port=int(options.port), flags=secrets)
server.exits = True
server.http.serve_forever()
"""


@pytest.fixture
def command(tmp_path):
    """command(variables, key) -> a shell line with keys in every place that it has."""
    script = tmp_path / "server.py"
    script.write_text(SERVER.format(repo=str(REPO)))

    def make(variables: str = "", key: str = f"{CANARY}key") -> str:
        return (
            f"export HF_TOKEN='{CANARY} {CANARY}'; MY_SECRET={CANARY} SGLANG_TEST_KEY={CANARY} {variables} "
            f"SGLANG_TEST_URL=https://user:{CANARY}@host/ {sys.executable} {script} --port {free_port()} "
            f'--api-key {key} --admin-api-key={CANARY} --ssl-keyfile-password "{CANARY} \'{CANARY}" '
            f"--header 'Authorization: Bearer {CANARY}'"
        )

    return make


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where the canary is, as it is or as JSON, HTML, URLs or base64 would write it."""
    forms = {CANARY.encode(), urllib.parse.quote(CANARY).encode(), base64.b64encode(CANARY.encode())[:8]}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert {"result.json", "report.md", "report.html", "server_A.log", "server_B.log"} <= {path.name for path in files}
    found = [str(path) for path in files if any(form in path.read_bytes() for form in forms)]
    return found + [text for text in texts if any(form in text.encode() for form in forms)]


def run(tmp_path, sglang_path, *words: str, key: str = f"{CANARY}key"):
    """(the finished command, its folder): compare.py as a process of its own, as users start it."""
    out = tmp_path / "out"
    line = [sys.executable, str(REPO / "bench/serving/compare.py"), "--matrix", "smoke", "--only", "single", "--rounds"]
    line += ["1", "--out", str(out), "--both-at-once", "--cell-timeout", "20", *words]
    environment = os.environ | {"PYTHONPATH": sglang_path(), "SGLANG_API_KEY": key, "OPENAI_API_KEY": f"{CANARY}openai"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120), out


def test_servers_with_keys_are_compared_and_nothing_holds_a_key(tmp_path, sglang_path, command):
    words = ["--a-cmd", command(), "--b-cmd", command(), "--change", "nothing", "--note", f"HF_TOKEN={CANARY}"]
    done, out = run(tmp_path, sglang_path, *words)
    assert done.returncode == compare.COMPARED, done.stdout + done.stderr
    assert leaks(out, done.stdout, done.stderr) == []
    result = json.loads((out / "result.json").read_text())
    who = result["variants"][0]["sides"]["A"]["identity"]
    assert who["flags"]["max_total_tokens"] == 4321 and who["flags"]["watermark_key_b"] == "***"
    seen = who["environment"]
    assert seen["SGLANG_TEST_KEY"] == "***" and seen["SGLANG_TEST_URL"] == "https://***@host/"
    for part in ("export HF_TOKEN='***'; MY_SECRET=***", "--api-key *** --admin-api-key=***"):
        assert part in who["command"]
    assert "api_key='***'" in (out / "server_A.log").read_text()
    assert compare.main(["--from", str(out / "result.json")]) == compare.COMPARED


def test_a_refusal_names_the_variable_and_not_its_value(tmp_path, sglang_path, command):
    words = ["--a-cmd", command("SGLANG_TEST_TOKEN=" + CANARY), "--b-cmd", command("SGLANG_TEST_TOKEN=other")]
    done, out = run(tmp_path, sglang_path, *words, "--change", "nothing")
    assert done.returncode == compare.REFUSED
    assert "environment variable SGLANG_TEST_TOKEN differs: A '***', B '***'" in done.stdout
    assert leaks(out, done.stdout, done.stderr) == []


def test_a_server_that_wants_another_key_and_one_that_dies(tmp_path, sglang_path, command):
    dying = f"echo \"api_key='{CANARY}'\"; echo HF_TOKEN={CANARY} >&2; exit 7; --port {free_port()}"
    done, out = run(tmp_path, sglang_path, "--a-cmd", command(), "--b-cmd", dying, "--change", "nothing", key="wrong")
    assert done.returncode == compare.INCOMPLETE and ("status 401" in done.stdout or "exit code 7" in done.stdout)
    assert leaks(out, done.stdout, done.stderr) == []
