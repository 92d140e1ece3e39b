"""`layers`, over a finished record and over a server: 0 for an engine that computes the model, 1 or 2 for every record
that is another one, and never 0 for half of one."""

import http.server
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import made  # noqa: E402

from deepseek_v4_sm120 import __main__ as program  # noqa: E402
from deepseek_v4_sm120.commands.layers import asking, checkpoint, command  # noqa: E402
from deepseek_v4_sm120.commands.layers import judge as judging  # noqa: E402
from deepseek_v4_sm120.reference.model import Rules  # noqa: E402

torch.set_num_threads(1)
NAME = "1x2"
FACTS = {"speculative_algorithm": None, "left_out": {}, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def few_faults(monkeypatch):
    """Each costs a computation of the model."""
    monkeypatch.setattr(judging, "ATTENTION", {"no sink": Rules(sink=False)})
    monkeypatch.setattr(judging, "OF_RATIO", {ratio: {} for ratio in (0, 4, 128)})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return made.write(folder)


@pytest.fixture(scope="module")
def passes(model):
    return made.batch(model)


def write(folder, passes, requests=None, facts=FACTS, name=NAME):
    """A finished record."""
    place = folder / name
    place.mkdir(parents=True)
    for number, one in enumerate(passes):
        torch.save(one, place / f"{number:05d}.pt")
    (place / asking.FACTS).write_text(json.dumps(facts))
    requests = made.requests(made.BATCH) if requests is None else requests
    (place / asking.SENT).write_text(json.dumps({"id": NAME, "model": None, "requests": requests}))
    return place


def status_of(place, model, *words, capsys=None):
    status = program.main(["layers", "--record", str(place), "--model", str(model.folder), "--rows", "8", *words])
    return status, "" if capsys is None else capsys.readouterr().out


def test_a_right_engine_ends_in_0(model, passes, tmp_path, capsys):
    place = write(tmp_path, passes)
    status, said = status_of(place, model, capsys=capsys)
    assert status == 0 and "\nRIGHT" in said and "attention, ratio 128" in said and "no sink" in said
    assert "2 of 2 heads, " in said and "not asked: positions from 33 on" in said
    assert place.exists()
    status, said = status_of(place, model, "--json", capsys=capsys)
    found = json.loads(said)
    assert status == 0 and found["faults"] == [] and len(found["groups"]) == 2 * 6
    status, said = status_of(place, model, "--limit-s", "0", capsys=capsys)
    assert status == 2 and "NOT JUDGED" in said and "above --limit-s" in said


def changed(one, **others):
    return {**one, **others}


def at(passes, number, change):
    """The passes, one of them changed."""
    return [change(one) if i == number else one for i, one in enumerate(passes)]


def every_y(change, out=True):
    """Of a pass, all inputs changed, and what is behind the last layer."""
    return lambda one: changed(one, y=[change(y) for y in one["y"]], out=change(one["out"]) if out else one["out"])


def one_y(number, change):
    return lambda one: changed(one, y=[change(y) if i == number else y for i, y in enumerate(one["y"])])


def behind_first(one):
    return changed(one, y=[*one["y"][:2], *map(torch.zeros_like, one["y"][2:])])


def layers_swapped(one):
    return changed(one, y=[*one["y"][:2], *one["y"][4:], *one["y"][2:4]])


def nan(y):
    return torch.full_like(y, torch.nan)


def nan_in_one(y):
    return y.index_fill(0, torch.tensor(2), torch.nan)


def swapped(y):
    return y.flip(0)


def another_requests(one):
    """The second's rows are the first's, which its tokens are not."""
    first, second = one["lengths"].tolist()

    def change(y):
        return torch.cat([y[:first], y[:second]])

    return every_y(change)(one)


def layer_twice(one):
    return changed(one, y=[*one["y"][:2], *one["y"][:2], *one["y"][4:]])


def nan_behind(one):
    """In a row of a prompt of which nothing else is read."""
    return changed(one, out=nan_in_one(one["out"]), y=[*one["y"][:-1], nan_in_one(one["y"][-1])])


def swapped_tokens(one):
    return changed(every_y(swapped)(one), tokens=one["tokens"].flip(0))


# what is wrong -> (the passes, the exit status)
WRONG = {
    "all zeros": (lambda p: list(map(every_y(torch.zeros_like), p)), 2),
    "zeros behind the first layer": (lambda p: list(map(behind_first, p)), 1),
    "NaN in a decoded row": (lambda p: at(p, 1, every_y(nan)), 1),
    "NaN in an early row": (lambda p: at(p, 0, one_y(2, nan_in_one)), 1),
    "a layer is missing": (lambda p: [changed(one, y=one["y"][:-2]) for one in p], 2),
    "rows are missing": (lambda p: at(p, 1, every_y(lambda y: y[:1], out=False)), 2),
    "no pass": (lambda p: [], 2),
    "prompts alone": (lambda p: p[:1], 2),
    "no prompts": (lambda p: p[1:], 2),
    "the last token": (lambda p: p[:-1], 2),
    "rows swapped in a pass": (lambda p: at(p, 1, every_y(swapped)), 1),
    "tokens swapped, too": (lambda p: at(p, 1, swapped_tokens), 2),
    "attention's rows swapped in one layer": (lambda p: at(p, 1, one_y(2, swapped)), 1),
    "another request's rows": (lambda p: at(p, 0, another_requests), 1),
    "a layer twice": (lambda p: list(map(layer_twice, p)), 1),
    "NaN in a row that is not judged": (lambda p: at(p, 0, nan_behind), 1),
    "two layers swapped": (lambda p: list(map(layers_swapped, p)), 1),
    "tokens that are none": (lambda p: [changed(one, tokens=one["tokens"] + 100) for one in p], 2),
    "a step twice in place of the next": (lambda p: [p[0], p[1], p[1]], 2),
    "no tensors": (lambda p: at(p, 0, lambda one: changed(one, y=None)), 2),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_record_is_never_right(wrong, model, passes, tmp_path, capsys):
    change, expected = WRONG[wrong]
    status, said = status_of(write(tmp_path, change(passes)), model, capsys=capsys)
    assert status == expected, said
    assert ("FAULT" if expected == 1 else "NOT JUDGED") in said


def test_whose_rows_they_are_is_asked(model, passes, tmp_path, capsys):
    status, said = status_of(write(tmp_path, at(passes, 1, swapped_tokens)), model, capsys=capsys)
    assert status == 2 and "rows of another request, or of another run" in said


@pytest.mark.parametrize("wrong", [1, 2])
def test_answers_that_the_last_rows_do_not_say_are_a_fault(wrong, model, passes, tmp_path, capsys):
    """A head, or a choice, that is wrong behind layers that are right; of one request alone, too."""
    others = made.requests(made.BATCH)
    for one in others[:wrong]:
        one["output_ids"][-1] ^= 1
    status, said = status_of(write(tmp_path, passes, others), model, capsys=capsys)
    assert status == 1
    assert f"the answer's tokens, target, decode: {wrong} of 4 are not the greatest of their rows" in said


def test_a_planted_fault_ends_in_1(model, tmp_path, capsys):
    status, said = status_of(write(tmp_path, made.batch(model, Rules(routed_scale=1.0))), model, capsys=capsys)
    assert status == 1 and "\nFAULT" in said and ": no routed scale, " in said


@pytest.mark.parametrize("name, expected", [("model-02.safetensors", 1), ("model-top.safetensors", 2)])
def test_another_checkpoint_is_no_right_one(name, expected, model, passes, tmp_path, capsys):
    """One layer of it, or its embedding."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(model.folder, other)
    tensors = load_file(other / name)
    turned = {key: value.flip(0) for key, value in tensors.items() if not key.endswith(".scale")}
    save_file(tensors | turned, other / name)
    status, said = status_of(write(tmp_path, passes), checkpoint.Checkpoint(other), capsys=capsys)
    assert status == expected, said


def test_a_stale_record_is_told(model, passes, tmp_path, capsys):
    """What an earlier call left, beside another's requests."""
    status, said = status_of(write(tmp_path, passes, name="3x4"), model, capsys=capsys)
    assert status == 2 and "another record's" in said
    others = made.requests([(made.tokens(30, 5), made.tokens(3, 6)), made.BATCH[1]])
    status, said = status_of(write(tmp_path / "b", passes, others), model, capsys=capsys)
    assert status == 2 and "30 of 30 tokens of the prompt of request 0" in said
    status, said = status_of(write(tmp_path / "c", passes, []), model, capsys=capsys)
    assert status == 2


def test_what_fails_by_itself_is_no_fault(model, passes, tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(judging.model, "attended", fails)
    status, said = status_of(write(tmp_path, passes), model, capsys=capsys)
    assert status == 2 and "judging it failed" in said
    for number, strange in enumerate(([{"input_ids": "ab"}], [3], "x", {}, [{"input_ids": [1, None]}])):
        status, said = status_of(write(tmp_path / str(number), passes, strange), model, capsys=capsys)
        assert status == 2 and "no requests with their tokens" in said


def test_files_that_are_cut_off_or_missing(model, passes, tmp_path, capsys):
    place = write(tmp_path, passes)
    whole = (place / "00001.pt").read_bytes()
    (place / "00001.pt").write_bytes(whole[: len(whole) // 2])
    assert status_of(place, model)[0] == 2
    (place / "00001.pt").unlink()
    status, said = status_of(place, model, capsys=capsys)
    assert status == 2 and "lacks passes" in said
    (place / asking.SENT).unlink()
    assert status_of(place, model)[0] == 2


def test_speculation_wants_its_passes(model, passes, tmp_path, capsys):
    facts = FACTS | {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "left_out": {"graphs": 2}}
    status, said = status_of(write(tmp_path, passes, facts=facts), model, capsys=capsys)
    assert (
        status == 2
        and "target, target_verify and draft, extend" in said
        and "left out by the server: graphs (2)" in said
    )
    verified = [passes[0], *(changed(one, mode="TARGET_VERIFY") for one in passes[1:])]
    place = write(tmp_path / "b", verified, facts=facts)
    assert status_of(place, model)[0] == 2
    status, said = status_of(place, model, "--without-drafts", capsys=capsys)
    assert status == 0 and "drafts were not judged" in said
    facts = facts | {"speculative_algorithm": "DSPARK"}
    place = write(tmp_path / "c", verified, facts=facts)
    status, said = status_of(place, model, capsys=capsys)
    assert status == 2 and "nobody saw passes of the kind block, target_verify" in said
    assert status_of(place, model, "--without-drafts")[0] == 0


@pytest.mark.parametrize("given", [None, False, True])
def test_the_index_is_judged_as_the_server_has_it(given, model, passes, tmp_path, monkeypatch):
    facts = FACTS if given is None else FACTS | {"enable_deepseek_v4_fp4_indexer": given}
    made_, found = judging.Judge, []
    monkeypatch.setattr(judging, "Judge", lambda *args, **options: found.append(options) or made_(*args, **options))
    assert status_of(write(tmp_path, passes, facts=facts), model, "--limit-s", "0")[0] == 2
    assert [one["index_fp4"] for one in found] == [bool(given)]
    assert made_(made.CONFIG, model, index_fp4=True).config.index_fp4


class Server(http.server.ThreadingHTTPServer):
    """One that records what it answers, as an engine with this model computes it, while it is asked to."""

    def __init__(self, checkpoint, folder, records=True):
        super().__init__(("127.0.0.1", 0), Answers)
        self.engine, self.folder, self.records, self.slot, self.number = made.Engine(checkpoint), folder, records, 0, 0

    def answer(self, prompts, new):
        asked = json.loads((self.folder / asking.ASKED).read_text())
        place, found = self.folder / asked["id"], []
        if self.records and not place.exists():
            place.mkdir()
            (place / asking.FACTS).write_text(json.dumps(FACTS))
        for prompt in prompts:
            self.slot += 1
            passes, answer = self.engine.answered(self.slot, torch.tensor(prompt), new)
            for one in passes if self.records else ():
                torch.save(one, place / f"{self.number:05d}.pt")
                self.number += 1
            found.append({"output_ids": answer.tolist()})
        return found


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):  # noqa: N802 http.server's name
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.server.answer(told["input_ids"], told["sampling_params"]["max_new_tokens"])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def asks(server, model, folder, *words):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        return program.main(
            [*("layers", "--url", f"http://127.0.0.1:{server.server_port}", "--folder", str(folder), "--rows", "8")]
            + ["--model", str(model.folder), "--alone", "5", "12", "--together", "3", "9", "--new", "2", *words]
        )
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_is_asked_and_judged(model, tmp_path, capsys):
    status = asks(Server(model, tmp_path), model, tmp_path)
    said = capsys.readouterr()
    assert status == 0, said
    assert "The server records up to" in said.out and "minutes" in said.err
    assert list(tmp_path.iterdir()) == []  # nothing is left
    assert asks(Server(model, tmp_path), model, tmp_path, "--keep", "--alone", "5", "--together") == 0
    (place,) = tmp_path.iterdir()
    assert (place / asking.SENT).is_file()


def test_a_server_that_records_nothing_is_told(model, tmp_path, capsys):
    assert asks(Server(model, tmp_path, records=False), model, tmp_path) == 2
    assert "start it with DSV4_SM120_LAYERS=" in capsys.readouterr().err
    (tmp_path / asking.ASKED).write_text("{}")
    assert asks(Server(model, tmp_path), model, tmp_path) == 2
    assert "another `layers` records" in capsys.readouterr().err
    assert program.main(["layers"]) == 2
    assert program.main(["layers", "--url", "http://127.0.0.1:1"]) == 2


def test_threads_sleep_where_they_wait(tmp_path, monkeypatch):
    """Beside a server that needs the cores; torch reads it when it is loaded."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert program.main(["layers", "--record", str(tmp_path)]) == 2 and os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert program.main(["layers", "--record", str(tmp_path)]) == 2 and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_is_left_behind_an_interrupt(tmp_path):
    with pytest.raises(KeyboardInterrupt), asking.asked(tmp_path, 10, 100):
        assert json.loads((tmp_path / asking.ASKED).read_text())["rows"] == 10
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoints_files(model, tmp_path):
    from safetensors import safe_open

    for name in set(model._of.values()):
        with safe_open(model.folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                theirs, ours = file.get_tensor(key), model[key]
                assert ours.shape == theirs.shape and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert len(model) == len(list(model))
    for cut in (
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (model.folder / "model-top.safetensors").read_bytes()[:-9],
    ):
        folder = tmp_path / str(len(cut))
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(cut)
        with pytest.raises(command.CommandError):
            one = checkpoint.Checkpoint(folder)
            [one[name] for name in one]
