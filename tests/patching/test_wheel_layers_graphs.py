"""Each release's own way to capture a graph, on the CPU, around the recorder: what it runs before it captures it is
where the captured pass is kept, and a replay is written."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.layers import asking, record
from deepseek_v4_sm120.sglang_patches import layer_record
from deepseek_v4_sm120.sglang_patches.names import MODEL, PARALLEL_STATE
from tests.patching.test_wheel_layers import ASKED, FIRST, batch_of
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release

MODULE = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"


class Machine:
    """Of the host: what SGLang's capture asks of it, and what a graph's replay does of what was captured."""

    def __init__(self, monkeypatch):
        self.capturing = self.in_capture = False
        self.barrier = self.synchronize = lambda: None
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        modules = {
            MODEL: SimpleNamespace(get_is_capture_mode=lambda: self.in_capture),
            PARALLEL_STATE: SimpleNamespace(_TP=SimpleNamespace(rank_in_group=0)),
        }
        monkeypatch.setattr(layer_record, "importlib", SimpleNamespace(import_module=modules.__getitem__))

    @contextlib.contextmanager
    def graph(self, **_):
        self.capturing = True
        yield
        self.capturing = False


@every_release(FIRST)
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_pass_is_run_before_it_is_captured(version, kind, sglang_wheel, monkeypatch, tmp_path):
    machine = Machine(monkeypatch)
    recorder = layer_record.Recorder(tmp_path, serves=lambda device: True)
    replaced = layer_record.hooks_of(lambda: recorder)
    attention = replaced["attention"](lambda layer, x: x)
    ran, positions = [], torch.tensor([7])
    batch = batch_of("DECODE", spec_info=SimpleNamespace(hidden_states=torch.ones(1, 16)))

    def forward(model, tokens, positions, batch):
        ran.append(machine.capturing)
        attention(None, torch.full((1, 4), float(len(ran))))
        return torch.ones(1, 4)

    run = replaced["model" if kind == "target" else kind](forward)
    names = {"torch": SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=object))}
    names |= {"graph_pool_capture_scope": contextlib.nullcontext}
    capture = take(sglang_wheel(version), names, "FullCudaGraphBackend.capture_one", MODULE)
    precarve = SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None)
    backend = SimpleNamespace(
        **{"_device_module": machine, "_tp_group": machine, "_memory_saver_adapter": None, "_capture_stream": None},
        **{
            "_pool": None,
            "_graphs": {},
            "_outputs": {},
            "_cuda_graph_runner": SimpleNamespace(),
            "_precarve": precarve,
        },
        **{"_reuse_output_buffer": False, "_output_buffer": None},
    )
    machine.in_capture = True
    capture(backend, "key", lambda: run(None, torch.tensor([5]), positions, batch))
    machine.in_capture = False
    assert ran == [False, False, True] and len(recorder.captured) == 1 and not recorder.left_out
    (tmp_path / asking.ASKED).write_text(json.dumps(ASKED))
    recorder.look(SimpleNamespace())
    with torch.inference_mode():  # a replay
        recorder.count.add_(1)
        recorder.captured[0]["stamp"].copy_(recorder.count)
    recorder.look(SimpleNamespace())
    (one,) = record.read(tmp_path / "a1")
    assert one["kind"] == kind and one["positions"].tolist() == [7] and float(one["y"][0][0, 0]) == len(ran)
