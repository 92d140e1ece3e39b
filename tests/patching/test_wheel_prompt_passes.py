"""Whose a sum of a prompt's rows is, by each release's own coordinator, taken out of the wheels and run on the CPU."""

import ast
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import prompt_passes
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE
from tests.patching import test_wheel_all_reduce as coordinators
from tests.patching.test_wheel_wo_a import definition
from tests.patching.wheels import every_release, since

FIRST = "0.5.13"


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
    "disabled ones": {name: communicator(disabled=True) for name in (*prompt_passes._OTHERS, "ca_comm")},
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
def test_for_nccl_is_what_sglang_gives_to_torch_in_place(version, name, sglang_wheel, monkeypatch):
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
    takes = prompt_passes.is_for_nccl(coordinator, x)
    has_it = name != "pcie_ipc" or since(version, "0.5.21")
    assert takes == (name in BY_TORCH) and bool(by_torch) == (takes or not has_it)
    assert found is x or not takes  # in place


@every_release(FIRST)
def test_torchs_group_is_the_coordinators(version, sglang_wheel):
    in_place = ast.unparse(definition(sglang_wheel(version), "GroupCoordinator._all_reduce_in_place", PARALLEL_STATE))
    assert "torch.distributed.all_reduce(input_, group=self.device_group)" in in_place
