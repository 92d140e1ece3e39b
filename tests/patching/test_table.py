"""The real table over a small tree that looks like SGLang 0.5.17, in processes of their own."""

import importlib
import inspect
import json
import os
import sys
from pathlib import Path

import pytest

from deepseek_v4_sm120.patching import lifetime
from deepseek_v4_sm120.patching.contract import Parameters
from deepseek_v4_sm120.patching.spec import MODES, Target
from deepseek_v4_sm120.sglang_patches.table import LEFT_AT_TRUTH, SM120_SEAMS, TABLE
from tests.patching.conftest import EXPERTS, INDEXER, MHC_HEAD, MODEL, SM120_FUNCTION, Python

TARGETS = [(patch, target) for patch in TABLE.patches for target in patch.targets]
SEAMS = {"DSV4_SM120_FORCE": "seams"}
FAKE_SM120 = """
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda index=0: (12, 0)
"""


@pytest.fixture
def python(python_with_ours):
    return python_with_ours


def test_every_row_is_complete():
    assert len(TARGETS) > 10
    names = [patch.name for patch in TABLE.patches]
    assert len(set(names)) == len(names)
    for patch in TABLE.patches:
        assert patch.why and patch.retire and patch.targets and patch.modes and set(patch.modes) <= set(MODES)
    for _, target in TARGETS:
        assert isinstance(target, Target) and target.module and target.qualname and target.sglang
    reviewed = [digest for known in TABLE.reviewed().releases.values() for digest in known.values()]
    assert len(reviewed) > 400 and all(len(digest) == 16 for digest in reviewed)
    for stand_in in TABLE.stand_ins:
        assert stand_in.why and stand_in.only_after


DEALT = ",dealt_index=on"


@pytest.mark.parametrize(
    "chosen, off",
    [
        *(
            (None, ()),
            ("fp8_linear=on", ()),
            ("fp8_linear=off", ["fp8_linear", "draft_input"]),
            ("mhc=off", ["mhc", "dealt_streams"]),
        ),
        *(("dealt_streams=on", ()), ("router_topk=on", ())),
        ("dealt_products=on", ()),
        ("bf16_linear=off,dealt_products=on", ["bf16_linear", "dealt_products", "draft_head", "reproducible_head"]),
        *(("prompts_in_halves=on", ()), ("prompts_in_halves=4096", ())),
        *(("draft_head=on", ()), ("draft_input=off", ["draft_input"])),
        ("bf16_linear=off,draft_head=on", ["bf16_linear", "dealt_products", "draft_head", "reproducible_head"]),
        *(("wo_a=off", ["wo_a"]), ("dspark_lengths=off", ["dspark_lengths"])),
        *(("dealt_index=on", ()), ("dealt_index=off", ["dealt_index"])),
        *((f"index_select=off{more}", ["index_select", "dealt_index", "prefill_graphs"]) for more in ("", DEALT)),
        *(("prefill_graphs=on", ()), ("prefill_graphs=2048", ())),
        ("sparse_decode=off", ["sparse_decode", "unpadded_heads", "paged_prefill", "sched_meta"]),
    ],
)
def test_a_patch_is_switched_by_its_name_and_with_the_operator_that_it_serves(python, tree, chosen, off):
    code = """
        import sglang
        from deepseek_v4_sm120 import patching
        engine, states = patching.active_engine(), {}
        for r in engine.records:
            states.setdefault(r.state, {})[r.patch.name] = None
        assert engine.steering.problem() is None
        print(*states.get("OFF", ()))
        print(*states["READY"])
    """
    more = {"DSV4_SM120_SET": chosen} if chosen else {}
    found, ready = (line.split() for line in python(code, path=[tree({})], env=more).stdout.split("\n")[:2])
    assert set(found) == set(off)
    assert ("draft_head" in ready) is ((chosen or "") == "draft_head=on"), "only where asked for"
    assert ("dealt_index" in ready) is ("dealt_index" not in off), "unless told otherwise"
    assert ("prefill_graphs" in ready) is ("prefill_graphs=" in (chosen or ""))
    assert ("dealt_streams" in ready) is ((chosen or "") == "dealt_streams=on")
    assert ("dealt_products" in ready) is ((chosen or "") == "dealt_products=on")
    assert ("prompts_in_halves" in ready) is ("prompts_in_halves=" in (chosen or ""))
    assert ("router_topk" in ready) is ((chosen or "") == "router_topk=on")
    assert {"index_select", "fp8_linear", "mhc", "wo_a", "sparse_decode"} <= {*ready, *off}


@pytest.mark.parametrize("where", sorted({target.replacement for _, target in TARGETS}))
def test_every_replacement_exists(where):
    module, _, name = where.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


SIGNED = sorted(
    {
        (target.replacement, target.contract.signature, target.contract.further)
        for _, target in TARGETS
        if isinstance(target.contract, Parameters)
    },
    key=str,
)


@pytest.mark.parametrize(("where", "signature", "further"), SIGNED)
def test_what_a_replacement_fills_in_is_what_its_contract_expects(where, signature, further):
    """The contract is the one place that says what we are called with: each parameter that the replacement names is in
    it at the same place, and a default that it fills in is the contract's."""
    expected = Parameters(signature, further).expected
    module, _, name = where.partition(":")
    source = f"def original({', '.join(signature)}):\n    return None\n"
    names = {"get_global_server_args": None, "PAGE_INDEX_ALIGNED_SIZE": 64, "__name__": "made_for_a_contract"}
    exec(source, names)
    replacement = getattr(importlib.import_module(module), name)(names["original"])
    found = inspect.signature(replacement, follow_wrapped=False).parameters.values()
    takes_rest = {p.kind for p in found} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named = [p for p in found if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)]
    if not takes_rest:
        assert len(named) == len(expected) and further is None
    for ours, theirs in zip(named, expected, strict=False):
        assert ours.name == theirs.name
        assert ours.default is inspect.Parameter.empty or repr(ours.default) == theirs.default, ours.name
        assert (ours.kind is inspect.Parameter.KEYWORD_ONLY) == (theirs.kind == "keyword-only"), ours.name
    names_before = [p.name for p in named]
    assert [p.name for p in expected if not p.name.startswith("*")][: len(named)] == names_before


WEIGHTS = "def compute_weights(self, x, skip_scale=False):"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("def compute_weights(self, x, skip_scale=True):", "the default of skip_scale is True, expected False"),
        ("def compute_weights(self, x, *, skip_scale=False):", "skip_scale is keyword-only"),
        ("async def compute_weights(self, x, skip_scale=False):", "found an async function"),
        ("@staticmethod\n    def compute_weights(self, x, skip_scale=False):", "decorated with @staticmethod"),
        ("def compute_weights(self, x, skip_scale):", None),  # always given then: as it was for us
    ],
)
def test_another_default_or_kind_of_method_is_broken(python, tree, changed, words):
    assert WEIGHTS in INDEXER
    host = tree({"sglang/srt/layers/attention/dsv4/indexer.py": INDEXER.replace(WEIGHTS, changed)})
    found = json.loads(status(python, "--json", path=[host], check=False).stdout)
    (row,) = [row for row in found["patches"] if row["target"].endswith(":C4Indexer.compute_weights")]
    assert row["state"] == ("BROKEN" if words else "READY") and (words or "") in row["reason"]


def test_seams_are_patched_nowhere_that_is_left_at_the_truth():
    assert LEFT_AT_TRUTH and not {target.module for target in SM120_SEAMS.targets} & set(LEFT_AT_TRUTH)


def test_forced_seams_tell_some_modules_and_leave_the_others(python, tree):
    code = """
        from sglang.srt.layers.attention import deepseek_v4_backend as backend
        from sglang.srt.layers.attention.dsv4 import indexer
        from sglang.srt.models import deepseek_v4 as model
        from sglang.srt import server_args
        from sglang.srt.utils import common
        from sglang.srt.layers.quantization import fp8_utils
        asked = [module.is_sm120_supported() for module in (server_args, indexer, model, common, fp8_utils)]
        print(backend._is_sm120, asked, fp8_utils._is_sm120)
    """
    fp8_utils = "from sglang.srt.utils.common import is_sm120_supported\n_is_sm120 = is_sm120_supported()\n"
    host = tree({"sglang/srt/layers/quantization/fp8_utils.py": fp8_utils})
    assert python(code, path=[host], env=SEAMS).stdout == "True [True, True, True, False, False] False\n"
    assert python(code, path=[host]).stdout == "False [False, False, False, False, False] False\n"


def test_forced_seams_of_later_versions_answer_by_the_platform(python, tree):
    context = """
        class Platform:
            is_sm120, is_sm90, is_sm100, is_blackwell = False, True, True, True
        def get_platform():
            return Platform()
    """
    by_name = "from sglang.srt.runtime_context import get_platform\n"
    changes = {
        "sglang/_version.py": "__version__ = '0.5.20'",
        "sglang/srt/runtime_context.py": context,
        "sglang/srt/arg_groups/model_hook.py": by_name,
        "sglang/srt/layers/quantization/fp8_utils.py": by_name,
        "sglang/srt/layers/attention/deepseek_v4_backend.py": by_name,
        "sglang/srt/layers/attention/dsv4/indexer.py": by_name,
        "sglang/srt/layers/attention/dsv4/metadata.py": by_name + "_IS_SM120 = get_platform().is_sm120\n",
        "sglang/srt/models/deepseek_v4.py": by_name,
        "sglang/srt/models/deepseek_common/amd/deepseek_v4_fused_mhc.py": by_name,
    }
    code = """
        from sglang.srt.arg_groups.model_hook import get_platform as told
        from sglang.srt.layers.quantization.fp8_utils import get_platform as true
        print([[+p.is_sm120, +p.is_sm90, +p.is_sm100, +p.is_blackwell] for p in (told(), true())])
    """
    assert python(code, path=[tree(changes)], env=SEAMS).stdout == "[[1, 0, 0, 1], [0, 1, 1, 1]]\n"


def test_closed_gate_runs_the_very_original(python, tree):
    code = """
        import sglang, torch
        from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
        from sglang.kernels.ops.attention import flash_mla_sm120 as module
        q, pages, indices = torch.zeros(1), torch.zeros(2), torch.zeros(3)
        layer = type("Layer", (), {"tp_q_head_num": 16})
        kwargs, result = DeepseekV4AttnBackend().forward(q, pages, indices, layer, None, 4)
        from deepseek_v4_sm120 import patching
        print(hasattr(module.flash_mla_with_kvcache_sm120, "__wrapped__"), result is q,
              kwargs["k_cache"] is pages, sorted(kwargs), [r.state for r in patching.active_engine().records])
    """
    out = python(code, path=[tree()]).stdout
    assert out.startswith(
        "True True True ['head_dim_v', 'indices', 'k_cache', 'q'] ['APPLIED', 'NOT APPLICABLE', 'APPLIED'"
    )


def test_import_before_install_through_the_plugin_door(python, tree):
    code = """
        import sys
        from sglang.srt.server_args import is_sm120_supported as early
        from sglang.srt import server_args
        sys.path.insert(0, REPO)
        from deepseek_v4_sm120.patching import install
        install(); install()
        print(early(), server_args.is_sm120_supported(), server_args.is_sm120_supported.__wrapped__ is early,
              sum("deepseek_v4_sm120" in repr(f) for f in sys.meta_path))
    """.replace("REPO", repr(str(Path(__file__).resolve().parents[2])))
    out = python(code, path=[tree()], env=SEAMS, ours=False).stdout
    assert out == "False True True 1\n"


def test_both_doors_are_one_install(python, tree):
    code = """
        from deepseek_v4_sm120.patching import active_engine, install
        import sglang
        first = active_engine()
        install()
        from sglang.srt.server_args import is_sm120_supported
        print(active_engine() is first, hasattr(is_sm120_supported.__wrapped__, "__wrapped__"))
    """
    assert python(code, path=[tree()], env=SEAMS).stdout == "True False\n"


def test_undo_restores_every_original(python, tree):
    code = """
        from sglang.srt.layers.attention import deepseek_v4_backend as backend
        from sglang.srt import server_args
        from sglang.srt.utils import common
        from deepseek_v4_sm120 import patching
        left = patching.active_engine().undo()
        print(left, server_args.is_sm120_supported is common.is_sm120_supported, backend._is_sm120)
    """
    assert python(code, path=[tree()], env=SEAMS).stdout == "[] True False\n"


BROKEN_TREE = {
    "sglang/kernels/ops/attention/flash_mla_sm120.py": """
        def flash_mla_with_kvcache_sm120(**kwargs):
            return kwargs["q"], kwargs["brand_new"]
    """
}
SERVER = """
    import json, sys
    GPU
    import sglang.srt.managers.scheduler  # as every server does
    from sglang.srt.models import deepseek_v4  # and its registry, which imports all models
    from sglang.srt.arg_groups import deepseek_v4_hook
    from sglang.srt.layers.quantization import fp8
    if MODEL == "ours":
        deepseek_v4_hook.apply_deepseek_v4_defaults(None, "DeepseekV4ForCausalLM")
        deepseek_v4.DeepseekV4ForCausalLM()
    from deepseek_v4_sm120 import patching
    print(json.dumps(sorted({r.patch.name for r in patching.active_engine().records if r.state == "BROKEN"})))
"""


@pytest.fixture
def server(python):
    """server(folder, model, gpu) starts as far as small trees can: the finished process."""

    def start(folder, model, gpu, check=True, **env):
        code = SERVER.replace("MODEL", repr(model))
        fake = FAKE_SM120 if gpu == "sm120" else FAKE_SM120.replace("12, 0", "9, 0") if gpu == "h100" else ""
        return python(code.replace("    GPU\n", fake.lstrip("\n")), path=[folder], check=check, env=env)

    return start


@pytest.mark.parametrize(("model", "gpu"), [("llama", "sm120"), ("ours", "h100"), ("ours", "none"), ("llama", "none")])
def test_a_broken_row_stops_no_server_that_would_not_have_used_it(server, tree, model, gpu):
    done = server(tree(BROKEN_TREE), model, gpu)
    assert done.stdout == '["sparse_decode"]\n'
    (line,) = [text for text in done.stderr.splitlines() if "brand_new" in text]
    assert "does not fit sglang 0.5.17" in line and "sparse_decode: " in line
    assert "any other runs as without us" in line


def test_a_broken_row_stops_a_server_of_this_model_on_this_gpu(server, tree):
    done = server(tree(BROKEN_TREE), "ours", "sm120", check=False)
    assert done.returncode == 1 and "PatchError" in done.stderr and "unexpected brand_new" in done.stderr
    assert "in apply_deepseek_v4_defaults" not in done.stdout and "in watched" in done.stderr, "before SGLang's own"
    warned = server(tree(BROKEN_TREE), "ours", "sm120", DSV4_SM120_ON_BROKEN="warn")
    assert warned.stdout == '["sparse_decode"]\n' and warned.stderr.count("unexpected brand_new") == 1


WRONG = {
    "DSV4_SM120_FORCE": ("sometimes", "DSV4_SM120_FORCE must be unset or one of ops, seams; got 'sometimes'"),
    "DSV4_SM120_SET": ("mhc=maybe", "DSV4_SM120_SET must be <name>=<on, off or a number>"),
    "DSV4_SM120_PROFILE": ("/nowhere.json", "profile /nowhere.json cannot be read: No such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_stops_a_server_of_ours_and_is_told_to_all_others(server, tree, name):
    """Nor does it stop SGLang's import, as once it did."""
    value, words = WRONG[name]
    for model, gpu in (("llama", "sm120"), ("ours", "none")):
        done = server(tree(), model, gpu, **{name: value})
        assert done.stdout == "[]\n" and done.stderr.count(words) == 1 and "does not start" in done.stderr
    done = server(tree(), "ours", "sm120", check=False, **{name: value})
    assert done.returncode == 1 and "PatchError" in done.stderr and words in done.stderr
    assert "cannot do what its variables ask for" in done.stderr and "mend or unset what is named" in done.stderr
    assert "does not fit" not in done.stderr and "another release" not in done.stderr.lower()
    assert server(tree(), "ours", "sm120", DSV4_SM120_ON_BROKEN="warn", **{name: value}).stdout == "[]\n"
    beside = server(tree(BROKEN_TREE), "ours", "sm120", check=False, **{name: value})
    assert words in beside.stderr and "What to do: mend the variables; use a release" in beside.stderr


def test_forced_validation_counts_as_our_gpu(server, tree):
    done = server(tree(BROKEN_TREE), "ours", "h100", check=False, DSV4_SM120_FORCE="ops")
    assert done.returncode == 1 and "unexpected brand_new" in done.stderr


@pytest.mark.parametrize("version", ["0.5.2", "0.5.11", "0.5.11.post1", "0.6.0"])
def test_outside_of_what_is_supported_stock_runs(server, tree, version):
    """Even where nothing fits, the profile is missing and a name of DSV4_SM120_SET is unknown."""
    wrong = {"DSV4_SM120_PROFILE": "/nowhere.json", "DSV4_SM120_SET": "no_such=on"}
    host = tree({**BROKEN_TREE, "sglang/_version.py": f"__version__ = '{version}'"})
    done = server(host, "ours", "sm120", **wrong)
    assert done.stdout == "[]\n"
    assert done.stderr.count(f"sglang {version} is outside of what this release knows") == 1


def test_a_newer_release_is_unreviewed_and_a_next_generation_unsupported(python, tree):
    code = """
        import sglang.srt.managers.scheduler
        from deepseek_v4_sm120 import patching
        print([(r.state, r.review) for r in patching.active_engine().records if r.patch.name == "sparse_decode"])
    """
    newer = python(
        code, path=[tree({"sglang/_version.py": "__version__ = '0.5.99'"})], env={"DSV4_SM120_ON_BROKEN": "warn"}
    )
    assert "UNREVIEWED: nobody has looked at" in newer.stdout and "of sglang 0.5.99" in newer.stdout
    next_generation = python(code, path=[tree({"sglang/_version.py": "__version__ = '0.6.0'"})])
    assert next_generation.stdout == "[('UNSUPPORTED', '')]\n"
    assert next_generation.stderr.count("sglang 0.6.0 is outside of what this release knows (>=0.5.12,<0.6)") == 1


BACKEND_0_5_12 = """
    def _create_flashmla_metadata():
        import flash_mla
        return flash_mla.get_mla_metadata()[0]

    def run(q):
        import flash_mla
        return flash_mla.flash_mla_with_kvcache(
            q, q, None, None, 512, None, indices=None, is_fp8_kvcache=True, extra_topk_length=None)
"""
TREE_0_5_12 = {
    "sglang/_version.py": "__version__ = '0.5.12'",
    "sglang/srt/layers/attention/deepseek_v4_backend.py": BACKEND_0_5_12,
    "sglang/kernels/ops/attention/flash_mla_sm120.py": None,
    "sglang/srt/models/deepseek_v4.py": MODEL.replace(", forward_batch=None", "").replace(", x_quant=None", ""),
    "sglang/srt/layers/mhc_head.py": MHC_HEAD,
    "sglang/srt/layers/quantization/mxfp4_marlin_moe.py": "from sglang.srt.utils.common import is_sm90_supported\n"
    + EXPERTS.format(name="Mxfp4MarlinMoEMethod"),
}


def test_0_5_12_without_the_package_flash_mla(python, tree):
    code = f"""
        {FAKE_SM120}
        import importlib.util, sglang.srt.managers.scheduler
        before = importlib.util.find_spec("flash_mla")
        from sglang.srt.layers.attention import deepseek_v4_backend as backend
        print(before, backend._create_flashmla_metadata())
        try:
            backend.run(torch.zeros(1, 1, 1, 1))
        except RuntimeError as error:
            print(error)
        from flash_mla.flash_mla_interface import FlashMLASchedMeta
        from deepseek_v4_sm120 import patching
        print([r.state for r in patching.active_engine().records if r.where.startswith("flash_mla")])
    """.replace("\n    import torch", "\n        import torch").replace("\n    torch.", "\n        torch.")
    lines = python(code, path=[tree(TREE_0_5_12)]).stdout.splitlines()
    assert lines[0] == "None None" and lines[2] == "['APPLIED', 'APPLIED']"
    assert "the package is not installed, and deepseek_v4_sm120 does not serve this call" in lines[1]


def test_0_5_12_without_the_package_on_another_gpu_fails_as_stock_does(python, tree):
    code = """
        from sglang.srt.layers.attention import deepseek_v4_backend as backend
        try:
            backend._create_flashmla_metadata()
        except ModuleNotFoundError as error:
            print(error)
    """
    assert python(code, path=[tree(TREE_0_5_12)]).stdout == "No module named 'flash_mla'\n"


def test_the_real_package_flash_mla_is_patched_through_its_reexport(python, tree):
    interface = """
        def get_mla_metadata(*args, **kwargs):
            return "real metadata", None
        def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
                num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None,
                extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None):
            return "real", q
    """
    package = {
        "flash_mla/__init__.py": "from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata\n",
        "flash_mla/flash_mla_interface.py": interface,
        "sglang/_version.py": "__version__ = '0.5.10.post1.dev7+gabc'",
    }
    code = """
        import sglang.srt.managers.scheduler, torch, flash_mla
        from sglang.srt.layers.attention import deepseek_v4_backend as backend
        from deepseek_v4_sm120 import patching
        q = torch.zeros(1)
        print(backend._create_flashmla_metadata(), backend.run(q)[0],
              [(r.state, r.review[:10]) for r in patching.active_engine().records if r.where.startswith("flash_mla")])
    """
    out = python(code, path=[tree({**TREE_0_5_12, **package})]).stdout
    assert out == "real metadata real [('APPLIED', 'UNREVIEWED'), ('APPLIED', 'UNREVIEWED')]\n"


BACKEND_0_5_14 = """
    class DeepseekV4AttnBackend:
        head_dim_v, softmax_scale = 512, 0.125
        def forward(self, q, k, v, layer, forward_batch, compress_ratio, save_kv_cache=True, attn_sink=None, **_):
            if q.shape[0] > 3:
                return self._forward_prefill_sparse(q=q, layer_id=0, compress_ratio=compress_ratio, attn_sink=attn_sink,
                    forward_batch=forward_batch, token_to_kv_pool=k, core_attn_metadata=v)
            from sglang.srt.layers.attention.flash_mla_sm120 import flash_mla_with_kvcache_sm120
            return flash_mla_with_kvcache_sm120(q=q, k_cache=k, head_dim_v=512, indices=v)
        def _forward_prefill_sparse(self, q, layer_id, compress_ratio, forward_batch, token_to_kv_pool,
                core_attn_metadata, attn_sink):
            return "no SM120 code"
"""
TREE_0_5_14 = {
    "sglang/_version.py": "__version__ = '0.5.14'",
    "sglang/srt/layers/attention/deepseek_v4_backend.py": BACKEND_0_5_14,
    "sglang/srt/layers/attention/flash_mla_sm120.py": SM120_FUNCTION.replace("(kwargs, q)", "(q * 2, kwargs)"),
    "sglang/kernels/ops/attention/flash_mla_sm120.py": None,
}
LONG_PROMPT = """
    import torch
    from types import SimpleNamespace as Some
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
    from deepseek_v4_sm120 import patching
    from deepseek_v4_sm120.sglang_patches.adapters import sparse_decode as adapter
    adapter.device_gate.serves = lambda device: GATE
    adapter.takes = lambda call: print("sparse_decode", tuple(call.indices.shape), call.heads)  # then the original
    pool = Some(page_size=256, swa_window_size=256, swa_kv_pool=Some(kv_cache_total_dim=584),
                get_swa_key_buffer_radix=lambda layer_id: torch.zeros(2, 149760, dtype=torch.uint8))
    lists = Some(swa_page_indices=torch.zeros(5, 128, dtype=torch.int32), swa_topk_lengths=torch.ones(5))
    answer = DeepseekV4AttnBackend().forward(torch.ones(5, 1, 64, 4), pool, lists, Some(tp_q_head_num=16), None, 0)
    print(answer if isinstance(answer, str) else (tuple(answer.shape), float(answer.sum())))
    print([r.state for r in patching.active_engine().records if r.patch.name == "paged_prefill"])
"""


def test_0_5_14_long_prompts_go_to_the_paged_attention(python, tree):
    served = python(LONG_PROMPT.replace("GATE", "True"), path=[tree(TREE_0_5_14)]).stdout
    assert served == "sparse_decode (5, 1, 128) 16\n((5, 64, 4), 2560.0)\n['APPLIED']\n"
    closed = python(LONG_PROMPT.replace("GATE", "False"), path=[tree(TREE_0_5_14)]).stdout
    assert closed == "no SM120 code\n['APPLIED']\n"


# status ---------------------------------------------------------------------------------------------------------------


def status(python, *arguments, **options):
    code = f"import sys; from deepseek_v4_sm120.__main__ import main; sys.exit(main({['status', *arguments]!r}))"
    return python(code, **options)


def test_status_without_sglang_and_torch():
    done = status(Python(sys.executable), flags=["-S"], path=[])
    assert "SGLang            not found" in done.stdout and "sparse_decode" in done.stdout
    assert done.stdout.count("sglang is not on this") == 1, "one line for what is true of all"
    assert f"\nall {len(TABLE.patches)} " in done.stdout


def test_status_json(python, tree):
    found = json.loads(status(python, "--json", path=[tree()], check=False).stdout)
    rows = {row["patch"]: row for row in found["patches"]}
    assert found["sglang"] == "0.5.17" and set(found["build"]) >= {"file", "problem", "version", "archs"}
    assert rows["sparse_decode"]["target"].endswith(":flash_mla_with_kvcache_sm120")
    assert rows["sm120_seams"]["state"] == "NOT APPLICABLE"
    assert set(rows) == {patch.name for patch in TABLE.patches}


def test_status_of_a_broken_tree_and_of_off(python, tree):
    host = tree({"sglang/kernels/ops/attention/flash_mla_sm120.py": "other = 1\n"})
    done = status(python, path=[host], check=False)
    assert done.returncode == 1 and "BROKEN" in done.stdout and "does not define" in done.stdout
    off = status(python, path=[host], env={"DSV4_SM120": "off"})
    assert off.stdout.count("OFF") == 1 and "BROKEN" not in off.stdout


def test_status_shows_what_processes_reported(python, tree, tmp_path):
    env = {**SEAMS, "DSV4_SM120_REPORT": str(tmp_path / "reports")}
    host = tree()
    python("import sglang.srt.server_args", path=[host], env=env)
    (file,) = (tmp_path / "reports").glob("*.json")
    found = json.loads(file.read_text())
    assert [r["state"] for r in found["patches"] if r["target"].startswith("sglang.srt.server_args")] == ["APPLIED"] * 2
    shown = status(python, path=[host], env=env, check=False).stdout
    assert f"pid {file.stem}, which has ended: applied argument_defaults, scrapes_aside, sm120_seams" in shown


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"DSV4_SM120_PROFILE": "/nowhere.json"}, "profile /nowhere.json cannot be read"),
        ({"DSV4_SM120_SET": "no_such=on"}, "DSV4_SM120_SET names no_such"),
        ({"DSV4_SM120_REPORT": "/dev/null/reports"}, "DSV4_SM120_REPORT: /dev/null/reports: Not a directory"),
        ({"DSV4_SM120_UNREVIEWED": "refuse"}, "UNREVIEWED: nobody has looked at"),
    ],
)
def test_status_exits_1_where_something_is_wrong_and_says_what(python, tree, env, words):
    done = status(python, path=[tree()], env=env, check=False)
    assert done.returncode == 1 and words in done.stdout and "Traceback" not in done.stderr
    stops = "A server of this model on a GPU that we serve does not start:" in done.stdout
    assert stops == ("DSV4_SM120_REPORT" not in env)


def test_status_of_a_tree_that_fits_and_of_a_wrong_name(python, tree):
    done = status(python, path=[tree()], env={"DSV4_SM120_REPROT": "x"})
    assert "none of ours and changes nothing; the nearest is DSV4_SM120_REPORT" in done.stdout
    assert "does not start" not in done.stdout and "\nsettings  " not in done.stdout
    assert "\nA server of this model on a GPU that we serve starts, with what is READY.\n" in done.stdout
    assert "  ...flash_mla_sm120:flash_mla_with_kvcache_sm120  " in done.stdout, "as docs/operating.md shows it"
    assert (
        "starts, with" not in status(python, path=[]).stdout
        and "starts" not in status(python, path=[tree({"sglang/_version.py": "__version__ = '0.6.0'"})]).stdout
    )


def test_status_among_strange_reports(python, tree, tmp_path):
    (tmp_path / "1.json").write_text("{")
    os.mkfifo(tmp_path / "2.json")
    (tmp_path / "3.json").symlink_to("/etc/passwd")
    report = {"deepseek_v4_sm120": "0", "pid": 7, "patches": [], "shadow_summary": []}
    (tmp_path / "7.json").write_text(json.dumps({**report, "notes": ["\x1b[2J gone"]}))
    done = status(python, path=[tree()], env={"DSV4_SM120_REPORT": str(tmp_path)})
    for name, why in (("1", "is not JSON"), ("2", "is no regular file"), ("3", "is a symbolic link")):
        assert f"no report of ours: {tmp_path / name}.json: {why}" in done.stdout
    assert f"pid 7, {lifetime.ELSEWHERE}, if it runs: applied nothing" in done.stdout and "\x1b" not in done.stdout
    assert r"\x1b[2J gone" in done.stdout  # written out, as console.say does with all that a terminal would obey


def test_status_shows_what_sglang_was_asked_for(python, tree):
    env = {"SGLANG_OPT_USE_TILELANG_INDEXER": "0"}
    assert (
        "SGLang's indexer  SGLANG_OPT_USE_TILELANG_INDEXER=0: respected"
        in status(python, path=[tree()], env=env).stdout
    )
    assert "SGLang's indexer" not in status(python, path=[tree()]).stdout


# the indexer --------------------------------------------------------------------------------------------------------

INDEXER_CALL = """
    import torch
    from sglang.srt.layers.attention.dsv4 import indexer
    from deepseek_v4_sm120.sglang_patches.adapters import index_select as adapter
    adapter.device_gate.serves = lambda device: GATE
    adapter.takes = lambda args: True
    adapter.index_select = lambda *args, **kwargs: print("ours")
    mode = type("Mode", (), {"is_decode": lambda self: True, "is_extend_without_speculative": lambda self: False})()
    batch = type("Batch", (), {"forward_mode": mode})()
    x = torch.zeros(1, 4, dtype=torch.int32)
    for topk in (indexer.topk_transform_512, indexer.topk_transform_512_pytorch_vectorized):
        print(indexer.C4IndexerBackendMixin().forward_c4_indexer(x, x, None, batch, topk))
"""


def test_the_indexer_of_a_patched_tree(python, tree):
    served = python(INDEXER_CALL.replace("GATE", "True"), path=[tree()])
    assert served.stdout == "ours\nNone\n('torch top-k', 'original logits')\n"
    assert "index_select: SGLang was asked for topk_transform_512_pytorch_vectorized" in served.stderr
    closed = python(INDEXER_CALL.replace("GATE", "False"), path=[tree()])
    assert closed.stdout == "('original top-k', 'original logits')\n('torch top-k', 'original logits')\n"
