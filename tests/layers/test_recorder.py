"""The recorder writes what ran, in its order, graphs too, while it is asked to, and no more than it was asked for."""

import json
import os
import types

import pytest
import torch

from deepseek_v4_sm120.commands.layers import asking, record
from deepseek_v4_sm120.sglang_patches import layer_record
from deepseek_v4_sm120.sglang_patches.layer_record import Recorder

MUCH = 1 << 30


class Machine:
    """What the recorder asks of torch and SGLang: is a graph being captured, does SGLang warm one up, which rank."""

    def __init__(self, monkeypatch):
        self.capturing = self.warming = False
        self.rank = 0
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        model = types.SimpleNamespace(get_is_capture_mode=lambda: self.warming or self.capturing)
        state = types.SimpleNamespace(_TP=types.SimpleNamespace(rank_in_group=0))
        self.state = state._TP
        modules = {layer_record.MODEL: model, layer_record.PARALLEL_STATE: state}
        monkeypatch.setattr(layer_record.importlib, "import_module", modules.__getitem__)


class Engine:
    """SGLang's calls, with the recorder's functions around them."""

    def __init__(self, folder, layers=1):
        self.recorder, self.layers = Recorder(folder, serves=lambda device: True), layers
        replaced = layer_record.hooks_of(lambda: self.recorder)
        self.attention = replaced["attention"](lambda layer, x, positions: x)
        self.experts = replaced["experts"](lambda layer, hidden_states: hidden_states)
        self.model, self.draft = (replaced[name](self.forward) for name in ("model", "draft"))
        self.at = self.rows = 0
        self.between = replaced["runner"](lambda runner, batch: "output")
        arguments = types.SimpleNamespace(tp_size=2, model_path="m", speculative_algorithm=None)
        self.runner = types.SimpleNamespace(server_args=arguments)

    def forward(self, model, tokens, positions, batch):
        for layer in range(self.layers):
            self.attention(None, x=torch.full((self.rows, 4), float(self.at + layer)), positions=positions)
            self.experts(None, torch.full((self.rows, 4), self.at + layer + 0.5))
        return (torch.full((self.rows, 4), self.at + 0.75), None), None

    def run(self, mode, kind="target", at=0, rows=2):
        self.at, self.rows = at, rows
        spec = types.SimpleNamespace(hidden_states=torch.ones(rows, 16))
        batch = types.SimpleNamespace(forward_mode=types.SimpleNamespace(name=mode), spec_info=spec)
        batch.req_pool_indices, batch.extend_seq_lens = torch.tensor([3]), torch.tensor([rows])
        positions = torch.arange(at, at + rows)
        forward = self.model if kind == "target" else self.draft
        return forward(None, positions + 5, positions, batch)

    def look(self):
        assert self.between(self.runner, None) == "output"

    def capture(self, machine, *at):
        """Two runs of each pass, then their graphs: a capture runs nothing."""
        machine.warming = True
        for _ in range(2):
            for one in at:
                self.run("DECODE", at=one + 80, rows=1)
        machine.capturing = True
        for one in at:
            self.run("DECODE", at=one, rows=1)
        with torch.inference_mode():
            for one in (*(one["stamp"] for one in self.recorder.captured), self.recorder.count):
                one.zero_()
        self.look()  # one draft calls the next within a capture, where nothing may wait for the card
        machine.capturing = machine.warming = False

    def replay(self, number):
        with torch.inference_mode():
            self.recorder.count.add_(1)
            self.recorder.captured[number]["stamp"].copy_(self.recorder.count)


def ask(folder, rows=8, most=MUCH, name="a1"):
    (folder / asking.ASKED).write_text(json.dumps({"id": name, "rows": rows, "bytes": most}))


def read(folder, name="a1"):
    return list(record.read(folder / name))


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_what_ran_is_written_in_its_order(machine, tmp_path):
    engine = Engine(tmp_path)
    engine.capture(machine, 10, 20)
    spare = [(one["positions"], one["y"][0], one["out"]) for one in engine.recorder.captured]
    engine.run("EXTEND", at=50)  # nobody asks yet
    engine.replay(0)
    engine.look()
    assert not list(tmp_path.iterdir())
    ask(tmp_path)
    engine.look()
    engine.run("EXTEND", at=30)
    engine.replay(1)
    engine.run("DRAFT_EXTEND_V2", "draft", at=40)
    engine.look()
    engine.look()
    found = read(tmp_path)
    assert [(one["kind"], one["mode"], one["positions"].tolist()) for one in found] == [
        ("target", "EXTEND", [30, 31]),
        ("target", "DECODE", [20]),
        ("draft", "DRAFT_EXTEND_V2", [40, 41]),
    ]
    extend, _, draft = found
    assert extend["lengths"].tolist() == [2] and "lengths" not in draft and "hidden" in draft and "hidden" not in extend
    assert [float(y[0, 0]) for y in extend["y"]] == [30, 30.5] and float(extend["out"][0, 0]) == 30.75
    facts = record.facts_of(tmp_path / "a1")
    assert facts["tp_size"] == 2 and facts["left_out"] == {} and facts["pid"] == os.getpid()
    now = [(one["positions"], one["y"][0], one["out"]) for one in engine.recorder.captured]
    assert all(a is b for old, new in zip(spare, now, strict=True) for a, b in zip(old, new, strict=True))
    (tmp_path / asking.ASKED).unlink()  # the end
    engine.look()
    engine.run("EXTEND", at=60)
    engine.replay(0)
    engine.look()
    assert len(read(tmp_path)) == 3
    ask(tmp_path, name="b2")  # what ran between is none of the next record's
    engine.look()
    engine.replay(1)
    engine.look()
    assert [one["positions"].tolist() for one in read(tmp_path, "b2")] == [[20]]


def test_a_captured_pass_has_tensors_that_stay(machine, tmp_path):
    """Those of the run in front of the capture: what a graph allocates is others' scratch."""
    engine = Engine(tmp_path)
    machine.warming = True
    engine.run("DECODE", at=90, rows=1)
    (spare,) = engine.recorder.spare
    before = spare["y"][0]
    machine.capturing = True
    engine.run("DECODE", at=10, rows=1)
    assert engine.recorder.captured[0]["y"][0] is before and float(before[0, 0]) == 10
    engine.run("DECODE", at=11, rows=1)
    assert engine.recorder.left_out == {"graphs that were not run before they were captured": 1}


def test_what_is_too_much_is_left_out_and_told(machine, tmp_path, monkeypatch):
    engine = Engine(tmp_path)
    machine.warming = True
    engine.run("EXTEND", rows=2)
    engine.run("DECODE", rows=layer_record.GRAPH_ROWS + 1)
    monkeypatch.setattr(layer_record, "GRAPH_BYTES", 0)
    engine.run("DECODE", rows=1)
    engine.run("DECODE", rows=1)
    assert len(engine.recorder.spare) == 1 and engine.recorder.graph_bytes == 3 * 16
    machine.warming = False
    ask(tmp_path, rows=2, most=100)
    engine.look()
    for rows in (3, 2, 2, 2):
        engine.run("EXTEND", rows=rows)
        engine.look()
    assert len(read(tmp_path)) == 1
    told = record.facts_of(tmp_path / "a1")["left_out"]
    assert sorted(told.values()) == [1, 1, 1, 1, 2] and sum("graphs" in why for why in told) == 3
    assert told["passes of more rows than were asked for"] == 1


def test_who_records(machine, tmp_path):
    """The first rank, of a device that is served; of two servers with one folder the first. No rows are no pass."""
    engine, other = Engine(tmp_path), Engine(tmp_path)
    ask(tmp_path)
    engine.look()
    other.look()
    for one in (engine, other):
        one.run("EXTEND", at=10)
        one.run("EXTEND", rows=0)
        one.look()
    assert len(read(tmp_path)) == 1 and not other.recorder.is_mine
    machine.state.rank_in_group = 1
    engine.run("EXTEND", at=20)
    engine.look()
    machine.state.rank_in_group = 0
    engine.recorder.serves = lambda device: False
    engine.run("EXTEND", at=30)
    engine.look()
    assert len(read(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "../up", "rows": 8, "bytes": 9}', '{"id": "a1", "rows": "8"}'])
def test_what_else_lies_there_asks_for_nothing(text, machine, tmp_path):
    engine = Engine(tmp_path)
    (tmp_path / asking.ASKED).write_text(text)
    engine.look()
    assert engine.recorder.asked is None and [path.name for path in tmp_path.iterdir()] == [asking.ASKED]


def test_a_disk_that_is_full_stops_no_server(machine, tmp_path, monkeypatch):
    engine = Engine(tmp_path)
    ask(tmp_path)
    engine.look()

    def full(*_):
        raise RuntimeError("unexpected pos")

    monkeypatch.setattr(layer_record.torch, "save", full)
    for _ in range(2):
        engine.run("EXTEND")
        engine.look()
    assert not engine.recorder.is_mine and read(tmp_path) == []


def test_names_are_alike():
    """Of files that one side writes and the other reads."""
    assert (layer_record.ASKED, layer_record.FACTS, record.SENT) == (asking.ASKED, asking.FACTS, asking.SENT)
