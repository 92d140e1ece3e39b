"""`doctor --out`: one file, whatever fails; nothing in it tells whose it is."""

import argparse
import http.server
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands import nameless
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import attached, command, parts, server_figures, server_log
from deepseek_v4_sm120.commands.doctor.attached import Part
from tests.doctor.test_machine import gathered, rtx
from tests.doctor.test_server import PLANNED

KEY = "CaNaRy-4711"
NAMES = nameless.Known(
    frozenset({"jdoe"}), frozenset({"gpu7", "gpu7.lab.example"}), frozenset({KEY}), "/data/people/jd"
)


def asked(out, **others):
    values = {
        "out": str(out),
        "url": None,
        "api_key": None,
        "quick": False,
        "json": False,
        "log": None,
        "profile": None,
    }
    return argparse.Namespace(**values | others)


def code(text, limit_s=20.0, name="a part"):
    return Part(name, ("-S", "-c", text), limit_s)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(parts) -> (exit status, the file's text)."""
    monkeypatch.setattr(attached, "ENDS_S", 0.2)

    def run(*todo, out=tmp_path / "card.txt", **others):
        monkeypatch.setattr(attached, "parts_of", lambda arguments, profile: todo)
        status = attached.run(asked(out, **others))
        return status, Path(out).read_text()

    return run


# ---- what fails is told, and the rest goes on


def test_each_part_is_told_as_what_it_is(write):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('before', flush=True); time.sleep(60)"
    status, text = write(
        code(stubborn, 1, "hangs"),
        code("import os; print('half', flush=True); os.abort()", name="crashes"),
        code("import sys; print('said'); sys.exit('the reason')", name="fails"),
        Part("is not asked", (), 0, "the reason of it"),
        code("print('well')", name="the last"),
    )
    assert status == 1
    told = {part.partition(":")[0]: part for part in text.split("\n==== ")[1:]}
    assert list(told) == ["hangs", "crashes", "fails", "is not asked", "the last"]
    assert re.match(r"hangs: NOT AT ITS END after 1 s, \d s\nbefore\n", told["hangs"])
    assert "ended by SIGABRT" in told["crashes"] and "\nhalf" in told["crashes"]
    assert "exit status 1" in told["fails"] and "\nsaid\n---- beside it:\nthe reason" in told["fails"]
    assert told["is not asked"].strip() == "is not asked: NOT RUN: the reason of it"
    assert "exit status 0" in told["the last"] and "\nwell" in told["the last"]


def test_a_part_that_hangs_is_something_wrong(write):
    assert write(code("import time; time.sleep(60)", 0.05))[0] == 1


def test_nothing_that_a_part_has_started_is_left(write, tmp_path):
    pid = tmp_path / "pid"
    grandchild = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    started = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', {grandchild!r}])"
    write(code(f"{started}\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)\ntime.sleep(0.1)"))
    state, limit = Path(f"/proc/{pid.read_text()}/stat"), time.monotonic() + 10
    while (lives := state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX") and (
        time.monotonic() < limit
    ):
        time.sleep(0.01)
    assert not lives


def test_a_file_is_added_to_and_no_other_is_touched(write, tmp_path):
    assert write(code("print('without a server')"))[0] == 0
    status, text = write(code("print('of the server')"))
    assert status == 0 and text.count(attached.HEAD) == 2
    assert text.index("without a server") < text.index("of the server")
    (tmp_path / "other").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    for name, words in (
        ("other", "none that this command"),
        ("fifo", "FIFO"),
        ("no/where", "No such"),
        (".", "Is a dir"),
    ):
        with pytest.raises(CommandError, match=words):
            write(code("print('never')"), out=tmp_path / name)
    assert (tmp_path / "other").read_text() == "mine"


def test_what_is_interrupted_has_written_what_was_there(write, tmp_path):
    it = f"os.kill({os.getpid()}, {int(signal.SIGINT)})"  # once it is waited for
    interrupt = f"import os, time; print('begun', flush=True); time.sleep(0.3); {it}; time.sleep(9)"
    with pytest.raises(KeyboardInterrupt):
        write(code(interrupt), code("print('never')"))
    text = (tmp_path / "card.txt").read_text()
    assert "a part: interrupted" in text and "begun" in text and "never" not in text


def test_a_flood_is_cut_in_the_middle(write, monkeypatch):
    monkeypatch.setattr(attached, "MOST_SIGNS", 200)
    _, text = write(code("print('begin'); print('x\\n' * 5000); print('end')"))
    assert "begin" in text and "\nend" in text and "bytes left out]" in text and len(text) < 1000


def names_of(**others):
    return {part.name: part for part in attached.parts_of(asked("x", **others), others.get("profile"))}


def test_what_is_asked():
    """What loads the cards not beside a server; no key in a command line, which all users of the machine see."""
    alone, beside = names_of(), names_of(url="http://x:1", api_key=KEY)
    assert list(alone) == ["status", "doctor", "torch", "selftest", "calibrate"]
    assert all(part.words and part.limit_s > 0 for part in alone.values())
    assert list(beside) == ["status", "doctor", "torch", "the server", "selftest", "calibrate"]
    assert beside["the server"].words[-1] == "http://x:1" == beside["doctor"].words[-2]
    for loads in ("selftest", "calibrate"):
        assert not beside[loads].words and "without --url" in beside[loads].why
    assert not any(KEY in word for part in beside.values() for word in part.words)
    quick = names_of(quick=True, url="http://x:1", profile="p.json", log="server.log")
    assert [name for name, part in quick.items() if not part.words] == ["the server", "selftest"]
    assert {part.why for part in quick.values()} == {"", "--quick"} and quick["doctor"].words[-1] == "quick"
    assert quick["calibrate, the profile"].words[-2:] == ("calibrated", "p.json")
    assert quick["the server's log"].words[-2:] == ("log", "server.log")
    for part in [*alone.values(), *beside.values(), *quick.values()]:
        assert part.words[:2] != attached.PARTS or part.words[2] in parts.PARTS


def test_the_file_begins_in_a_second_of_a_real_part(write):
    """By the real interpreter and our own modules: a log that is not there is a sentence."""
    status, text = write(Part("the server's log", (*attached.PARTS, "log", "/nowhere/server.log"), 60))
    assert (
        status == 1 and "exit status 2" in text and "cannot be read: No such file" in text and "Traceback" not in text
    )


def test_options_of_the_file_alone(tmp_path):
    with pytest.raises(CommandError, match="--log is for the file"):
        command.run(argparse.Namespace(**vars(asked("")) | {"out": None, "log": "x"}))
    with pytest.raises(CommandError, match="--json is for doctor alone"):
        command.run(asked(tmp_path / "x", json=True))
    with pytest.raises(CommandError, match="must start with http"):
        command.run(asked(tmp_path / "x", url="gpu7"))
    assert not (tmp_path / "x").exists()


# ---- whose it is


def test_planted_secrets_are_in_no_part_of_the_file(write, monkeypatch, tmp_path):
    planted = {
        "HF_TOKEN": "hf_" + 20 * "q",
        "MY_DB_PASSWORD": "tr0ub4dor",
        "SGLANG_API_KEY": KEY,
        "HOME": "/data/people/jd",
        "USER": "jdoe",
        "HOSTNAME": "node-x9.lab.example",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    texts = [
        "db_password=s3cr3t-of-text",
        *planted.values(),
        "http://node-x9.lab.example:30000/v1",
        "10.20.30.40",
        "fe80::1:2:3:4",
        "jdoe@lab.example",
    ]
    texts += [
        "/home/somebody/models/x.json",
        "GPU-01234567-89ab-cdef-0123-456789abcdef",
        "/mnt/peoples/secret-name/a.log",
    ]
    lines = f"import sys; lines = {texts!r}; print(*lines, sep='\\n'); print(*lines, file=sys.stderr)"
    status, text = write(code(f"{lines}; print('kept')"), code(f"{lines}; sys.exit(lines[0])"), api_key="given-K3Y")
    assert status == 1 and text.count("kept") == 1
    gone = [
        *planted.values(),
        "node-x9",
        "10.20.30.40",
        "fe80::1",
        "jdoe",
        "lab.example",
        "somebody",
        "01234567",
        "peoples",
    ]
    assert [one for one in (*gone, "secret-name", "s3cr3t", "given-K3Y") if one.lower() in text.lower()] == []
    monkeypatch.setattr(attached, "parts_of", lambda *_: [code("print('key: given-K3Y in words given-K3Y')")])
    attached.run(asked(tmp_path / "second", api_key="given-K3Y"))
    assert "given-K3Y" not in (tmp_path / "second").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("on gpu7.lab.example and GPU7, by jdoe", "on HOST and HOST, by USER"),
        ("model_path='/data/people/jd/DeepSeek-V4-Flash'", "model_path='~/DeepSeek-V4-Flash'"),
        ("model_path='/nvme/jane/DeepSeek-V4-Flash'", "model_path='/***/DeepSeek-V4-Flash'"),
        ("PYTHONPATH=/opt/dsv4:/srv/jane:/home/jane/x", "PYTHONPATH=/opt/dsv4:/***/***:/home/USER/x"),
        ("in /var/home/jane/x/y", "in /***/***"),
        ("http://10.0.0.7:30000/v1, https://jane.example/x", "http://HOST:30000/v1, https://HOST/x"),
        ("dist_init_addr=10.0.0.7:20000", "dist_init_addr=ADDRESS:20000"),
        ("2001:db8:0:1::7 and aa:bb:cc:dd:ee:ff", "ADDRESS and ADDRESS"),
        (f"in words {KEY}", "in words ***"),
    ],
)
def test_what_tells_whose_it_is_goes(text, told):
    assert nameless.nameless(text, NAMES) == told


@pytest.mark.parametrize(
    "text",
    [
        "2026-12-01 06:47:33 UTC, PCI 0000:01:00.0, driver 580.95.05, nvidia-cublas==12.8.4.1, torch 2.9.1+cu130",
        "http://127.0.0.1:30000/server_info, --host 0.0.0.0, /dev/shm, /root/.cache/huggingface/hub/x, /generate",
        "at::native::copy, a 16/32 split, tokens/s, 1.0e-3, gen 5 x16, /opt/deepseek_v4_sm120/deepseek_v4_sm120/_C.so",
        "https://github.com/sgl-project/sglang/issues/1, mxfp4_moe 8 rows PASS relative error 0.0017, allowed 0.004",
    ],
)
def test_what_finds_a_cause_stays(text):
    assert nameless.nameless(text, NAMES) == text


def test_names_are_found_where_they_are(tmp_path):
    for name, text in {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\ndaemon:x:2:2::/:/x\njroe:x:1001:1001::/h:/bin/sh\nodd\n",
        "etc/hostname": "box.example.org\n",
        "etc/hosts": "127.0.0.1 localhost ip6-loopback\n10.0.0.8 other # peer\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "home/jpoe").mkdir(parents=True)
    found = nameless.known(tmp_path, {"LOGNAME": "jfoe", "NODE_NAME": "k8s-3", "X_TOKEN": "abcdefg", "HOME": "/root"})
    assert {"jroe", "jpoe", "jfoe"} <= found.users and "daemon" not in found.users and "root" not in found.users
    assert {"box.example.org", "box", "other", "k8s-3"} <= found.hosts and not {
        "localhost",
        "ip6-loopback",
    } & found.hosts
    assert found.secrets == {"abcdefg"} and found.home == ""


# ---- the server's log

SAYS = "[2026-12-01 06:47:33 TP0] "
REQUEST = f"{SAYS}Receive: obj=GenerateReqInput(text='{KEY} Traceback (most recent call last): CUDA error')"
TRACEBACK = [f"{SAYS}Scheduler hit an exception: Traceback (most recent call last):", '  File "/x/y.py", line 3, in f']


def excerpt(*lines):
    return list(server_log.excerpt(f"{line}\n" for line in lines))


def test_of_a_log_the_last_start_is_shown_and_of_requests_nothing():
    start = [
        "import warning",
        f"{SAYS}server_args=ServerArgs(grammar_backend='x')",
        f"{SAYS}Load weight end.",
        "\x1b[1mfree\x1b[0m",
    ]
    told = excerpt(
        *(f"{SAYS}server_args=an earlier start", f"{SAYS}earlier", f"{SAYS}{server_log.READY}", REQUEST),
        *(f"{SAYS}Decode batch, earlier", KEY, "CUDA error: why it ended"),
        *(*start, REQUEST, f"{SAYS}{server_log.READY}!", REQUEST, f'INFO: "POST /generate" {KEY}', KEY),
        *(f"{SAYS}Decode batch, #running-req: {i}" for i in range(20)),
        *(*TRACEBACK, "    raise ValueError(x)", f"ValueError: {KEY}", f"  input_value={KEY}"),
        *(*TRACEBACK, "torch.AcceleratorError: CUDA error: an illegal memory access", f"RuntimeError: grammar {KEY}"),
        *(f"{SAYS}CUDA error in grammar {KEY}", f'{{"event": "request.finished", "out": "{KEY} CUDA error"}}'),
    )
    text = "\n".join(told)
    assert KEY not in text and "earlier" not in text
    assert told[:4] == ["CUDA error: why it ended", *start[1:3], "free"] and text.count("why it ended") == 1
    assert "ValueError: what it says is left out" in told and '  File "/x/y.py", line 3, in f' in told
    assert "torch.AcceleratorError: CUDA error: an illegal memory access" in told and "    raise ValueError(x)" in told
    assert sum("Decode batch" in line for line in told) == server_log.MOST_PASSES and "#running-req: 19" in text


def test_a_start_that_fails_before_anything_is_shown_whole():
    lines = ["Traceback (most recent call last):", '  File "/x.py"', "ValueError: unknown argument"]
    assert excerpt(*lines)[:3] == lines
    again = [f"{SAYS}server_args=2", *lines]
    assert excerpt("import warning", f"{SAYS}server_args=1", *lines, *again)[-5:-1] == again
    assert excerpt("import warning", *again)[:5] == ["import warning", *again]


def test_a_tail_of_requests_is_not_taken_for_a_start():
    told = excerpt(KEY, f"{KEY} more", REQUEST, f"{SAYS}Prefill batch, x", KEY)
    assert KEY not in "\n".join(told) and f"{SAYS}Prefill batch, x" in told
    told = excerpt(KEY, f"{SAYS}Prefill batch, x", KEY, *TRACEBACK, f"ValueError: {KEY}", f"{SAYS}Decode batch, y")
    assert KEY not in "\n".join(told) and f"{SAYS}Decode batch, y" in told and TRACEBACK[1] in told
    assert excerpt() == ["nothing in it that could be shown"]


def test_a_long_start_keeps_its_beginning_and_its_end():
    told = excerpt(f"{SAYS}server_args=x", *(f"line {i}" for i in range(15_000)))
    assert (
        told[1] == "line 0" and "line 14999" in told and len(told) < 500 and any("left out]" in line for line in told)
    )


# ---- the server


@pytest.fixture
def engine():
    """A stand-in for SGLang's server, as fast as it is told to be; engine.bodies: what it was asked."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, found, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def do_GET(self):
            own = {
                "api_key": f"several words {KEY}",
                "served_model_name": "ours",
                "internal_states": [{"avg_spec_accept_length": 2.5}],
            }
            self.answer(
                PLANNED | own if self.path == "/server_info" else {}, 200 if self.path == "/server_info" else 404
            )

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            new = body["sampling_params"]["max_new_tokens"]
            meta = {"completion_tokens": new - made.short, "spec_verify_ct": -(-new // 2)}
            self.answer([{"text": KEY, "meta_info": meta} for _ in body["input_ids"]])

        def log_message(self, *args):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.short, made.bodies, made.url = 0, bodies, f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_a_servers_arguments_and_times(engine, monkeypatch, capsys):
    now = iter(range(10_000))  # each request takes a second
    monkeypatch.setattr(server_figures.time, "perf_counter", lambda: float(next(now)))
    assert parts.served(engine.url) == 0
    told = capsys.readouterr().out
    assert 'model_path="deepseek-ai/DeepSeek-V4-Flash"' in told and "avg_spec_accept_length=2.5" in told
    assert KEY not in told and "ours" not in told.partition("times, of")[0]
    assert "a prompt of 8192 tokens: first token after 1000.0 / 1000.0 ms, 8192 tokens/s" in told
    assert "8 stream(s): 1 and 65 tokens after 1000.0 / 1000.0 and 1000.0 / 1000.0 ms" in told
    lengths = [len(body["input_ids"][0]) for body in engine.bodies]
    assert set(lengths) == {64, 1024, 8192, 32_000} and max(len(body["input_ids"]) for body in engine.bodies) == 8
    firsts = [body["input_ids"][0][:8] for body in engine.bodies if body["sampling_params"]["max_new_tokens"] == 1]
    assert len({tuple(one) for one in firsts}) > 6  # prompts of their own, which no cache has


def test_steps_are_what_is_between_short_and_long_answers(monkeypatch):
    def timed(base, key, prompts, new):
        return server_figures.Timed(0.1 + 0.01 * (new - 1), 32)

    monkeypatch.setattr(server_figures, "_asked", timed)
    told = server_figures._steps("", None, [[1]] * 8)
    assert told.endswith(": 10.00 ms a token of each, 800 tokens/s of all, 20.00 ms for each of 32 verifications")


@pytest.mark.parametrize("short", [1, -1])
def test_a_server_that_answers_otherwise_gives_no_figure(engine, capsys, short):
    engine.short = short
    assert parts.main(["served", engine.url]) == 2
    told = capsys.readouterr().out
    assert (
        "does not answer with 1 tokens" in told and "model_path" in told and "tokens/s" not in told and KEY not in told
    )


def test_no_server_is_a_sentence(capsys):
    assert parts.main(["served", "http://127.0.0.1:9"]) == 2 and "no server at" in capsys.readouterr().out


def test_what_a_short_context_has_no_room_for_is_not_asked(monkeypatch):
    monkeypatch.setattr(server_figures, "_asked", lambda *_: server_figures.Timed(1.0, None))
    answers = server_figures.Answers(PLANNED | {"context_length": 4096, "max_running_requests": 4}, None)
    told = "\n".join(server_figures.figures("", None, answers))
    assert "8192 tokens: not asked, the server has 4096" in told and "8 streams: not asked, the server runs 4" in told


# ---- the machine


def test_a_machine_is_told_as_it_is(tmp_path, monkeypatch, capsys):
    secret = "abc- " * 60  # longer than a line: none is cut in two
    found = gathered(tmp_path, rtx(), {"SGLANG_X_KEY": secret, "NCCL_P2P_DISABLE": "1", "SOMETHING": "else"})
    found.status = {"processes": [{"pid": i, "found": {"all_reduce": {"way": "host"}}} for i in (7, 8)]}
    found.status["ended_processes"] = [{"pid": 9, "found": {"all_reduce": {"way": "none"}}}, {"pid": 10}]
    found.probe = {"links": {"0": [5, 16]}, "sums": {"way": "peer"}}
    monkeypatch.setattr(command, "look", lambda asked: (found, command.examine(gathered(tmp_path, rtx()))))
    assert parts.machine("", "") in (0, 1)
    told = capsys.readouterr().out
    for words in (
        "driver 580.159.04",
        "link_width=(16, 16)",
        "memory_total=97887",
        '"way": "peer"',
        "NCCL_P2P_DISABLE=1",
    ):
        assert words in told, words
    assert f"'code': {parts.extension.describe()['code']!r}" in told
    assert "ulimits (-1: none): {'RLIMIT_MEMLOCK': -1" in told and told.count("found by pid") == 2
    assert "abc-" not in told and "SOMETHING" not in told and "uuid" not in told and "OK       driver" in told


def test_a_dead_server_takes_no_machine_with_it(tmp_path, monkeypatch, capsys):
    def look(asked):
        if asked.url:
            raise CommandError("no server at x")
        return gathered(tmp_path, rtx()), command.examine(gathered(tmp_path, rtx()))

    monkeypatch.setattr(command, "look", look)
    parts.machine("http://x", "quick")
    told = capsys.readouterr().out
    assert "without the server: no server at x" in told and "driver 580.159.04" in told


@pytest.mark.parametrize("name", ["selftest", "calibration"])
def test_cards_that_a_server_holds_are_left_alone(tmp_path, monkeypatch, capsys, name):
    from tests.doctor.test_machine import smi

    monkeypatch.setattr(parts.facts, "run_command", smi(rtx(**{"<used>0 MiB": "90000 MiB"})))
    monkeypatch.setattr(parts, "commands", lambda words: pytest.fail("asked"))
    assert parts.main([name]) == 2
    assert "NOT RUN: others hold GPU 0 (90000 MiB)" in capsys.readouterr().out


def test_cards_that_are_free_are_calibrated_together(monkeypatch):
    from tests.doctor.test_machine import smi

    words = []
    monkeypatch.setattr(parts.facts, "run_command", smi(rtx(count=3)))
    monkeypatch.setattr(parts, "commands", lambda given: words.append(given) or 0)
    assert parts.main(["calibration"]) == 0 == parts.main(["selftest"])
    assert words[0][:3] == ["calibrate", "--gpus", "2"] and "--limit-s" in words[0] and words[1] == ["selftest"]
