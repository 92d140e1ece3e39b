"""Sums in pieces with SGLang's own code around them, taken out of the wheels and run on the CPU: two layers of each
release, and its coordinator, which says who would sum. What the adapter relies on of wo_b is read."""

import ast
import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import mhc as boundary
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum_in_parts as by_columns
from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum_in_pieces as adapter
from deepseek_v4_sm120.sglang_patches.names import MODEL
from tests.adapters.test_mhc_sum import HIDDEN
from tests.adapters.test_mhc_sum_in_pieces import Coordinator, groups, settle, works  # noqa: F401
from tests.patching import test_wheel_all_reduce as coordinators
from tests.patching import test_wheel_mhc_sum as layers
from tests.patching.test_wheel_wo_a import definition
from tests.patching.wheels import every_release, since, tree

FIRST, BY_BOUNDARIES, ROWS = "0.5.13", "0.5.23", 9
LINEAR, MOE_LAYER = "sglang.srt.layers.linear", "sglang.srt.layers.moe.fused_moe_triton.layer"
QUIET = layers.QUIET
MOE = {
    "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
    **dict.fromkeys(("get_tp_group", "is_allocation_symmetric"), lambda: None),
}


def mhc(f, streams, post, comb, *weights, ready=None, held_sms=0, **options):
    """ops.mhc: each piece as it is behind its wait."""
    parts = f if isinstance(f, tuple) else (f,)
    seen.append(len(parts))
    for number, _ in enumerate(parts if ready is not None else ()):
        ready(number)
    rows = [boundary.op.joined(part) if part.ndim == 3 else part for part in parts]
    return layers.mhc(torch.cat(rows), streams, post, comb)


seen: list[int] = []  # pieces of what each boundary was given


@pytest.fixture
def group(monkeypatch, works):  # noqa: F811
    settle(monkeypatch)
    monkeypatch.setattr(boundary.op, "mhc", mhc)
    monkeypatch.setattr(boundary.op, "mhc_post", layers.post_of)
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(layers.terms.linear_op, "splits_of", lambda *sizes: 1)  # as of rows that come in pieces
    seen.clear()
    return groups(monkeypatch)


@pytest.fixture
def cut(monkeypatch):
    """wo_b's forward is the wheel's with the adapter around it."""

    def cutting(wheel, names):
        linear = whole(wheel, names)
        kind = type(linear)
        kind.forward, linear.output_size = adapter.replace_row_parallel_forward(kind.forward), HIDDEN
        return linear

    whole = layers.row_parallel
    monkeypatch.setattr(layers, "row_parallel", cutting)


@every_release(FIRST)
def test_two_layers_in_pieces(version, group, works, cut, sglang_wheel):  # noqa: F811
    wheel = sglang_wheel(version)
    expected, before = layers.ways(wheel, version, group, ROWS, patched=False)
    pieces, sums = len(works), group.sums
    found, made = layers.ways(wheel, version, group, ROWS, patched=True)
    assert (before, pieces) == (4, 0) and torch.equal(found, expected) and bool(found.any())
    # from 0.5.23 on the last sum is asked for behind the layers: the whole of it
    last_outside = since(version, BY_BOUNDARIES)
    assert made == group.sums - sums == int(last_outside) and len(works) == 2 * (4 - last_outside)
    assert all(work.waited == 1 for work in works) and seen[-3:] == [2, 2, 2]
    assert [len(work.piece) for work in works[:2]] == [4, 5]


class Experts:
    """Of a factor, made whole or by columns; beside the wheel's FusedMoE.forward_impl, which hands their output on."""

    def __init__(self):
        self.made = []

    def in_parts(self, x, *, parts, behind, held_sms, shared, scaling):
        self.made.append(parts)
        out = shared + scaling * (x * 0.75)
        out = out.view(len(out), parts, -1).transpose(0, 1).contiguous()
        for part in out:
            behind(part)
        return out

    def routed_of(self, wheel, names, x):
        make, in_parts = lambda: self.made.append("whole") or x * 0.75, partial(self.in_parts, x)
        assert by_columns.may_wait(x, QUIET, QUIET, True)
        routed = by_columns.UnmadeExperts(make, in_parts, x)
        forward = layers.take(wheel, dict(names) | MOE, "FusedMoE.forward_impl", MOE_LAYER)
        members = {"forward": forward, "run_moe_core": lambda self, dispatch_output: dispatch_output}
        return type("FusedMoE", (layers.Part,), members)(
            **{"quant_method": QUIET, "_dwdp_bound": False, "reduce_results": False, "moe_tp_size": 2},
            **{"_dispatch_with_pre_quant": lambda *_: routed, "moe_ep_size": 1},
            dispatcher=SimpleNamespace(dispatch=lambda **_: routed, combine=lambda combine_input: combine_input),
        )(x, QUIET)


@every_release(FIRST)
def test_two_layers_with_experts_by_columns(version, group, works, cut, monkeypatch, sglang_wheel):  # noqa: F811
    """Handed on by SGLang's own experts, MoE block and boundaries; the numbers are those of the whole."""
    wheel, experts = sglang_wheel(version), Experts()
    expected, _ = layers.ways(wheel, version, group, ROWS, patched=False)
    monkeypatch.setattr(by_columns.mxfp4_moe, "makes_parts", lambda w13, w2, parts: parts == 2)
    monkeypatch.setattr(layers, "routed_of", experts.routed_of)
    monkeypatch.setattr(layers, "shared_add", lambda experts, routed, shared, scale: routed.with_shared(shared, 1.0))
    found, _ = layers.ways(wheel, version, group, ROWS, patched=True)
    assert torch.equal(found, expected) and experts.made[0] == 2 and len(experts.made) == 2
    # from 0.5.23 on the last sum is asked for behind the layers: of the whole
    assert experts.made[1] == ("whole" if since(version, BY_BOUNDARIES) else 2)
    columns = [work for work in works if work.piece.shape[1] < HIDDEN]
    assert len(columns) == 3 * experts.made.count(2) and all(work.waited == 1 for work in works)


# ---- who would sum


def communicator(*, disabled=False):
    """One that takes everything, but for SGLang's own question, in few rows; disabled, nothing."""
    questions = ("should_mscclpp_allreduce", "should_quick_allreduce", "should_torch_symm_mem_allreduce")
    return SimpleNamespace(
        disabled=disabled,
        **dict.fromkeys((*questions, "should_pcie_ipc_ar"), lambda x: not disabled),
        should_custom_ar=lambda x: not disabled and len(x) <= 1024,
        all_reduce=lambda x, out=None: x.fill_(9),
        **dict.fromkeys(
            ("quick_all_reduce", "custom_all_reduce", "pcie_ipc_all_reduce"), lambda x: torch.full_like(x, 9)
        ),
    )


SITUATIONS = {
    "torch's NCCL alone": {},
    "pynccl": {"pynccl_comm": coordinators.Nccl()},
    "disabled ones": {name: communicator(disabled=True) for name in (*adapter._OTHERS, "ca_comm")},
    "SGLang's custom one, fewer rows": {"ca_comm": communicator(), "rows": 1024},
    "SGLang's custom one, more rows": {"ca_comm": communicator(), "rows": 1025},
    "quick": {"qr_comm": communicator()},
    "mscclpp": {"pymscclpp_comm": communicator()},
    "symmetric memory of torch": {"torch_symm_mem_comm": communicator()},
    "pcie_ipc": {"pcie_ipc_comm": communicator(), "pynccl_comm": communicator(disabled=True)},
    "symmetric memory of NCCL": {"pynccl_comm": coordinators.Nccl(), "is_symmetric_memory_enabled": lambda: True},
}
BY_TORCH = {"torch's NCCL alone", "disabled ones", "SGLang's custom one, more rows"}


@every_release(FIRST)
@pytest.mark.parametrize("name", SITUATIONS)
def test_pieces_are_of_sums_that_sglang_gives_to_torch_in_place(version, name, sglang_wheel, monkeypatch):
    wheel, by_torch = sglang_wheel(version), []

    def all_reduce(x, group=None):
        assert group == "cards"
        by_torch.append(x)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    coordinator = coordinators.coordinator_of(wheel, None)
    situation = {"pynccl_comm": None, "device_group": "cards", "rows": 2048} | SITUATIONS[name]
    rows = situation.pop("rows")
    vars(coordinator).update(situation)
    coordinator.debug_check_symmetric_mempool = lambda *_: None
    x = coordinators.x_of(rows)
    found = coordinator.all_reduce(x)
    takes = adapter.is_for_nccl(coordinator, x)
    has_it = name != "pcie_ipc" or since(version, "0.5.21")
    assert takes == (name in BY_TORCH) and bool(by_torch) == (takes or not has_it)
    assert found is x or not takes  # in place


# ---- wo_b


@every_release(FIRST)
def test_wo_b_is_called_for_its_rows_and_nothing_else(version, sglang_wheel):
    calls = [
        call
        for call in ast.walk(tree(sglang_wheel(version), MODEL))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.wo_b"
    ]
    assert calls
    for call in calls:
        assert len(call.args) == 1 and {keyword.arg for keyword in call.keywords} <= {"skip_all_reduce"}


@every_release(FIRST)
def test_a_rows_product_looks_at_no_other_row(version, sglang_wheel):
    """RowParallelLinear's forward gives its whole input to the quantisation method and asks for one sum, or none."""
    wheel = sglang_wheel(version)
    applied, asked = [], []
    method = SimpleNamespace(apply=lambda layer, x, bias=None: applied.append(len(x)) or x)
    group = SimpleNamespace(all_reduce=lambda x: asked.append(len(x)) or x)
    names = layers.names_of(wheel, group)
    linear = layers.row_parallel(wheel, names)
    linear.quant_method = method
    for options, sums in (({}, [5]), ({"skip_all_reduce": True}, [])):
        output, bias = linear(torch.ones(5, 3), **options)
        assert bias is None and output.shape == (5, 3) and applied == [5] and asked == sums
        applied.clear()
        asked.clear()
    assert "self.output_size = output_size" in ast.unparse(definition(wheel, "LinearBase.__init__", LINEAR)), (
        "what the whole output has"
    )


@every_release(FIRST)
def test_torchs_group_is_the_coordinators(version, sglang_wheel):
    in_place = ast.unparse(
        definition(sglang_wheel(version), "GroupCoordinator._all_reduce_in_place", mhc_sum.PARALLEL_STATE)
    )
    assert "torch.distributed.all_reduce(input_, group=self.device_group)" in in_place
