"""Stand-ins for what SGLang has around wo_a: its linear layer with its loader, the FP8 configuration, the rotation, the
expansion; and the reference in our operator's place. For the adapter's tests and those over the wheels."""

from __future__ import annotations

import types

import torch

from deepseek_v4_sm120.reference import wo_a as reference
from deepseek_v4_sm120.sglang_patches.adapters import wo_a as adapter

GROUPS, OUTPUTS, INPUTS = 4, 128, 1024  # of all ranks; two heads a group
HEADS = GROUPS * INPUTS // 512


def rope(q, k, freqs_cis, positions, inverse=False):
    """fused_rope_inplace: in place, float32, one rounding."""
    assert k is None
    pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)).contiguous())
    factors = freqs_cis[positions.long()][:, None]
    q.copy_(torch.view_as_real(pairs * (factors.conj() if inverse else factors)).flatten(-2).to(q.dtype))


class Expansion:
    """_dequant_fp8, without einops; counts."""

    def __init__(self):
        self.shapes = []

    def __call__(self, weight, scale):
        assert weight.dtype == torch.float8_e4m3fn
        self.shapes.append(tuple(weight.shape))
        wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (weight.float() * wide).to(torch.bfloat16)


class Operator:
    """ops.wo_a: its own checks, then the reference."""

    def __init__(self):
        self.calls = []  # (rows, whether it rotates)

    def __call__(self, x, weight, weight_scale, *, freqs_cis=None, positions=None, reproducible=False):
        check = adapter.op.linear.check_product("wo_a", x, "rows, groups, inputs", weight, weight_scale)
        few = reproducible or x.shape[0] <= adapter.op.FP8_ROWS
        adapter.op._check_rotation(check, x, freqs_cis, positions, few)
        self.calls.append((x.shape[0], freqs_cis is not None))
        return reference.wo_a(x, weight, weight_scale, freqs_cis, positions).to(torch.bfloat16)


class Linear(torch.nn.Module):
    """ColumnParallelLinear, as far as wo_a's is used: bf16, with SGLang's loader by rows."""

    def __init__(self, rank=0, ranks=1, outputs=GROUPS * OUTPUTS, inputs=INPUTS):
        super().__init__()
        self.tp_rank = rank
        self.processed = []
        self.quant_method = types.SimpleNamespace(process_weights_after_loading=self.processed.append, kind="bf16")
        self.weight = torch.nn.Parameter(
            torch.empty(outputs // ranks, inputs, dtype=torch.bfloat16), requires_grad=False
        )
        self.weight.output_dim, self.weight.input_dim, self.weight.weight_loader = 0, 1, self.weight_loader

    def weight_loader(self, param, loaded_weight):
        size = param.shape[param.output_dim]
        shard = loaded_weight.narrow(param.output_dim, self.tp_rank * size, size)
        assert shard.shape == param.shape
        param.data.copy_(shard)


class Fp8LinearMethod:
    pass


class UnquantizedLinearMethod:
    pass


class Fp8Config:
    is_checkpoint_fp8_serialized, weight_block_size = True, [128, 128]

    def __init__(self, name="fp8", left_out=(), **changes):
        self.name, self.left_out = name, left_out
        vars(self).update(changes)

    def get_name(self):
        return self.name

    def get_quant_method(self, layer, prefix):
        assert prefix.endswith("wo_a")
        return UnquantizedLinearMethod() if prefix in self.left_out else Fp8LinearMethod()
