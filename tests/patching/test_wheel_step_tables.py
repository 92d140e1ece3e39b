"""A step's tables by each release's own functions, with ours in their place and without: the same numbers and dtypes,
by fewer operators; and the passes of EAGLE's draft whose tables its graph makes."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import step_tables as ours
from deepseek_v4_sm120.sglang_patches.names import BACKEND
from tests.patching.test_wheel_sampling import opened  # noqa: F401
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

FIRST = "0.5.16"
EXPAND = "DeepseekV4AttnBackend.expand_extend_with_same_length"
IN_GRAPH = "DeepseekV4MultiStepBackend.init_forward_metadata_in_graph"
WHERE = SimpleNamespace(cuda_int32_kwargs={"dtype": torch.int32, "device": "cpu"})
VIEWS = ("view", "slice", "unsqueeze", "expand", "reshape", "detach", "alias", "empty")


class Launches(TorchDispatchMode):
    """The operators that a GPU would be given a kernel for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen += [] if any(view in name for view in VIEWS) else [name]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def served(monkeypatch):
    """served(whether a device is ours)"""
    monkeypatch.setattr(ours, "_before_the_last", {})
    return lambda serves=True: monkeypatch.setattr(device_gate, "serves", lambda device: serves)


def expanded(call, bs, rows, dtype):
    """(lengths and requests of each row, operators)"""
    lengths = torch.arange(5, 5 + 100 * bs, 100, dtype=dtype)
    requests = torch.arange(40, 40 + bs + 2, dtype=torch.int64).flip(0)  # a buffer of more requests
    with Launches() as counted:
        made = call(WHERE, bs=bs, qo_len=rows, seq_lens=lengths, req_pool_indices=requests)
    return made, counted.seen


@every_release(FIRST)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_rows_of_requests(version, dtype, served):
    served()
    original = take(fetch(version), {"torch": torch}, EXPAND, BACKEND)
    replaced = ours.replace_expand(original)
    for bs, rows in ((1, 4), (3, 4), (8, 2), (5, 1)):
        (lengths, requests), many = expanded(original, bs, rows, dtype)
        expanded(replaced, bs, rows, dtype)  # what is counted is made once
        (own_lengths, own_requests), few = expanded(replaced, bs, rows, dtype)
        assert torch.equal(own_lengths, lengths) and torch.equal(own_requests, requests)
        assert (own_lengths.dtype, own_requests.dtype) == (lengths.dtype, requests.dtype)
        assert own_lengths.is_contiguous() and own_requests.is_contiguous()
        assert len(few) == 2 and len(many) >= 5


def test_rows_are_nobody_elses_memory(served):
    """With one row a request, too: what SGLang writes to them later must not reach the lengths of requests."""
    served()
    lengths, requests = torch.tensor([7, 9]), torch.tensor([1, 2])
    made = ours.replace_expand(lambda *_: None)(WHERE, bs=2, qo_len=1, seq_lens=lengths, req_pool_indices=requests)
    for one in made:
        one.zero_()
    assert lengths.tolist() == [7, 9] and requests.tolist() == [1, 2]
    assert next(iter(ours._before_the_last.values())).tolist() == [0]


def test_what_a_capture_makes_is_not_kept(served, monkeypatch):
    served()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert ours._steps(torch.device("cuda", 0), 4) is None and not ours._before_the_last


@every_release(FIRST)
def test_padding(version, served):
    served()
    align = {"torch": torch, "F": torch.nn.functional, "PAGE_INDEX_ALIGNED_SIZE": 64}
    align["ceil_align"] = lambda x, to: -(-x // to) * to
    original = take(fetch(version), align, "_pad_last_dim", BACKEND)
    replaced = ours.replace_pad_last_dim(original)
    table = torch.arange(6 * 200, dtype=torch.int32).view(6, 200)
    for x in (table, table[:, :128].contiguous(), table[:, :128], table[:0, :192].contiguous(), table[:, :1]):
        found, expected = replaced(x), original(x)
        assert torch.equal(found, expected) and found.dtype == expected.dtype and found.stride() == expected.stride()
        assert (found is x) == (x.shape[1] % 64 == 0 and x.is_contiguous())
    assert replaced(None) is None and torch.equal(replaced(table, multiples_of=8), table)
    assert torch.equal(replaced(table, 7), original(table, 7))


def test_another_card_is_sglangs(served):
    served(False)
    table = torch.zeros(2, 128)
    assert ours.replace_pad_last_dim(lambda x: "SGLang's")(table) == "SGLang's"
    told = ours.replace_expand(lambda self, *, bs, qo_len, seq_lens, req_pool_indices: (bs, qo_len))
    assert told(WHERE, bs=2, qo_len=3, seq_lens=table, req_pool_indices=table) == (2, 3)


def passes(version, steps):
    """(a backend of so many drafts, the passes whose tables it makes, by SGLang and by ours)"""
    told = []

    class Pass:
        def __init__(self, number):
            self.number = number

        def init_forward_metadata_in_graph(self, batch):
            told.append((self.number, batch))

    backend = SimpleNamespace(speculative_num_steps=steps, attn_backends=[Pass(i) for i in range(steps)])
    original = take(fetch(version), {"torch": torch}, IN_GRAPH, BACKEND)
    return backend, told, original, ours.replace_metadata_in_graph(original)


@every_release(FIRST)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_graph_makes_the_tables_of_its_own_passes(version, steps, opened):  # noqa: F811
    opened("deepseek_v4")
    backend, told, original, replaced = passes(version, steps)
    every = backend.attn_backends
    original(backend, "batch")
    assert told == [(i, "batch") for i in range(steps)]
    told.clear()
    replaced(backend, "batch")
    assert told == [(i, "batch") for i in range(steps - 1)] and backend.attn_backends is every


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_all_passes_are_told(model, card, opened):  # noqa: F811
    opened(model, card)
    backend, told, _, replaced = passes("0.5.23", 3)
    replaced(backend, "batch")
    assert len(told) == 3


def test_all_backends_are_back_where_a_pass_fails(opened):  # noqa: F811
    opened("deepseek_v4")
    backend, _, _, _ = passes("0.5.23", 3)
    every = backend.attn_backends
    with pytest.raises(ZeroDivisionError):
        ours.replace_metadata_in_graph(lambda self, batch: 1 / 0)(backend, "batch")
    assert backend.attn_backends is every
