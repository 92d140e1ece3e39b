"""The metadata of DSPARK's draft block, by a release's own code and its own Triton kernels.

A program of its own: without a GPU TRITON_INTERPRET=1 must be set before Triton is imported.

    python3 -m tests.patching.dspark_block 0.5.23 [cuda]        JSON: what holds, by name
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.fixes.dspark_lengths import replace_draft_block
from deepseek_v4_sm120.sglang_patches.table import BACKEND
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import content, fetch, members, packages, since

KERNELS = ("attn_metadata_kernels.py", "dspark_attn_metadata.py")
METHODS = (
    *("init_forward_metadata_dspark_draft_block", "init_forward_metadata_prefill", "expand_prefill_casually"),
    *("make_core_attn_metadata", "get_dspark_swa_page_indices", "_draft_block_extend_lens"),
)
BLOCK, PAGE, CONTEXT, SLOTS = 3, 256, 1024, 5
LENGTHS = (7, 300, 1, 129)
OTHERS = {"zeros": (0, 0, 0, 0), "beyond the context": (1 << 20, 9, 5, 4_000_000)}
FIRST = "0.5.16"


class Asked(Exception):
    """The host wants the numbers of a tensor that is the GPU's."""


class OnTheGpu(torch.Tensor):
    """Stands for a tensor of the GPU: for kernels, not for the host."""

    def tolist(self):
        raise Asked

    item = tolist


def kernels(version: str, *, on_gpu: bool) -> dict:
    """What the release's two files of kernels define, with the branch of a GPU taken or that of a CPU."""
    wheel, found = fetch(version), {}
    for end in KERNELS:
        (member,) = [m for m in members(wheel) if m.endswith(end) and "npu" not in m]
        text = content(wheel, member)
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("sglang"):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        file = Path(tempfile.mkdtemp(), end)
        file.write_text("\n".join(lines))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.ceil_align = lambda x, y: -(-x // y) * y
        module.inputs_on_cuda = module._inputs_on_cuda = lambda *args, **kwargs: on_gpu
        found |= vars(module)
    return found


def backend(version: str, device: str, *, on_gpu: bool = True):
    """DeepseekV4AttnBackend of a draft, as far as its block's metadata goes."""
    wheel, of_kernels = fetch(version), kernels(version, on_gpu=on_gpu)
    ragged = {"torch": torch, "VerifyExtendLengths": SimpleNamespace}
    pool = SimpleNamespace(
        full_to_swa_index_mapping=torch.arange(SLOTS * CONTEXT + 1, device=device).flip(0),
        request_window=None,
        swa_req_ring_size=None,
        swa_valid_from=None,
    )

    class Backend:
        is_dspark_draft, speculative_num_draft_tokens, swa_page_size, page_size = True, BLOCK + 1, 128, PAGE
        c4_topk = index_topk = 512
        present_ratios, low_ratios, has_c4, has_c128, trtllm_attn = (4, 128), (), True, True, False
        draft_metadata_glued, encoder_replay, encoder_row_floor = False, None, None
        cuda_int32_kwargs = {"dtype": torch.int32, "device": device}
        req_to_token = torch.arange(SLOTS * CONTEXT, dtype=torch.int32, device=device).reshape(SLOTS, CONTEXT)
        token_to_kv_pool = pool

        def _move_to_device(self, x):
            return torch.tensor(x, dtype=torch.int32, pin_memory=device != "cpu").to(device, non_blocking=True)

    names = {"torch": torch, "SWA_WINDOW": 128, "PAGE_INDEX_ALIGNED_SIZE": 64, "DSV4AttnMetadata": SimpleNamespace}
    names["compute_uniform_extend_lengths"] = take(
        wheel, ragged, "compute_uniform_extend_lengths", "sglang.srt.speculative.ragged_verify"
    )
    names |= {
        "_create_flashmla_metadata": lambda: None,
        "_create_dummy_paged_compress_data": lambda compress_ratio: None,
    }
    names["get_parallel"] = lambda: SimpleNamespace(attn_cp_size=1)
    names["DSV4Metadata"] = lambda core, indexer, **further: SimpleNamespace(core=core, indexer=indexer, **further)
    names |= {n: of_kernels[n] for n in of_kernels if n.startswith(("Expand", "Build", "Compute"))}
    for method in METHODS:
        if definition(wheel, f"DeepseekV4AttnBackend.{method}", BACKEND) is not None:
            setattr(Backend, method, take(wheel, dict(names), f"DeepseekV4AttnBackend.{method}", BACKEND))
    return Backend()


@contextmanager
def unasked(device: str) -> Iterator[None]:
    """A synchronisation with the GPU raises RuntimeError."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def metadata(of, host, *, ours: bool = False, **further) -> dict:
    """By name, with `host` as what the host is told of the lengths."""
    method, device = type(of).init_forward_metadata_dspark_draft_block, of.req_to_token.device
    lengths = torch.tensor(LENGTHS, device=device)
    given = dict(
        max_seq_len=CONTEXT,
        req_pool_indices=torch.tensor([3, 0, 4, 2], device=device),
        seq_lens=lengths.as_subclass(OnTheGpu) if device.type == "cpu" else lengths,
        seq_lens_cpu=None if host is None else torch.tensor(host),
        out_cache_loc=torch.arange(40, 40 + BLOCK * len(LENGTHS), device=device),
        block_size=BLOCK,
        **further,
    )
    with unasked(device.type):
        made = (replace_draft_block(method) if ours else method)(of, **given)
    return vars(made) | vars(made.core)


def same(a: dict, b: dict) -> bool:
    """Whether two metadata have the same fields, of the same kinds and values."""
    pairs = [(a[name], b.get(name)) for name in a if name != "core"]
    equal = [torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y for x, y in pairs]
    return a.keys() == b.keys() and all(equal)


def waits(of) -> bool:
    try:
        metadata(of, None)
    except (Asked, RuntimeError):
        return True
    return False


def main(version: str, device: str = "cpu") -> dict[str, bool]:
    if importlib.util.find_spec("msgspec") is None:
        sys.path.append(str(packages()))
    device_gate.serves = lambda device: True
    if device == "cpu":
        torch.cuda.is_current_stream_capturing = lambda: False
    of = backend(version, device)
    stock = metadata(of, LENGTHS)
    told = torch.tensor(LENGTHS, device=device)[:, None] + torch.arange(1, BLOCK + 1, device=device)
    found = {f"the same with {name}": same(stock, metadata(of, host)) for name, host in OTHERS.items()}
    found |= {"stock waits": waits(of), "the same with ours": same(stock, metadata(of, None, ours=True))}
    found["as the lengths are"] = torch.equal(stock["seq_lens_casual"].view(-1, BLOCK), told)
    found["tensors"] = sum(isinstance(x, torch.Tensor) for x in stock.values()) == 6
    if since(version, "0.5.21"):
        buffers = stock["swa_page_indices"].clone(), stock["swa_topk_lengths"].clone()
        reused = metadata(of, None, ours=True, dspark_swa_buffers=buffers)
        found["the same in a graph's buffers"] = same(stock, reused) and reused["swa_page_indices"] is buffers[0]
    if device == "cpu":
        cpus = backend(version, device, on_gpu=False)
        read = [metadata(cpus, host) for host in (LENGTHS, (8, 301, 2, 130))]
        found["a reader is seen"] = same(stock, read[0]) and not same(*read)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
