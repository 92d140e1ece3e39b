"""compare.py as a user calls it: two servers, the real load generator, the files it leaves, the codes it ends with."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from bench.serving import cells, compare, measures, plots, session

FAKE = Path(__file__).resolve().parent / "fake_server.py"
DATA = Path(__file__).resolve().parents[2] / "bench/results"
CELLS = "single,concurrency 2,depth,prefill,intrusion"


@pytest.fixture
def run(sglang_path, tmp_path, monkeypatch):
    """run(*arguments) -> (exit code, result.json or None, report.md, report.html)."""
    monkeypatch.setenv("PYTHONPATH", sglang_path())
    out = tmp_path / "out"

    def call(*arguments: str):
        code = compare.main(
            ["--matrix", "smoke", "--rounds", "1", "--out", str(out), "--cell-timeout", "20", *arguments]
        )
        files = [out / name for name in ("result.json", "report.md", "report.html")]
        texts = [path.read_text() if path.exists() else None for path in files]
        return code, texts[0] and json.loads(texts[0]), *texts[1:]

    return call


def urls(a, b) -> list[str]:
    return ["--a-url", a.url, "--b-url", b.url, "--a-label", "stock", "--b-label", "ours"]


def command(port: int, *arguments: str) -> str:
    return " ".join([sys.executable, str(FAKE), "--port", str(port), *arguments])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def values(result: dict, cell: str, side: str, variant: int = 0) -> list[dict]:
    (entry,) = [e for e in result["variants"][variant]["cells"] if e["cell"]["name"] == cell]
    return [run["values"] for run in entry["runs"][side]]


def test_a_slower_server_is_found_slower_in_every_kind_of_cell(run, serve):
    slow, fast = serve(step_s=0.02, prefill_s=6e-4), serve(step_s=0.005, prefill_s=1e-5)
    code, result, text, page = run(*urls(slow, fast), "--change", "nothing", "--only", CELLS, "--rounds", "3")
    assert code == compare.COMPARED
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and line.endswith("better |")]
    better = {row[0].removeprefix("| ") for row in rows}
    assert better == {"single", "concurrency 2", "depth 512", "prefill 256", "intrusion 512 into 2"}
    assert "worse |" not in text
    assert 0.2 / 0.02 < values(result, "single", "A")[0]["stream_tok_s"] < 1.1 / 0.02
    assert values(result, "prefill 256", "A")[0]["prefill_tok_s"] < 1 / 6e-4
    assert result["settings"]["seed"] == 1 and result["command"] and result["machine"]["date"]
    assert "data:image/png" in page or plots.NO_MATPLOTLIB.split(".")[0] in page
    assert not re.search(r"(src|href)=['\"]?(http|//)", page)


def test_the_prefix_is_filled_once_and_its_hits_are_apart_from_prefill(run, serve):
    a, b = serve(prefill_s=1e-3), serve("no_radix", prefill_s=1e-3)
    code, result, text, _ = run(*urls(a, b), "--change", "nothing", "--only", "depth")
    assert code == compare.COMPARED
    kept, refilled = values(result, "depth 512", "A")[0], values(result, "depth 512", "B")[0]
    assert kept["fill_ttft_ms"] > 400 and kept["ttft_ms"] < 300 and refilled["ttft_ms"] > 400
    assert "A: 8" in text or "A: 9" in text  # per cent from the cache
    assert "B: 0% of the prefix came from the cache; the prefix was not reused" in text


def test_every_stream_and_round_has_a_prompt_of_its_own(run, serve, monkeypatch):
    seen = {}
    a, b = serve(), serve()
    for server in (a, b):
        original = server.engine.find_cached
        seen[server] = []

        def find(ids, original=original, seen=seen[server]):
            seen.append(tuple(ids))
            return original(ids)

        monkeypatch.setattr(server.engine, "find_cached", find)
    code, *_ = run(*urls(a, b), "--change", "nothing", "--only", "concurrency", "--rounds", "2")
    assert code == compare.COMPARED
    assert len(seen[a]) == len(set(seen[a])) > 20
    assert sorted(seen[a]) == sorted(seen[b])  # and both sides get the same ones


def test_speculation_is_run_off_and_on_with_acceptance_and_verifier_steps(run):
    a, b = free_port(), free_port()
    code, result, text, _ = run(
        *("--a-cmd", command(a, "--step", "0.016")),
        *("--b-cmd", command(b, "--step", "0.008")),
        *("--change", "nothing", "--only", "single", "--spec", "--accept-length 3", "--both-at-once"),
    )
    assert code == compare.COMPARED
    assert [variant["name"] for variant in result["variants"]] == [
        "without speculation",
        "with speculation: --accept-length 3",
    ]
    plain, drafted = values(result, "single", "A")[0], values(result, "single", "A", 1)[0]
    assert "acceptance_length" not in plain and drafted["acceptance_length"] == 3
    assert drafted["verifier_steps_s"] == pytest.approx(drafted["stream_tok_s"] / 3)
    assert drafted["stream_tok_s"] > 1.5 * plain["stream_tok_s"]
    assert "| acceptance_length, tokens | 3 | 3 |" in text


def test_an_older_bench_serving_takes_the_acceptance_from_the_server(run, serve, sglang_path, monkeypatch):
    code, result, text, _ = run(*urls(serve(), serve(accept_length=2)), "--change", "nothing", "--only", "single")
    assert code == compare.REFUSED  # speculation on one side is a difference of flags
    monkeypatch.setenv("PYTHONPATH", sglang_path("0.5.12"))
    sides = urls(serve(accept_length=2), serve(accept_length=2))
    code, result, text, _ = run(*sides, "--change", "nothing", "--only", "single")
    assert code == compare.COMPARED and values(result, "single", "A")[0]["acceptance_length"] == 2


def test_commands_take_turns_when_there_is_room_for_one(run, capsys):
    port = free_port()  # the same one: B can only start when A has stopped
    sides = ["--a-cmd", command(port), "--b-cmd", command(port), "--change", "nothing", "--only", "single"]
    code, result, _, _ = run(*sides, "--rounds", "2")
    assert code == compare.COMPARED
    told = [line.split(",")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert told == ["round 1 A", "round 1 B", "round 2 B", "round 2 A"]
    assert len(result["variants"][0]["sides"]["A"]["startup_s"]) == 2


def test_two_releases_are_compared_though_each_has_arguments_of_its_own(run, serve):
    """Two servers of two releases, with what those tell of themselves; the generator is of one of them."""
    sides = urls(serve(version="0.5.17"), serve(version="0.5.23"))
    code, result, text, _ = run(*sides, "--change", "version", "--only", "single")
    assert code == compare.COMPARED, text
    told = [set(result["variants"][0]["sides"][side]["identity"]["flags"]) for side in "AB"]
    assert told[1] - told[0] == {"frontend", "hicache_object_layout"}


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"version": "0.5.20"}, "SGLang differs: A 0.5.23, B 0.5.20"),
        ({"flags": {"tp_size": 4}}, "server argument tp_size differs: A 2, B 4"),
        ({"model": "fake/other"}, "the model differs: A fake/model, B fake/other"),
    ],
)
def test_a_comparison_of_more_than_the_intended_change_is_refused(run, serve, option, reason):
    code, result, text, page = run(
        *urls(serve(), serve(**option)), "--change", "flag:attention_backend", "--only", "single"
    )
    assert code == compare.REFUSED
    assert reason in text and "No comparison" in text and "No comparison" in page
    assert "tok/s" not in text and "tok/s" not in page
    assert "the intended change flag:attention_backend is not there" in text
    assert result["variants"][0]["cells"] == []  # found out before anything was measured


def test_the_intended_change_alone_is_compared(run, serve):
    sides = urls(serve(), serve(flags={"attention_backend": "other"}))
    assert run(*sides, "--change", "flag:attention_backend", "--only", "single")[0] == compare.COMPARED


def test_an_environment_variable_of_one_side_is_a_difference(run):
    sides = ["--a-cmd", command(free_port()), "--b-cmd", f"SGLANG_TEST_SWITCH=1 {command(free_port())}"]
    rest = ["--only", "single", "--both-at-once"]
    code, _, text, _ = run(*sides, "--change", "nothing", *rest)
    assert code == compare.REFUSED
    assert "environment variable SGLANG_TEST_SWITCH differs: A None, B '1'" in text
    assert run(*sides, "--change", "env:SGLANG_TEST_SWITCH", *rest)[0] == compare.COMPARED


def test_a_server_that_dies_leaves_a_marked_partial_result(run):
    sides = ["--a-cmd", command(free_port()), "--b-cmd", command(free_port(), "--fault die_mid_stream --die-after 7")]
    code, result, text, _ = run(*sides, "--change", "nothing", "--both-at-once", "--only", "single,concurrency")
    assert code == compare.INCOMPLETE
    assert values(result, "single", "A")[0]["stream_tok_s"] > 0
    assert "INCOMPLETE" in text and "B: the server ended (exit code 9)" in text
    assert "| single | stream_tok_s" in text  # what was measured is shown
    assert re.search(r"concurrency 2 \| .*MEASURED .* B, round 1: \d+ of \d+ requests failed", text)


def test_a_server_that_hangs_is_a_failed_cell_not_a_wait_for_ever(run, serve):
    sides = urls(serve(), serve("hang"))
    code, result, text, _ = run(*sides, "--change", "nothing", "--only", "single", "--cell-timeout", "1")
    assert code == compare.INCOMPLETE
    assert "no result within 1 s" in text
    assert values(result, "single", "A")[0]["stream_tok_s"] > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("error_500", "requests failed"),
        ("short_answers", "shorter than the 16 tokens asked for"),
        ("no_text", "a request gave no token"),
    ],
)
def test_answers_that_are_no_measurement_are_not_counted(run, serve, fault, reason):
    code, result, text, _ = run(*urls(serve(), serve(fault)), "--change", "nothing", "--only", "single")
    assert code == compare.INCOMPLETE
    assert reason in text and values(result, "single", "B") == [{}]


def test_unique_prompts_that_hit_the_cache_are_not_prefill(run, serve):
    sides = urls(serve(step_s=0.004), serve("cached_everything", step_s=0.004))
    code, _, text, _ = run(*sides, "--change", "nothing", "--only", "intrusion")
    assert code == compare.INCOMPLETE
    assert "unique prompts were partly in the prefix cache" in text


def test_a_server_without_tokenizer_is_said_and_random_prompts_are_the_way_out(run, serve):
    sides = urls(serve("no_tokenizer"), serve("no_tokenizer"))
    code, _, text, _ = run(*sides, "--change", "nothing", "--only", "single")
    assert code == compare.INCOMPLETE and "no tokenizer" in text and "--prompts random" in text
    assert run(*sides, "--change", "nothing", "--only", "single", "--prompts", "random")[0] == compare.COMPARED


def test_a_server_without_server_info_is_told_as_unknown(run, serve):
    code, _, text, _ = run(
        *urls(serve("no_server_info"), serve("no_server_info")), "--change", "nothing", "--only", "single"
    )
    assert code == compare.COMPARED
    assert "not known: flags and version" in text and "not known: patch status" in text


def test_another_engine_is_measured_and_what_it_does_not_tell_stays_unknown(run, serve):
    faults = "vllm_routes", "no_server_info"
    code, result, text, _ = run(
        *urls(serve(*faults, step_s=0.012), serve(*faults, step_s=0.002)),
        *("--a-backend", "vllm", "--b-backend", "vllm", "--change", "nothing", "--only", "single,depth"),
    )
    assert code == compare.COMPARED
    assert values(result, "depth 512", "B")[0]["stream_tok_s"] > values(result, "depth 512", "A")[0]["stream_tok_s"]
    assert text.count("cache hits are not known") == 2 and "not reused" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--change", "nothing"], "side A needs --a-cmd or --a-url"),
        (["--a-url", "http://h:1", "--b-url", "http://h:2"], "name the intended change"),
        (["--a-url", "http://h:1", "--b-url", "http://h:2", "--change", "speed"], "--change must be"),
        (["--a-url", "http://h:1", "--b-url", "http://h:1", "--change", "patch"], "the same address"),
        (["--a-url", "http://h:1", "--b-cmd", "x", "--change", "patch"], "one side is a command"),
        (["--a-url", "http://h:1", "--b-url", "http://h:2", "--change", "patch", "--only", "nosuch"], "no cell"),
        (["--a-url", "http://h:1", "--b-url", "http://h:2", "--change", "patch", "--spec", "--x y"], "--spec needs"),
        (["--a-url", "http://h:1", "--b-url", "http://h:2", "--change", "patch", "--rounds", "0"], "--rounds"),
        (["--a-url", "https://h:1", "--b-url", "http://h:2", "--change", "patch"], "http://host:port"),
        *(
            (["--a-url", "http://h:1", "--b-url", "http://h:2", "--change", "patch", *words], message)
            for words, message in (
                (["--rounds", "99999999"], "--rounds must be"),
                (["--cell-timeout", "0"], "--cell-timeout must be above 0"),
                (["--cell-timeout", "-1"], "--cell-timeout must be above 0"),
                (["--start-timeout", "nan"], "--start-timeout must be above 0"),
                (["--limit-s", "inf"], "--limit-s must be above 0"),
                (["--a-pid", "0"], "--a-pid: there is no process 0"),
                (["--b-pid", "999999999"], "--b-pid: there is no process"),
                (["--a-report", "/nowhere"], "--a-report: there is no folder /nowhere"),
                (["--python", "/nowhere"], "--python: there is no program"),
                (["--only", ""], "nothing is given for --only"),
                (["--only", "single,nosuch"], r"no cell of the matrix 'smoke' has \['nosuch'\] in its name: single"),
                (["--change", "flag:"], "--change must be"),
                (["--a-url", "http://127.0.0.1:1", "--b-url", "http://localhost:1"], "the same address"),
                (["--a-url", "http://h ost:1"], "holds no spaces"),
                (["--spec", ""], "nothing is given for --spec"),
                (["--a-label", " "], "nothing is given for --a-label"),
                (["--api-key", ""], "nothing is given for --api-key"),
                (["--a-url", ""], "nothing is given for --a-url"),
                (["--a-url", "http://h:99999"], "Port out of range|address"),
                (["--change", ""], "--change must be"),
                (["--out", "/dev/null/x"], "--out: /dev/null/x cannot be written to"),
                (["--out", "/proc"], "--out: /proc cannot be written to"),
            )
        ),
        (["--a-cmd", "", "--b-cmd", "x", "--change", "patch"], "nothing is given for --a-cmd"),
        (["--a-cmd", "x --port 99999", "--b-cmd", "x", "--change", "patch"], "--a-cmd: --port must be 1 to 65535"),
    ],
)
def test_wrong_usage_is_said_before_anything_starts(run, capsys, arguments, message):
    assert run(*arguments)[0] == compare.USAGE
    assert re.search(message, capsys.readouterr().err)


def test_a_wrong_model_name_names_those_that_are_served(run, serve):
    code, _, text, _ = run(*urls(serve(), serve()), "--change", "nothing", "--model", "nosuch", "--only", "single")
    assert code == compare.INCOMPLETE
    assert "serves ['fake/model'], not 'nosuch'" in text


def test_a_command_that_fails_at_once_shows_the_end_of_its_log(run):
    sides = ["--a-cmd", "echo no such device; exit 7", "--b-cmd", command(free_port()), "--a-url", "http://127.0.0.1:9"]
    code, _, text, _ = run(*sides, "--change", "nothing", "--only", "single")
    assert code == compare.INCOMPLETE
    assert "the server ended (exit code 7); its log ends: no such device" in text


@pytest.mark.parametrize("where", ["run", "start"])
def test_an_interrupted_session_begins_nothing_more(run, monkeypatch, where, capsys):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"bench.serving.generator_process.Generator.{where}", interrupted)
    sides = ["--a-cmd", command(free_port()), "--b-cmd", command(free_port()), "--spec", "--accept-length 3"]
    code, result, text, _ = run(*sides, "--change", "nothing", "--only", "single")
    assert code == compare.INCOMPLETE
    if where == "start":  # before there was anything
        return
    assert [variant["incomplete"] for variant in result["variants"]] == [["interrupted"]]
    assert "interrupted: 'with speculation: --accept-length 3' was not begun" in text


def test_what_ends_compare_ends_its_servers(run, monkeypatch):
    def ended(*_arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("bench.serving.generator_process.Generator.run", ended)
    ports = free_port(), free_port()
    sides = ["--a-cmd", command(ports[0]), "--b-cmd", command(ports[1]), "--both-at-once"]
    code, result, text, _ = run(*sides, "--change", "nothing", "--only", "single")
    assert code == compare.INCOMPLETE and "- interrupted" in text
    assert result["variants"][0]["incomplete"] == ["interrupted"]
    assert signal.getsignal(signal.SIGTERM) is before
    for port in ports:
        with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_result_says_that_it_was_cut_off_until_it_ends(run, serve, monkeypatch, tmp_path, capsys):
    write = compare.write
    copies = tmp_path / "copies"
    copies.mkdir()

    def kept(result, folder):
        write(result, folder)
        (copies / f"{len(list(copies.iterdir()))}.json").write_text((folder / "result.json").read_text())

    monkeypatch.setattr(compare, "write", kept)
    code, result, *_ = run(*urls(serve(), serve()), "--change", "nothing", "--only", "single,prefill")
    assert code == compare.COMPARED and result["variants"][0]["incomplete"] == []
    *cut, whole = [copies / f"{i}.json" for i in range(len(list(copies.iterdir())))]
    assert len(cut) == 5  # at the start, and behind both sides' cells
    assert compare.main(["--from", str(whole)]) == compare.COMPARED
    told = []
    for path in cut:
        capsys.readouterr()
        assert compare.main(["--from", str(path)]) == compare.INCOMPLETE
        told.append(capsys.readouterr().out)
    assert all("INCOMPLETE, see below" in text and session.UNENDED in text for text in told)
    assert "| prefill 256 | NOT MEASURED |  |  |  | A: not begun |" in told[1]
    assert "| prefill 256 | PARTLY MEASURED |  |  |  | B: not begun |" in told[3]
    assert ": not begun" not in told[0]
    assert ": not begun" not in told[4]


def test_answers_that_end_early_are_told(run, serve):
    """Where the model may end its answer, half an answer is no failure: it must be seen beside the rates."""
    sides = [*urls(serve(), serve("short_answers")), "--change", "nothing", "--only", "single", "--natural-end"]
    code, _, text, page = run(*sides)
    assert code == compare.COMPARED
    for shown in (text, page):
        assert "single: the answers of A have 16 tokens, those of B 8 (medians)" in shown
    assert "Answers of different length" not in run(*urls(serve(), serve()), *sides[-5:])[2]


def test_servers_that_want_a_key_say_how_to_give_it(run, serve, monkeypatch):
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    sides = urls(serve(api_key="s3cret"), serve(api_key="s3cret"))
    code, _, text, _ = run(*sides, "--change", "nothing", "--only", "single")
    assert code == compare.INCOMPLETE and "Give the servers' key: SGLANG_API_KEY in the environment" in text


def test_an_earlier_result_is_set_aside(run, serve, tmp_path, capsys):
    sides = [*urls(serve(), serve()), "--change", "nothing", "--only", "single"]
    assert run(*sides)[0] == compare.COMPARED
    first = (tmp_path / "out/result.json").read_text()
    gone = ["--a-url", "http://127.0.0.1:1", "--b-url", "http://127.0.0.1:2", "--change", "nothing"]
    assert run(*gone)[0] == run(*gone)[0] == compare.INCOMPLETE
    assert (tmp_path / "out/result.json.old").read_text() == first and (tmp_path / "out/result.json.old2").exists()
    assert "of an earlier run is kept as" in capsys.readouterr().err


def test_rounds_that_would_pass_the_limit_are_not_begun(run, serve):
    sides = urls(serve(step_s=0.01), serve(step_s=0.01))
    code, result, text, _ = run(*sides, "--change", "nothing", "--only", "single", "--rounds", "9", "--limit-s", "2")
    done = len(values(result, "single", "A"))
    assert code == compare.INCOMPLETE and 1 <= done < 9 and len(values(result, "single", "B")) == done
    assert f"{done} of 9 rounds: another one would pass the limit of 2 s" in text


def test_reports_are_made_again_from_the_result(run, serve, tmp_path, monkeypatch):
    code, result, text, page = run(*urls(serve(), serve()), "--change", "nothing", "--only", "single")
    for name in ("report.md", "report.html"):
        (tmp_path / "out" / name).unlink()
    assert compare.main(["--from", str(tmp_path / "out/result.json")]) == code
    assert (tmp_path / "out/report.md").read_text() == text
    monkeypatch.setattr(plots, "problem", lambda: plots.NO_MATPLOTLIB)
    assert compare.main(["--from", str(tmp_path / "out/result.json")]) == code
    assert "matplotlib is not installed" in (tmp_path / "out/report.html").read_text()
    (tmp_path / "other.json").write_text("{}")
    assert compare.main(["--from", str(tmp_path / "other.json")]) == compare.USAGE


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("machine"),
        lambda found: found["machine"].update(gpus=3),
        lambda found: found.update(variants=[1]),
        lambda found: found["variants"][0].pop("sides"),
        lambda found: found["variants"][0]["sides"].update(A=[]),
        lambda found: found["variants"][0]["cells"].append({"cell": {"kind": "x", "name": "y"}, "runs": {}}),
        lambda found: found.update(format="serving-comparison 0"),
    ],
)
def test_a_result_of_any_shape_is_one_sentence(tmp_path, capsys, change):
    found = json.loads((DATA / "serving_h200.json").read_text())
    change(found)
    (tmp_path / "result.json").write_text(json.dumps(found))
    assert compare.main(["--from", str(tmp_path / "result.json")]) == compare.USAGE
    assert "result.json is " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("path", ["", "/nowhere", "/dev/null", "/"])
def test_a_result_that_is_no_file_is_one_sentence(path, capsys):
    assert compare.main(["--from", path]) == compare.USAGE
    assert "--from: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("x", 30000),
        ("x --port 4000", 4000),
        ("x --port=4000", 4000),
        ("x --port '4000'", 4000),
        ("x '--port' \"4000\" -y", 4000),
        ("x --port 1 --port 2", 2),
    ],
)
def test_the_port_of_a_command(command, port):
    assert compare.port_of(command) == port


def test_the_full_matrix_is_the_issues():
    names = {cell.name for cell in cells.full()}
    assert {f"concurrency {n}" for n in (1, 4, 8, 16, 32)} <= names
    assert {f"depth {n}K" for n in (8, 32, 64, 128, 256, 512)} <= names
    assert {"single", "intrusion 64K into 8", "prefill 128K"} <= names
    assert all(measures.HEADLINES[cell.kind] for cell in cells.full())
    chosen, left_out = cells.select("full", None, 300_000)
    assert "depth 512K" not in {cell.name for cell in chosen} and "depth 512K" in left_out[0]


def test_the_commands_of_the_docs_are_taken(tmp_path, monkeypatch):
    """Those of docs/gates.md, with the shell's variables put in; the flags are ones that SGLang's servers tell of."""
    monkeypatch.chdir(tmp_path)
    page = (Path(compare.__file__).resolve().parents[2] / "docs/gates.md").read_text()
    seen = []
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        text = block.replace("\\\n", " ").replace("$PWD", str(tmp_path))
        server = re.search(r'^server="(.*)"$', text, re.MULTILINE)
        for line in text.replace("$server", server[1] if server else "").splitlines():
            if line.startswith("python3 bench/serving/compare.py"):
                options = compare.parser().parse_args(shlex.split(line)[2:])
                compare.check(options)
                seen.append((options.change, options.spec, options.a_cmd, options.b_cmd))
    flags = [f"flag:speculative_num_{name}" for name in ("steps", "draft_tokens")]
    assert [change for change, *_ in seen] == [["patch"], flags, ["patch"]]
    (*_, one, two), (_, spec, off, on) = seen[1:]
    rows = [re.findall(r"--speculative-num-(?:steps|draft-tokens) (\d)", command) for command in (one, two, spec)]
    assert rows == [["1", "2"], ["2", "3"], ["3", "4"]] and "EAGLE" in one and "EAGLE" in two
    assert off == f"DSV4_SM120_SET=draft_chain=off {on}" and "speculative" not in on
