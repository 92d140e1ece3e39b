"""A model in stages (--pp-size), of SGLang's own forward and layers, taken out of the wheels and run on the CPU over
stand-ins: what goes from a stage to the next, and that the last one has the bits of a model in one stage. All releases
from 0.5.13 on were run with this; the suite has the two forms of a layer."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.adapters import mhc_sum as adapter
from tests.adapters.test_mhc_sum import HIDDEN
from tests.patching import test_wheel_mhc_dealt_streams as models
from tests.patching import test_wheel_mhc_sum as layers
from tests.patching.test_wheel_wo_a import QUIET, definition, take
from tests.patching.wheels import RELEASES, since

group = layers.group
LAYERS, ROWS = 3, 3
BATCH = "sglang.srt.model_executor.forward_batch_info"


def names_of(wheel, group):
    read = SimpleNamespace(
        start=models.start,
        clear=lambda batch: None,
        written_residual=lambda batch: batch.written,
        read_output=lambda hidden, batch, *_: batch.update.update(batch.owed.complete(), batch.written),
    )
    names = layers.names_of(wheel, group) | {"residual_batch": read, "hc_boundary": QUIET}
    names |= {"get_global_expert_distribution_recorder": layers.QuietContext, "getattr": getattr, "range": range}
    names["mhc"] = SimpleNamespace(AttnOutput=lambda partial: SimpleNamespace(partial=partial), MHC_POST_MULT_VALUE=2.0)
    names["GIVEN"] |= {"mega_gate_forward_scope": models.nullcontext}
    names["GIVEN"] |= {"hc_broadcast": lambda x, streams: x.unsqueeze(1).repeat(1, streams, 1)}
    return names | {"PPProxyTensors": take(wheel, {"isinstance": isinstance}, "PPProxyTensors", BATCH)}


def stage_of(wheel, version, group, first, end, *, patched):
    """DeepseekV4Model with the wheel's forward, of the layers from `first` to `end`."""
    names = names_of(wheel, group)
    make = layers.layer
    if since(version, models.BY_BOUNDARIES):
        kinds = layers.kinds_of_output(wheel, names)
        make = lambda wheel, names, **how: layers.layer_of_boundaries(wheel, names, kinds, **how)  # noqa: E731
    own = [make(wheel, names, patched=patched) for _ in range(first, end)]
    ways = {name: f"DeepseekV4Model.{name}" for name in ("forward", "_forward_impl")}
    members = {name: take(wheel, dict(names), way) for name, way in ways.items() if definition(wheel, way) is not None}
    return type("DeepseekV4Model", (layers.Part,), members)(
        **{"layers": [None] * first + own, "start_layer": first, "end_layer": end, "hc_mult": 4, "hidden_size": HIDDEN},
        **{"dspark_layers_to_capture": None, "use_fused_mhc_post_pre": True, "hc_pre_from_prev_sublayer": False},
        **{"_can_run_tbo": lambda batch: False, "norm": lambda x: x},
        embed_tokens=lambda ids: torch.arange(len(ids) * HIDDEN).remainder(47).view(-1, HIDDEN).bfloat16(),
        pp_group=SimpleNamespace(is_first_rank=not first, is_last_rank=end == LAYERS, world_size=2),
        hc_head=lambda x, *_: x.float().mean(1).bfloat16(),
    )


def run(wheel, version, group, cuts, *, patched, size):
    """(what the last stage gives, what each gives the next one, sums). size: of the pipeline, as our code is told."""
    sys.modules[adapter.PARALLEL_STATE]._PP.world_size = size
    given, between, before = None, [], group.sums
    for first, end in itertools.pairwise(cuts):
        model = stage_of(wheel, version, group, first, end, patched=patched)
        given = model.forward(torch.arange(ROWS), QUIET, models.batch_of(False), None, given)
        between += [] if end == LAYERS else [given["hidden_states"]]
    return given, between, group.sums - before


@pytest.mark.parametrize("version", ["0.5.20", RELEASES[-1]], scope="module")
def test_stages_have_the_bits_of_one(version, group, sglang_wheel):
    """Sums are made in front of the boundaries; put off into them, as with one stage, what leaves one is whole, too."""
    wheel = sglang_wheel(version)
    expected, _, sums = run(wheel, version, group, (0, LAYERS), patched=False, size=1)
    assert expected[0].float().std() > 0 and sums == 2 * LAYERS
    for cuts, size, alone in (((0, 1, LAYERS), 2, 2 * LAYERS), ((0, 1, LAYERS), 1, 2)):
        layers.sums.clear()
        found, (between,), sums = run(wheel, version, group, cuts, patched=True, size=size)
        assert all(map(torch.equal, found, expected)) and sums == alone
        assert layers.sums.count(None) == (0 if size == 1 else len(layers.sums)) and layers.sums
        assert type(between) is torch.Tensor and between.shape == (ROWS, 4 * HIDDEN) and between.is_contiguous()
        assert between.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 64])
def test_the_streams_of_a_stage_are_ones_that_a_boundary_takes(rows, group):
    """Between stages they are flat, and in a graph the first rows of a buffer."""
    buffer = torch.zeros(64, 4 * HIDDEN, dtype=torch.bfloat16)
    streams = buffer[:rows].view(rows, 4, HIDDEN)
    assert layers.boundary._takes(streams, None, None, None, 0)
