"""SGLang's own router kernel, in Triton, out of a release's file: what ours is held against, to the bit."""

from __future__ import annotations

import ast
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import torch

HOMES = ("sglang/kernels/ops/moe/moe_fused_gate.py", "sglang/jit_kernel/moe_fused_gate.py")
KERNEL = "_router_triton_kernel"
HEAD = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
SQRTSOFTPLUS = 1


def source_in(wheel: Path) -> str:
    """The kernel's definition in a release's wheel."""
    with zipfile.ZipFile(wheel) as archive:
        home = next(name for name in HOMES if name in archive.namelist())
        return source_of(archive.read(home).decode())


def source_of(text: str) -> str:
    """The same in moe_fused_gate.py itself."""
    tree = ast.parse(text)
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == KERNEL]
    lines = text.splitlines(keepends=True)
    return "".join(lines[found.decorator_list[0].lineno - 1 : found.end_lineno])


def load(source: str, file: Path) -> ModuleType:
    """A module that has the kernel; Triton reads the file."""
    file.write_text(HEAD + source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def moe_fused_gate(module: ModuleType, logits, bias, topk, *, scale=None, real_rows=None):
    """(weights, ids) as SGLang's function of that name launches the kernel for sqrt(softplus), renormalised."""
    import triton

    kernel = getattr(module, KERNEL)
    names = getattr(kernel, "function", kernel).arg_names
    rows, experts = logits.shape
    weights = torch.empty((rows, topk), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, topk), dtype=torch.int32, device=logits.device)
    block = triton.next_power_of_2(experts)
    at_once = max(1, min(4, 256 // block))
    values = {
        **dict(scores_ptr=logits, bias_ptr=bias, bias_alt_ptr=ids, input_ids_ptr=ids, out_packed_ptr=ids),
        **dict(num_token_non_padded_ptr=ids if real_rows is None else real_rows, out_weights_ptr=weights),
        **dict(out_indices_ptr=ids, M=rows, routed_scaling_factor=float(scale or 1.0), moe_softcapping=0.0),
        **dict(N=experts, K=topk, K_ROUTED=topk, BLOCK_M=at_once, BLOCK_N=block, BLOCK_K=triton.next_power_of_2(topk)),
        **dict(N_GROUP=1, TOPK_GROUP=1, EXPERTS_PER_GROUP=experts, BLOCK_G=1, SCORING_FUNC=SQRTSOFTPLUS),
        **dict(SQRTSOFTPLUS_LOG1P=False, HAS_SOFTCAP=False, RENORMALIZE=True, APPLY_SCALE=scale is not None),
        **dict(HAS_BIAS=True, HAS_TOKEN_BIAS=False, BIAS_ALT_TOKEN_ID=0, HAS_PADDING=real_rows is not None),
        **dict(HAS_PACKED=False, RENORMALIZE_EPSILON=0.0, USE_PDL=True, stride_bias=1, stride_bias_alt=0),
        **dict(stride_input_ids=0, stride_sm=logits.stride(0), stride_sn=logits.stride(1), stride_wm=topk, stride_wk=1),
        **dict(stride_im=topk, stride_ik=1, stride_pm=0, stride_pk=0),
    }
    given = {name: values[name] for name in names}
    kernel[(triton.cdiv(rows, at_once),)](**given, num_warps=1 if block <= 512 else 4, launch_pdl=True)
    return weights, ids
