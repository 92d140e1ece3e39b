"""What may be written and printed: a unique word wherever a secret can stand must be gone, and nothing else."""

import time

import pytest

from deepseek_v4_sm120.commands.disclosure import HIDDEN, is_secret, printable, redacted, shown

SECRET = "CaNaRy7"
TWO = f"{SECRET} {SECRET}"
TEXTS = [
    # flags, with every way of a shell to quote
    f"--api-key {SECRET}",
    f"--api-key={SECRET}",
    f"--api-key '{TWO}'",
    f'--api-key "{TWO}"',
    f"--api-key ab'{TWO}'c",
    f"--api-key 'it'\"'\"'s {SECRET}'",
    f"--api-key a\\ {SECRET}",
    f"--api-key $'{TWO}'",
    f"'--api-key' '{SECRET}'",
    f"--api-key \\\n  {SECRET}",
    f"--api-key\t{SECRET}",
    f'--api-key "cut off {SECRET}',
    f"--api {SECRET}",  # argparse takes it for --api-key
    f"--api-k={SECRET}",
    f"--admin-api-key {SECRET}",
    f"--admin {SECRET}",
    f"--ssl-keyfile-password {SECRET}",
    f"--ssl-keyfile-p={SECRET}",
    f"--watermark-key-b {SECRET}",
    f"bash -c 'python3 -m x --api-key {SECRET}'",
    f'bash -c "python3 -m x --api-key \\"{TWO}\\" --port 1"',
    f'bash -c \'bash -c "HF_TOKEN=\\"{TWO}\\" x"\'',
    # variables
    f"HF_TOKEN={SECRET} python3 -m x",
    f"export MY_SECRET='{TWO}'; x",
    f"docker run -e HF_TOKEN={SECRET} x",
    f"docker run --env=HF_TOKEN={SECRET} x",
    f"docker run -eHF_TOKEN={SECRET} x",
    f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"AWS_ACCESS_KEY_ID={SECRET}",
    f"DB_PASSWORD_OF_X={SECRET}",
    f"API_KEY_2={SECRET}",
    f"MYSQL_PWD={SECRET}",
    f"KEY={SECRET}",
    # headers
    f'-H "Authorization: Bearer {SECRET}"',
    f"-H 'Authorization: Basic {SECRET} {SECRET}'",
    f"-H Authorization:\\ Token\\ {SECRET}",
    f"X-Api-Key: {SECRET}",
    f"Cookie: a={SECRET}; b={SECRET}",
    f"sent Bearer {SECRET}, got 401",
    # addresses
    f"https://user:{SECRET}@host/x",
    f"https://{SECRET}@host/x",
    f"http://u:p/{SECRET}@host/",
    f"http://u:p@{SECRET}@host/",
    f"http://host/?access_token={SECRET}&x=1",
    f"http://host/?token={SECRET}",
    # logs, TOML, Python, JSON in a string
    f"ServerArgs(api_key='{SECRET}', port=3)",
    f'api_key = "{SECRET}"',
    f"{{'apiKey': '{SECRET}'}}",
    f'{{"api_key": "{SECRET}"}}',
    f'{{\\"secret_key\\": \\"{TWO}\\"}}',
    f'--hicache-storage-backend-extra-config \'{{"secret_key": "{SECRET}"}}\'',
    f'["--api-key", "{SECRET}"]',
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
]
DATA = [
    ["--api-key", SECRET],
    [f"--api-key={TWO}"],
    ["-e", f"HF_TOKEN={TWO}"],
    [f"--env=HF_TOKEN={TWO}"],
    ["-H", f"Authorization: Bearer {TWO}"],
    [f"X-Api-Key: {TWO}"],
    ["bash", "-c", f"HF_TOKEN={SECRET} python3 -m x --api-key {SECRET}"],
    ["--a-cmd", f"HF_TOKEN={SECRET} python3 -m x --api-key {SECRET}"],
    {"api_key": SECRET},
    {"a": {"b": [{"admin_api_key": SECRET}, ("x", {"ssl_keyfile_password": SECRET})]}},
    {"HF_TOKEN": SECRET},
    {"api_keys": [SECRET, {"x": SECRET}]},
    {"credentials": {"x": SECRET}},
    {"name": "--api-key", "value": SECRET},
    {"password": f"{SECRET}"},
    {f"http://u:{SECRET}@h": 1},
]
KEPT = [
    "--max-total-tokens 1000 --tokenizer-path /x/y --kv-cache-dtype fp8 --speculative-num-draft-tokens 2",
    "--ssl-keyfile /a/b --tool-call-parser deepseekv4 --enable-metrics",
    "max_total_tokens=7, api_key=None, admin_api_key='', port=3",
    "num_tokens=5 eos_token=<eos> time_per_output_token=12",
    "no token: the file; index_select: 3 tokens; key: value; reviewed, key of the table",
    "SGLANG_LOG_DECODE_GRAPH_KEY=1 PYTHONPATH=build python3 -m x",
    "http://127.0.0.1:30000/a@b git@github.com:x/y monkey=3",
    "--api-key --port 3",
    {"max_total_tokens": 5, "token_id": 3, "tokens": [1, 2], "first_token": "a", "tokenizer_path": "/x"},
    {"api_key": None, "admin_api_key": "", "enable_auth": True},
    {"num_token": 5, "tokenizer": "x", "public_key": "x", "key": "x"},
    ["--tokenizer", "x", "--max-total-tokens", "5"],
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_text_is_hidden(text):
    found = redacted(text)
    assert SECRET not in found and HIDDEN in found
    assert redacted(found) == found


@pytest.mark.parametrize("data", DATA, ids=str)
def test_a_secret_in_data_is_hidden(data):
    found = redacted(data)
    assert SECRET not in str(found) and HIDDEN in str(found)
    assert redacted(found) == found


@pytest.mark.parametrize("value", KEPT, ids=str)
def test_what_is_no_secret_stays(value):
    assert redacted(value) == value


def test_only_the_secret_is_lost_of_a_command():
    command = f"HF_TOKEN={SECRET} python3 -m sglang.launch_server --api-key '{TWO}' --tp-size 2"
    assert redacted(command) == "HF_TOKEN=*** python3 -m sglang.launch_server --api-key '***' --tp-size 2"
    words = ["--a-cmd", f"HF_TOKEN={SECRET} python3 --api-key {SECRET} --tp 2", "--rounds", "3"]
    assert redacted(words) == ["--a-cmd", "HF_TOKEN=*** python3 --api-key *** --tp 2", "--rounds", "3"]


@pytest.mark.parametrize("token", ["hf_" + 20 * "a", "sk-" + 20 * "a", "ghp_" + 20 * "a", "AKIA" + 16 * "A"])
def test_known_forms_are_hidden_under_any_name(token):
    assert redacted(f"login with {token} failed") == "login with *** failed"


def test_names():
    assert all(map(is_secret, ("api_key", "API-KEY", "apiKey", "X-Api-Key", "hf_token", "ssl_keyfile_password", "KEY")))
    assert not any(map(is_secret, ("tokens", "max_tokens", "tokenizer", "kv_cache_dtype", "keyfile", "key", "PWD", "")))


@pytest.mark.parametrize("text", ["a" * 200_000, "-a" * 100_000, "a=" * 100_000, "--api-key '" * 2_000, "\\" * 100_000])
def test_long_text_takes_no_time(text):
    needs_no_time(text)


@pytest.mark.parametrize("text", ["a://x:" * 16_000, "a://" * 25_000, "@a://x:1" * 12_000, "-eyJaaaaaaaa" * 8_000])
def test_what_a_client_has_a_server_log_takes_no_time(text):
    """SGLang's errors have what they are about, a schema for one, in a line: `serve` passes it on, and a server whose
    lines nobody takes stands still."""
    needs_no_time(text)


def needs_no_time(text):
    start = time.monotonic()
    redacted(text)
    assert time.monotonic() - start < 5


def test_a_terminal_gets_nothing_to_obey():
    text = "a\x1b[2J\x9b1m\x07\r\u202e\u2028\ud800 b\tc\n"
    assert printable(text) == "a\\x1b[2J\\x9b1m\\x07\\r\\u202e\\u2028\\ud800 b\tc\n"
    assert shown(f"\x1b]0;x\x07--api-key {SECRET}") == "\\x1b]0;x\\x07--api-key ***"
