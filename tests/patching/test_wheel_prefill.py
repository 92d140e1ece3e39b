"""SGLang's own code, taken out of the wheels and run. 0.5.14's DeepseekV4AttnBackend.forward over stand-ins: what it
passes to the paged attention for few rows is what replace_forward_prefill_sparse passes for many. Who asks for the GPU
before the other prefill. And the C128 lists that it makes are those that our page tables stand for."""

import ast
import sys
import types
import zipfile
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120 import settings
from deepseek_v4_sm120.patching import contract
from deepseek_v4_sm120.reference import kv_pages
from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as adapter
from deepseek_v4_sm120.sglang_patches.table import BACKEND, SM120_ATTENTION_0_5_14, SM120_KEYS

THRESHOLD = "_LARGE_INDEXER_QUERY_THRESHOLD"
ROWS = 5
EXTEND, DECODE = (
    SimpleNamespace(is_idle=lambda: False, is_extend_without_speculative=lambda is_extend=is_extend: is_extend)
    for is_extend in (True, False)
)


def backend_tree(wheel) -> ast.Module:
    return ast.parse(zipfile.ZipFile(wheel).read(BACKEND.replace(".", "/") + ".py"))


def take(tree, names: dict, *qualnames) -> list:
    """The definitions, compiled by themselves with `names` as their globals."""
    found = [contract.find_definition(tree, name) for name in qualnames]
    future = ast.parse("from __future__ import annotations").body  # the annotations name what is not there
    code = ast.fix_missing_locations(ast.Module([*future, *found], []))
    exec(compile(code, "wheel", "exec"), names)
    return [names[node.name] for node in found]


class Metadata:
    """The fields of DSV4AttnMetadata that the attention reads, for `rows` rows of a batch."""

    def __init__(self, rows):
        def indices(width):
            return torch.randint(-1, 500, (rows, width), dtype=torch.int32)

        def lengths(most):
            return torch.randint(1, most, (rows,), dtype=torch.int32)

        self.swa_page_indices, self.swa_topk_lengths = indices(128), lengths(128)
        self.c4_sparse_page_indices, self.c4_sparse_topk_lengths = indices(512), lengths(512)
        self.c128_page_indices, self.c128_topk_lengths_clamp1 = indices(64), lengths(64)

    def get_flashmla_metadata(self, compress_ratio):
        return None


class Pool:
    page_size, swa_window_size = 256, 256
    swa_kv_pool = SimpleNamespace(kv_cache_total_dim=584)
    ratio = 4

    def get_swa_key_buffer_radix(self, layer_id):
        return torch.zeros(3, kv_pages.page_bytes(256), dtype=torch.uint8)

    def get_extra_key_buffer(self, layer_id):
        return torch.zeros(9, kv_pages.page_bytes(256 // self.ratio), dtype=torch.uint8)


@pytest.fixture
def backend(monkeypatch, sglang_wheel):
    """backend(threshold, switch) -> (forward of the wheel, names it sees); calls of the paged attention in `.calls`."""
    monkeypatch.setattr(device_gate, "serves", lambda device: True)
    monkeypatch.setattr(adapter, "settings", lambda: settings.Settings())
    calls = []

    def paged(**kwargs):
        calls.append(kwargs)
        return kwargs["q"] + 1, None

    module = types.ModuleType(SM120_ATTENTION_0_5_14)
    module.flash_mla_with_kvcache_sm120 = paged
    for count in range(1, SM120_ATTENTION_0_5_14.count(".") + 1):
        name = ".".join(SM120_ATTENTION_0_5_14.split(".")[:count])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__path__ = []
    monkeypatch.setitem(sys.modules, SM120_ATTENTION_0_5_14, module)
    tree = backend_tree(sglang_wheel("0.5.14"))

    def stock(self, *args, **kwargs):
        return "stock", args

    def make(threshold, switch=False):
        flag = SimpleNamespace(get=lambda: switch)
        names = {
            "torch": torch,
            "DSV4AttnMetadata": Metadata,
            "DeepSeekV4TokenToKVPool": Pool,
            "_is_sm120": True,
            THRESHOLD: threshold,
            "envs": SimpleNamespace(SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=flag),
        }
        forward, _ = take(tree, names, "DeepseekV4AttnBackend.forward", "_pad_tensor_to_size")
        made = SimpleNamespace(mtp_enabled=False, head_dim_v=512, softmax_scale=0.125, calls=calls)
        replaced = adapter.replace_forward_prefill_sparse(stock)
        made._forward_prefill_sparse = types.MethodType(replaced, made)
        made.run = lambda metadata, pool, q, ratio, mode=EXTEND: run(made, forward, metadata, pool, q, ratio, mode)
        return made

    return make


def run(backend, forward, metadata, pool, q, ratio, mode):
    backend.forward_metadata = SimpleNamespace(core_attn_metadata=metadata)
    backend.token_to_kv_pool = pool
    layer, batch, key = SimpleNamespace(layer_id=7, tp_q_head_num=16), SimpleNamespace(forward_mode=mode), object()
    sink = torch.arange(q.shape[1], dtype=torch.float32)
    return forward(backend, q, key, key, layer, batch, ratio, save_kv_cache=False, attn_sink=sink)


def same(one, other) -> bool:
    if not torch.is_tensor(one):
        return type(one) is type(other) and one == other
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype) and torch.equal(
        one, other
    )


@pytest.mark.parametrize("in_metadata", [ROWS, ROWS + 3, ROWS - 2], ids=["as many rows", "more rows", "fewer rows"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_prompts_above_the_threshold_make_the_call_of_those_below(ratio, in_metadata, backend):
    metadata, pool, q = Metadata(in_metadata), Pool(), torch.randn(ROWS, 16, 512).to(torch.bfloat16)
    pool.ratio = ratio or 4
    below = backend(ROWS).run(metadata, pool, q, ratio)
    above = backend(ROWS - 1).run(metadata, pool, q, ratio)
    switched = backend(ROWS, switch=True)
    always = switched.run(metadata, pool, q, ratio)  # what 0.5.15 does by default
    expected, *others = switched.calls
    assert len(others) == 2 and set(expected) == set(SM120_KEYS)
    for found in others:
        assert list(found) == list(expected)
        assert [name for name in expected if not same(found[name], expected[name])] == []
    assert same(above, below) and same(always, below) and below.shape == q.shape


def test_decode_is_never_handed_over(backend):
    made = backend(ROWS - 1, switch=True)
    made._forward_prefill_sparse = None
    made.run(Metadata(ROWS), Pool(), torch.zeros(ROWS, 16, 512, dtype=torch.bfloat16), 4, DECODE)
    assert len(made.calls) == 1


@pytest.mark.parametrize("why", ["gate", "ops"])
def test_on_other_gpus_the_original_gets_the_very_arguments(why, backend, monkeypatch):
    if why == "gate":
        monkeypatch.setattr(device_gate, "serves", lambda device: False)
    else:
        monkeypatch.setattr(adapter, "settings", lambda: settings.Settings(force="ops"))
    made, metadata, pool = backend(ROWS - 1), Metadata(ROWS), Pool()
    answer, args = made.run(metadata, pool, torch.zeros(ROWS, 16, 512, dtype=torch.bfloat16), 128)
    q, layer_id, ratio, batch, told_pool, told_metadata, sink = args
    assert answer == "stock" and not made.calls and (layer_id, ratio) == (7, 128)
    assert told_pool is pool and told_metadata is metadata and sink.shape == (16,)
    assert q.shape == (ROWS, 1, 16, 512) and batch.forward_mode.is_extend_without_speculative()


PLATFORM = "get_platform().is_sm120"
GUARDS = {"0.5.14": None, "0.5.17": "_is_sm120", "0.5.20": PLATFORM, "0.5.23": PLATFORM}


@pytest.mark.parametrize("version", GUARDS)
def test_who_asks_for_the_gpu_before_the_copied_history(version, sglang_wheel):
    """Every use of the threshold in the backend, which chooses the other prefill, is under `not <SM120>`, but for
    0.5.14's, which the table has a row for."""
    tree = backend_tree(sglang_wheel(version))
    conditions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            conditions.append(node)
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == THRESHOLD]
    assert uses
    asked = [c for c in conditions if any(use is n for n in ast.walk(c) for use in uses)]
    told = [[ast.unparse(value) for value in c.values] for c in asked]
    if GUARDS[version] is None:
        assert told and all("is_sm120" not in " ".join(values) for values in told)
        return
    assert all(any(use is n for c in asked for n in ast.walk(c)) for use in uses)
    assert all(f"not {GUARDS[version]}" in values for values in told)
    copied = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and "_forward_prefill_sparse" in ast.unparse(n.func)]
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ("is_sm120" in ast.unparse(n.test))]
    guarded += [n for n in ast.walk(tree) if isinstance(n, ast.If) and "_use_sparse_prefill" in ast.unparse(n.test)]
    inside = [n for test in guarded for n in ast.walk(test)]
    assert copied and all(any(call is n for n in inside) for call in copied)


LISTS = {
    "0.5.14": "sglang/srt/layers/attention/dsv4/metadata_kernel.py",
    "0.5.17": "sglang/kernels/ops/attention/dsv4/metadata_kernel.py",
    "0.5.20": "sglang/kernels/ops/attention/dsv4/metadata_kernel.py",
    "0.5.23": "sglang/kernels/ops/attention/dsv4/metadata_kernel.py",
}
# The kernel in Triton's interpreter, whose switch must be set before the module is imported
MAKE_LIST = """
    import sys, torch
    sys.path.insert(0, FOLDER)
    from metadata_kernel import init_compression_metadata
    from deepseek_v4_sm120.reference.sparse_decode import indices_of_page_table
    torch.manual_seed(0)
    seq_lens = torch.tensor([1, 127, 128, 255, 256, 300, 5000, 8192], dtype=torch.int32)
    rows, page_size = seq_lens.numel(), 256
    table = torch.randperm(rows * 40)[: rows * 33].view(rows, 33).to(torch.int32)
    made = init_compression_metadata(seq_lens, seq_lens - 1, seq_lens.long(), table, page_size)[8]
    width = 33 * page_size // 128
    stood_for = indices_of_page_table(table, page_size // 128, rows * 40)[:, 0]
    beyond = torch.arange(width) >= (seq_lens // 128)[:, None]
    print(tuple(made.shape), bool((made >= 0).any()), torch.equal(made, stood_for.masked_fill(beyond, -1)))
"""


@pytest.mark.parametrize("version", LISTS)
def test_a_page_table_stands_for_the_c128_list_that_sglang_makes(version, sglang_wheel, tmp_path, python_with_torch):
    """SGLang's table of a row, of 256-token pages, is the C128 cache's too; lengths are seq // 128."""
    (tmp_path / "metadata_kernel.py").write_bytes(zipfile.ZipFile(sglang_wheel(version)).read(LISTS[version]))
    code = MAKE_LIST.replace("FOLDER", repr(str(tmp_path)))
    assert python_with_torch(code, env={"TRITON_INTERPRET": "1"}).stdout == "(8, 66) True True\n"
