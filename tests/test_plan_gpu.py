"""plan's reserves against what our operators allocate."""

import pytest

from deepseek_v4_sm120.commands.plan import memory, models

ROWS = 2048


def peak_bytes(call):
    """Most that a second call holds besides what was there before, its result included."""
    import torch

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_the_experts_of_a_chunk():
    import torch

    from deepseek_v4_sm120.ops.mxfp4_moe import BLOCK_SCALED_MAJOR, mxfp4_moe
    from deepseek_v4_sm120.specs.mxfp4_moe import Shape, make_inputs

    inputs = make_inputs(Shape(ROWS, models.FLASH.hidden, models.FLASH.expert_width // 2, 32)).arguments()
    native = torch.cuda.get_device_capability()[0] == BLOCK_SCALED_MAJOR
    planned = memory.experts_bytes(models.FLASH, 2, ROWS, is_ours=True)
    out = ROWS * models.FLASH.hidden * 2
    for activations in ("bf16", "mxfp8") if native else ("bf16",):
        found = peak_bytes(lambda: mxfp4_moe(**inputs, activations=activations)) - out  # noqa: B023
        assert found <= planned, (activations, found, planned)
        if activations == "bf16":
            assert found > 0.9 * planned


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "bound"), [(8, "INDEX_SELECT_DECODE_BYTES"), (ROWS, "INDEX_SELECT_PREFILL_BYTES")])
def test_the_selection_at_any_context(rows, bound):
    import torch

    from deepseek_v4_sm120.ops.index_select import index_select
    from deepseek_v4_sm120.specs.index_select import Shape, make_inputs

    inputs = make_inputs(Shape(rows, (1000,), rows_per_request=rows, columns=4096)).arguments()  # 1M tokens captured
    out = torch.empty((rows, 512), dtype=torch.int32, device="cuda")
    assert peak_bytes(lambda: index_select(**inputs, out=out)) <= getattr(memory, bound)
