"""The table against the real wheels of SGLang, by `ast`: nothing of them is imported or installed.
Kept in $DSV4_WHEEL_CACHE, by default <user cache>/deepseek-v4-sm120/wheels; what PyPI does not give is a failure."""

import ast
import functools
import re
import sys

import pytest
from packaging.version import Version

from deepseek_v4_sm120.patching import contract, engine, ledger
from deepseek_v4_sm120.patching.engine import BROKEN, NOT_APPLICABLE, READY, Engine
from deepseek_v4_sm120.patching.sources import parse
from deepseek_v4_sm120.patching.spec import MODES
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import layer_record
from deepseek_v4_sm120.sglang_patches.names import DSPARK, DSPARK_INPUT, DSPARK_VERIFY, MODEL, MODEL_RUNNER, NCCL
from deepseek_v4_sm120.sglang_patches.rows import scheduler
from deepseek_v4_sm120.sglang_patches.rows.compressor import MODULE as COMPRESSOR_MODULE
from deepseek_v4_sm120.sglang_patches.rows.index_select import DEEP_GEMM, DEEP_GEMM_LOGITS, DEEP_GEMM_LOGITS_FP4
from deepseek_v4_sm120.sglang_patches.rows.mhc import FUSED, MTP_MODEL
from deepseek_v4_sm120.sglang_patches.rows.sampling import DRAW, EAGLE, PENALTY_LIBRARY, RESULTS
from deepseek_v4_sm120.sglang_patches.table import (
    BACKEND,
    CUTLASS_EXPERTS,
    EXTENSION,
    FP8_METHOD,
    INDEXER,
    LEDGER,
    LEFT_AT_TRUTH,
    MARLIN_EXPERTS,
    MXFP4_MOE,
    SHARED_ADD,
    SM120_ATTENTION_0_5_14,
    SM120_KEYS,
    TABLE,
)
from deepseek_v4_sm120.specs import bf16_linear, fp8_linear, index_select, mhc, mxfp4_moe, provider
from tests.patching import http_rows, review, scheduler_rows
from tests.patching.wheels import RELEASES, WheelSources, check_once, content, every_release, since

HOPPER = "sgl_kernel.flash_mla:flash_mla_with_kvcache"  # in sglang-kernel's wheel; that of 0.5.17's pin was read
SAMPLER, MARLIN = (where.partition(":")[0] for where in (DRAW, MARLIN_EXPERTS))
PREFILL_RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
STATE, ROPE = "sglang.srt.distributed.parallel_state", "sglang.kernels.ops.attention.deepseek_v4_rope"
DRAFT_RUNNER, DRAFT_EXTEND_RUNNER = (f"{EAGLE[:-6]}_{graph}_cuda_graph_runner" for graph in ("draft", "draft_extend"))
EVERYWHERE = {
    **{"stripped_thoughts": scheduler.REQUEST.partition(":")[0], "nccl_start": NCCL},
    **{"argument_defaults": "sglang.srt.arg_groups.deepseek_v4_hook", "index_select": INDEXER, "bf16_linear": INDEXER},
    **{"fp8_linear": FP8_METHOD.partition(":")[0], "mxfp4_moe": SHARED_ADD.partition(":")[0], "wo_a": MODEL},
    **{"min_p_tokens": SAMPLER, "longest_prompt": "sglang.srt.managers.tp_worker", "draft_chain": BACKEND},
}
SINCE_0_5_23 = {"min_p_verify": EAGLE, "prompts_in_halves": PREFILL_RUNNER}


def expected(version: str) -> dict[str, str]:
    """What the normal mode finds in a release: patch -> module of its last target."""
    found = {**EVERYWHERE, "mhc": MTP_MODEL.partition(":")[0], "grammars": "sglang.srt.constrained.xgrammar_backend"}
    if not since(version, "0.5.13"):
        found |= dict(sparse_decode="flash_mla", sched_meta="flash_mla", mxfp4_moe=MARLIN, marlin_on_sm120=MARLIN)
    elif not since(version, "0.5.16"):
        found |= {"sparse_decode": SM120_ATTENTION_0_5_14, "paged_prefill": BACKEND}
    ours = http_rows.expected(version) | scheduler_rows.expected(version)
    ours |= SINCE_0_5_23 if since(version, "0.5.23") else {}
    found |= {name: where.partition(":")[0] for name, where in ours.items()}
    found |= {} if since(version, "0.5.19") else {"held_latents": MODEL}
    found |= {"all_reduce": STATE, "dealt_index": INDEXER} if since(version, "0.5.13") else {}
    if since(version, "0.5.14"):
        found["updated_sinks"] = MODEL_RUNNER + ("_components.weight_updater" if since(version, "0.5.16") else "")
        found |= {"loaded_prefixes": PREFILL_RUNNER, "greedy_argmax": DRAFT_EXTEND_RUNNER}
        found["draft_input"] = MTP_MODEL.partition(":")[0]
        found |= {"penalties": PENALTY_LIBRARY, "prompt_logprobs": RESULTS.partition(":")[0], "seeded_draws": SAMPLER}
        found["min_tokens"] = DSPARK_VERIFY if since(version, "0.5.18") else EAGLE
        found |= {"compressor": COMPRESSOR_MODULE, "unpadded_heads": MODEL if since(version, "0.5.20") else BACKEND}
        found |= {} if since(version, "0.5.21") else {"draft_probabilities": DRAFT_RUNNER}
    if since(version, "0.5.14") and not since(version, "0.5.18"):
        found["plain_angles"] = ROPE if since(version, "0.5.16") else "sglang.srt.layers.deepseek_v4_rope"
    if since(version, "0.5.16"):
        found |= {"mhc": DSPARK.partition(":")[0], "min_p_dspark": DSPARK_VERIFY, "step_tables": BACKEND}
        found |= {"dspark_penalties": DSPARK_VERIFY} if since(version, "0.5.18") else {"dspark_windows": DSPARK_INPUT}
        found |= {"sparse_decode": "sglang.kernels.ops.attention.flash_mla_sm120", "dspark_lengths": BACKEND}
    return found


def index_names(version: str) -> tuple[int, int, int]:
    """(logits, our top-k, top-k of an explicit choice) that the indexer is found with."""
    return (1, 2, 1 + since(version, "0.5.17") + since(version, "0.5.19"))


def num_seams(version: str) -> int:
    return 3 * since(version, "0.5.13") + sum(since(version, v) for v in ("0.5.17", "0.5.19", "0.5.20", "0.5.21"))


SURVEYED: dict[tuple, Engine] = {}  # what several tests look at


@pytest.fixture
def inspect_wheel(monkeypatch, sglang_wheel):
    """inspect_wheel(version, mode) -> the engine after looking at that wheel, shared by tests unless it is to be
    `fresh`, or to have `choices`: then only their `patch` is looked at. called: the version it shall claim."""
    monkeypatch.setitem(sys.modules, "deepseek_v4_sm120.ops.shared.extension", type(sys)("extension"))
    sys.modules["deepseek_v4_sm120.ops.shared.extension"].load = lambda: None  # _C is test_extension.py's business
    monkeypatch.setattr(contract, "check", check_once)

    def make(version, mode="sm120", called=None, fresh=False, patch=None, **choices):
        if not (fresh or choices) and (version, mode, called) in SURVEYED:
            return SURVEYED[version, mode, called]
        wheel = sglang_wheel(version)
        monkeypatch.setattr(engine, "Sources", lambda stand_ins=None: WheelSources(wheel, stand_ins))
        if called:
            monkeypatch.setattr(engine, "package_version", lambda host, sources: called)
        settings = Settings(force=None if mode == "sm120" else mode, choices=choices)
        made = Engine(TABLE, host="sglang", settings=settings)
        if choices:
            made._check([patch])  # as it does when the patch's module is imported
            return made
        made.survey()
        if not fresh:
            SURVEYED[version, mode, called] = made
        return made

    return make


def found_in(made, *, patch=None):
    return [r for r in made.records if r.target is not None and patch in (None, r.patch.name)]


def test_the_ledger_has_every_release_from_0_5_12_to_0_5_23():
    """Post releases included, in their order; of a release exactly the definitions that rows of the table are for."""
    posts = {"0.5.12": "0.5.12.post1", "0.5.13": "0.5.13.post1", "0.5.15": "0.5.15.post1"}
    plain = [f"0.5.{minor}" for minor in range(12, 24)]
    assert list(RELEASES) == [release for one in plain for release in (one, posts.get(one)) if release]
    wheres = {target.where for patch in TABLE.patches for target in patch.targets}
    for release, known in ledger.read(LEDGER).releases.items():
        rows = review.targets(release)
        missing = {where for where in rows if where not in known}
        assert set(known) <= set(rows) <= wheres, release
        assert missing == ({HOPPER} if HOPPER in rows and release != "0.5.17" else set()), release
    assert any(EXTENSION in patch.needs for patch in TABLE.patches)


@every_release()
def test_normal_mode(inspect_wheel, version):
    made = inspect_wheel(version)
    assert made.version == version
    found = found_in(made)
    assert {r.patch.name: r.target.module for r in found} == expected(version)
    for record in found:
        assert (record.state, record.review) == (READY, "reviewed"), f"{record.where}: {record.reason}; {record.review}"
    assert {r.state for r in made.records} == {READY, NOT_APPLICABLE}


@every_release()
def test_seams_mode(inspect_wheel, version):
    made = inspect_wheel(version, "seams")
    found = found_in(made, patch="sm120_seams")
    assert len(found) == num_seams(version)
    for record in found:
        assert (record.state, record.review) == (READY, "reviewed"), f"{record.where}: {record.reason}; {record.review}"
    asked_for = {"marlin_on_sm120", "dealt_index", "prompts_in_halves"}  # by nobody
    assert {r.patch.name for r in found_in(made)} >= set(expected(version)) - asked_for


@pytest.mark.parametrize("version", ("0.5.14", "0.5.17", "0.5.20", "0.5.22"))
def test_ops_mode_targets_what_sglang_calls_on_other_gpus(inspect_wheel, version):
    """The function itself is in the wheel of sglang-kernel (380 MB, not fetched); here is how SGLang calls it."""
    made = inspect_wheel(version, "ops")
    (record,) = found_in(made, patch="sparse_decode_hopper")
    assert record.reason == "sgl_kernel.flash_mla:flash_mla_with_kvcache: there is no module sgl_kernel.flash_mla"
    names = set(record.target.contract.names)
    tree = made.sources.parse(BACKEND).tree
    calls = contract.passed_keywords(tree, "flash_mla_with_kvcache")
    assert calls and all(call <= names for call in calls)
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    aliases = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    assert "sgl_kernel.flash_mla" in imported + aliases


@every_release("0.5.23")
def test_ops_mode_from_0_5_23_on_targets_sglangs_own_module(inspect_wheel, version):
    """tests/patching/test_wheel_flash_mla.py runs it."""
    made = inspect_wheel(version, "ops")
    (record,) = found_in(made, patch="sparse_decode_hopper")
    assert (record.state, record.review) == (READY, "reviewed"), record.reason
    assert record.target.module == "sglang.kernels.ops.attention.flash_mla_interface"
    assert "sgl_kernel.flash_mla" not in made.sources.read(BACKEND)


@every_release("0.5.13")
def test_the_sm120_call_passes_what_the_function_reads(inspect_wheel, version):
    made = inspect_wheel(version)
    calls = contract.passed_keywords(made.sources.parse(BACKEND).tree, "flash_mla_with_kvcache_sm120")
    assert calls == [set(SM120_KEYS)]


CHOICES = dict.fromkeys(("reproducible", "draft_head", "prompts_in_halves", "dealt_products"), "0.5.14")
CHOICES |= dict(router_topk="0.5.15", prefill_graphs="0.5.17")
OF_SEVERAL_CARDS, OF_GRAPHS = ("dealt_index", "dealt_streams"), ("prefill_graphs", "compiled_streams")


@every_release()
def test_settings_name_variables_and_arguments_that_this_version_reads(inspect_wheel, version):
    made = inspect_wheel(version)
    variables = made.sources.read("sglang.srt.environ")
    fields = "".join(
        content(made.sources.wheel, member)
        for member in made.sources.members
        if member == "sglang/srt/server_args.py" or "/arg_groups/fields/" in member
    )
    for row in made.steering.rows.values():
        assert [name for name in row.environment if f"    {name} = Env" not in variables] == [], row.name
        assert [name for name in row.arguments if f"    {name}: " not in fields] == [], row.name
    assert not since(version, "0.5.14") or all(f"    {name}: " in fields for name in layer_record.ARGUMENTS)
    others = set(made.steering.rows) - {*CHOICES, *OF_GRAPHS, *OF_SEVERAL_CARDS, "grammar_looks"}
    assert bool(others) == (version == "0.5.17" or not since(version, "0.5.13") or since(version, "0.5.20"))
    assert {since(version, "0.5.13")} == {name in made.steering.rows for name in OF_SEVERAL_CARDS}
    assert {name for name in CHOICES if since(version, CHOICES[name])} == set(CHOICES) & set(made.steering.rows)


@every_release("0.5.13")
def test_the_places_of_dealt_streams_fit(inspect_wheel, version):
    made = inspect_wheel(version, patch="dealt_streams", dealt_streams="on")
    found = found_in(made, patch="dealt_streams")  # behind those of `mhc`, which they wrap
    assert len(found) == 5 and {(record.state, record.review) for record in found} == {(READY, "reviewed")}
    ours = [
        (record.where, record.patch.name) for record in made.records if record.patch.name in ("mhc", "dealt_streams")
    ]
    for record in found[2:]:
        assert ours.index((record.where, "mhc")) < ours.index((record.where, "dealt_streams"))


@every_release("0.5.14")
def test_the_place_of_dealt_products_fits_behind_that_of_the_whole(inspect_wheel, version):
    made = inspect_wheel(version, patch="dealt_products", dealt_products="on")
    [record] = found_in(made, patch="dealt_products")
    assert (record.state, record.review) == (READY, "reviewed") and "dealt_products" in made.in_place()
    assert [one.patch.name for one in made.records if one.where == record.where] == ["bf16_linear", "dealt_products"]


@every_release("0.5.14")
def test_the_places_of_a_drafts_head_fit(inspect_wheel, version):
    made = inspect_wheel(version, patch="draft_head", draft_head="on")
    found = found_in(made, patch="draft_head")
    assert {(record.state, record.review) for record in found} == {(READY, "reviewed")}
    modules = [record.target.module for record in found]
    assert MODEL in modules and (DSPARK.partition(":")[0] in modules) == since(version, "0.5.16")


@every_release("0.5.14")
def test_a_reproducible_servers_places_fit(inspect_wheel, version):
    for patch, places in (("head", 1), ("arguments", 1), ("sampling", 3 if since(version, "0.5.17") else 2)):
        made = inspect_wheel(version, patch=f"reproducible_{patch}", reproducible="on")
        told = [(record.state, record.review) for record in found_in(made, patch=f"reproducible_{patch}")]
        assert told == [(READY, "reviewed")] * places


def test_the_prefill_interval_of_0_5_17_fits_its_scheduler(inspect_wheel, monkeypatch):
    assert not found_in(inspect_wheel("0.5.17"), patch="prefill_interval")
    made = inspect_wheel("0.5.17", patch="prefill_interval", prefill_decode_interval_0_5_17="4")
    (record,) = found_in(made, patch="prefill_interval")
    assert (record.state, record.review) == (READY, "reviewed") and made.steering.value(record.patch.default) == 4
    scheduler = made.sources.read(record.target.module)
    assert "if self.chunked_req.extend_range.end > len(self.chunked_req.prefix_indices)" in scheduler


@every_release()
def test_the_preflight_module_exists(inspect_wheel, version):
    assert inspect_wheel(version).sources.path(TABLE.preflight) is not None


def test_modules_left_at_the_truth_exist_in_0_5_17(inspect_wheel):
    sources = inspect_wheel("0.5.17").sources
    left = [module for module in LEFT_AT_TRUTH if module.startswith("sglang.")]
    assert left and all(sources.path(module) is not None for module in left)


@pytest.mark.parametrize("version", [r for r in RELEASES if since(r, "0.5.13") and not since(r, "0.5.19")])
def test_every_sm120_question_is_told_or_left_on_purpose(inspect_wheel, version):
    """DeepSeek-V4's own modules that ask `is_sm120_supported` by name are all among the seams."""
    made = inspect_wheel(version, "seams")
    sources, told = made.sources, {r.target.module for r in found_in(made, patch="sm120_seams")}
    asking = set()
    for member in sources.members:
        in_scope = "deepseek_v4" in member or "/dsv4/" in member
        if in_scope and member.endswith(".py") and "is_sm120_supported" in content(sources.wheel, member):
            asking.add(member.removesuffix(".py").replace("/", "."))
    assert asking and asking <= told


def test_a_wheel_newer_than_the_table_is_unreviewed_in_words(inspect_wheel):
    """Simulated: 0.5.23's wheel that calls itself 0.5.24. dspark_lengths, draft_chain and step_tables end with the last
    release that was run: who reads what they give, or makes what they are given, is no part of what they replace."""
    found = found_in(inspect_wheel("0.5.23", called="0.5.24"))
    assert {r.patch.name for r in found} == set(expected("0.5.23")) - {"dspark_lengths", "draft_chain", "step_tables"}
    for record in found:
        assert record.state == READY
        assert record.review == "UNREVIEWED: nobody has looked at sglang 0.5.24; this code is that of 0.5.23"


def test_a_changed_function_is_unreviewed_and_a_changed_contract_broken(inspect_wheel):
    """Simulated: 0.5.20's function with other code, then one that reads a key more."""
    made = inspect_wheel("0.5.20", fresh=True)
    (record,) = found_in(made, patch="sparse_decode")
    original = made.sources.read(record.target.module)
    stock = made.sources.parse
    for old, new, state, words in [
        ('kwargs["head_dim_v"]', 'int(kwargs["head_dim_v"])', READY, "nobody has looked at this code (digest "),
        ('kwargs["head_dim_v"]', 'kwargs["head_dim_v"] + kwargs["sinks"]', BROKEN, "unexpected sinks"),
    ]:
        assert old in original
        made.sources.parse = lambda module, old=old, new=new: (
            parse(original.replace(old, new)) if module == record.target.module else stock(module)
        )
        record.state = READY
        made.survey()
        assert record.state == state and words in record.reason + record.review


@pytest.mark.parametrize("mode", MODES)
def test_no_version_falls_through(inspect_wheel, mode):
    """Read or not: each has exactly one place for the attention call."""
    for version in (*RELEASES, "0.5.16.post1", "0.5.19.post2", "0.5.24", "0.5.30.post1"):
        made = inspect_wheel("0.5.17", mode, called=version)
        assert len(found_in(made, patch="sparse_decode")) == 1, version
    for development in ("0.5.13.dev3", "0.5.16.dev1+gabc", "0.5.20rc1", "0.5.24.dev9", "0.0.0.dev0"):
        made = inspect_wheel("0.5.17", mode, called=development)
        assert [r.state for r in found_in(made, patch="sparse_decode")] == [READY], development


QUANTIZATION = "sglang.srt.layers.quantization"


def method_body(made, where, name) -> str:
    module, _, cls = where.partition(":")
    return ast.unparse(contract.find_definition(made.sources.parse(module).tree, f"{cls}.{name}"))


@every_release()
def test_experts_what_the_adapter_takes_from_the_methods_is_there(inspect_wheel, version):
    """Names of weights and scales, the order of w13, who scales: as adapters/mxfp4_moe.py says."""
    made = inspect_wheel(version)
    targets = {r.target.where for r in found_in(made, patch="mxfp4_moe")}
    classes = {where.rpartition(".")[0] for where in targets if where.startswith(QUANTIZATION)}
    assert (SHARED_ADD in targets) == since(version, "0.5.13")
    assert MARLIN_EXPERTS in classes and (CUTLASS_EXPERTS in classes) == since(version, "0.5.16")
    marlin = method_body(made, MARLIN_EXPERTS, "create_weights")
    for name in ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv"):
        assert f"'{name}'" in marlin
    assert "dtype=torch.int8" in marlin
    assert ("float8_e8m0fnu" in marlin) == since(version, "0.5.16")  # before: float32 powers of two
    for where in classes:
        process = method_body(made, where, "process_weights_after_loading")
        assert "self._fp8.process_weights_after_loading(layer)" in process
        module = where.partition(":")[0]
        tree = made.sources.parse(module).tree
        up_first = contract.find_definition(tree, f"{where.partition(':')[2]}.load_up_proj_weight_first")
        assert (up_first is not None) == (where == CUTLASS_EXPERTS)
        in_topk = contract.find_definition(tree, f"{where.partition(':')[2]}.fuse_routed_scaling_factor_in_topk")
        assert (in_topk is not None) == since(version, "0.5.19"), where
        twice = where == MARLIN_EXPERTS and Version(version).release == (0, 5, 13)  # stock's own SM120 branch there
        assert ("routed_scaling" in method_body(made, where, "apply")) == twice


@every_release()
def test_experts_the_model_scales_where_the_router_does_not(inspect_wheel, version):
    """Up to 0.5.18 the 1.5 comes behind the experts, for these very classes; from 0.5.19 on only if topk has not."""
    made = inspect_wheel(version)
    module = f"{QUANTIZATION}.mxfp4_flashinfer_trtllm_moe"
    tree = made.sources.parse(module).tree
    body = ast.unparse(contract.find_definition(tree, "maybe_fuse_routed_scale_and_shared_add"))
    assert "Mxfp4MarlinMoEMethod" in body and "Mxfp4FlashinferCutlassMoEMethod" in body
    assert ("should_fuse_routed_scaling_factor_in_topk" in body) == since(version, "0.5.19")
    assert "maybe_fuse_routed_scale_and_shared_add(" in made.sources.read("sglang.srt.models.deepseek_v2")


@every_release()
def test_experts_dispatch_output_and_ids_are_as_the_adapter_reads_them(inspect_wheel, version):
    made = inspect_wheel(version)
    text = made.sources.read("sglang.srt.layers.moe.token_dispatcher.standard")
    names = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert {"StandardDispatcher", "StandardDispatchOutput", "StandardCombineInput"} <= names
    assert "self.skip_local_expert_mapping" in text and "enable_flashinfer_mxfp4_moe" in text
    layer = made.sources.read("sglang.srt.layers.moe.fused_moe_triton.layer")
    assert "self.moe_ep_rank" in layer and "self.moe_runner_config" in layer and "self.dispatcher" in layer


def test_experts_of_an_fp8_checkpoint_use_neither_class(inspect_wheel):
    """Both classes are made only where the configuration says FP4 experts."""
    for version in RELEASES:
        sources = inspect_wheel(version).sources
        tree, text = sources.parse(f"{QUANTIZATION}.fp8").tree, sources.read(f"{QUANTIZATION}.fp8")
        method = contract.find_definition(tree, "Fp8Config.get_quant_method")
        ifs = [node for node in ast.walk(method) if isinstance(node, ast.If)]
        asking = [statement for node in ifs if "is_fp4_experts" in ast.unparse(node.test) for statement in node.body]
        for name in ("Mxfp4MarlinMoEMethod", "Mxfp4FlashinferCutlassMoEMethod"):
            makers = {call for statement in asking for call in calls_of(statement, name)}
            assert len(makers) == text.count(f"{name}(") == 1, (version, name)
    assert MXFP4_MOE in TABLE.patches


# index_select: SGLang's own pairing of logits and top-k


def indexer_function(made, name="forward_c4_indexer"):
    tree = made.sources.parse(INDEXER).tree
    (found,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    return found


def calls_of(tree: ast.AST, prefix: str) -> list[ast.Call]:
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return [n for n in named if n.func.id == prefix or (prefix.endswith("_") and n.func.id.startswith(prefix))]


@every_release()
def test_indexer_rows(inspect_wheel, version):
    found = found_in(inspect_wheel(version), patch="index_select")
    kinds = [r.target.replacement.rpartition(":")[2] for r in found]
    names = ("replace_logits", "replace_topk", "replace_other_topk")
    assert tuple(kinds.count(name) for name in names) == index_names(version)
    assert kinds.count("replace_forward") == 1


@every_release()
def test_the_indexer_hands_logits_straight_to_a_topk_that_the_table_knows(inspect_wheel, version):
    """What replace_logits and replace_topk rest on: eight positional arguments, and nobody else looks at the logits."""
    made = inspect_wheel(version)
    forward = indexer_function(made)
    (logits_call,) = calls_of(forward, "fn")
    assert len(logits_call.args) == 8 and not logits_call.keywords
    known = {r.target.qualname for r in found_in(made, patch="index_select")}
    topk_calls = calls_of(forward, "topk_transform_")
    assert topk_calls and {c.func.id for c in topk_calls} <= known
    for call in topk_calls:
        assert isinstance(call.args[0], ast.Name) and call.args[0].id == "logits" and not call.keywords
        assert len(call.args) in (6, 7)
    methods = [n for n in ast.walk(forward) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    assert {n.func.attr for n in methods if "topk_transform" in n.func.attr} <= {"flashinfer_topk_transform"}
    uses = [
        n for n in ast.walk(forward) if isinstance(n, ast.Name) and n.id == "logits" and isinstance(n.ctx, ast.Load)
    ]
    passed = [a for n in ast.walk(forward) if isinstance(n, ast.Call) for a in n.args]
    assert uses and all(any(use is argument for argument in passed) for use in uses)


@every_release()
def test_where_the_indexer_takes_its_logits_from(inspect_wheel, version):
    made = inspect_wheel(version)
    imports = [n for n in ast.walk(indexer_function(made)) if isinstance(n, ast.ImportFrom)]
    sources = {(n.module, a.name) for n in imports for a in n.names if a.asname == "fn"}
    assert (DEEP_GEMM, DEEP_GEMM_LOGITS) in sources
    assert ((DEEP_GEMM, DEEP_GEMM_LOGITS_FP4) in sources) == since(version, "0.5.13")
    (record,) = [r for r in found_in(made, patch="index_select") if r.target.replacement.endswith("replace_logits")]
    in_indexer = record.target.module == INDEXER
    assert in_indexer or (record.target.module, record.target.qualname) in sources


def test_the_indexer_of_versions_to_come(inspect_wheel):
    """0.5.20 renamed the top-k."""
    for minor in range(24, 26):
        found = found_in(inspect_wheel("0.5.17", called=f"0.5.{minor}"), patch="index_select")
        kinds = [r.target.replacement.rpartition(":")[2] for r in found]
        assert [kinds.count(k) for k in ("replace_forward", "replace_logits", "replace_topk")] == [1, 1, 2], minor


# mhc: the boundary's calls


def mhc_rows(made) -> dict[str, str]:
    """Replacement -> target, of the rows that this version has; each at most once."""
    found = [(r.target.replacement.rpartition(":replace_")[2], r.target.where) for r in found_in(made, patch="mhc")]
    assert len(dict(found)) == len(found)
    return dict(found)


@every_release()
def test_mhc_rows(inspect_wheel, version):
    found = set(mhc_rows(inspect_wheel(version)))
    fused = {"fusion_enabled", "fused_post_pre", "layer_forward"} if since(version, "0.5.13") else set()
    dspark = {"dspark_head"} if since(version, "0.5.16") else set()
    assert found == {"hc_pre", "hc_post", "fused_head", "hc_head"} | fused | dspark


def all_calls(tree: ast.AST, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", None)) == name]


@every_release("0.5.13")
def test_mhc_boundaries_are_called_as_the_adapter_reads_them(inspect_wheel, version):
    """Twelve positional arguments, the last two epsilons equal, then the norm's weight and epsilon."""
    made = inspect_wheel(version)
    model = "sglang.srt.models.deepseek_v4"
    caller = model if not since(version, "0.5.19") else mhc_rows(made)["fusion_enabled"].partition(":")[0]
    calls = [call for call in all_calls(made.sources.parse(caller).tree, FUSED) if call.args]  # AMD's has keywords only
    assert calls
    for call in calls:
        assert len(call.args) == 12 and {keyword.arg for keyword in call.keywords} == {"norm_weight", "norm_eps"}
        assert ast.unparse(call.args[8]) == ast.unparse(call.args[9])
    if since(version, "0.5.17"):  # through get_mhc_ops, a cached tuple that imports it at the first call
        assert FUSED in made.sources.read(model)


@every_release()
def test_mhc_layers_have_what_the_adapter_reads(inspect_wheel, version):
    made = inspect_wheel(version)
    text = made.sources.read("sglang.srt.models.deepseek_v4")
    for name in ("rms_norm_eps", "hc_eps", "hc_sinkhorn_iters"):
        assert f"self.{name} = " in text
    assert ("_MHC_POST_MULT_VALUE = 2.0" in text) == (since(version, "0.5.13") and not since(version, "0.5.23"))
    mtp = made.sources.read(MTP_MODEL.partition(":")[0])
    assert "self.rms_norm_eps = " in mtp and "self.hc_eps = " in mtp
    for call in all_calls(made.sources.parse("sglang.srt.models.deepseek_v4").tree, "hc_pre"):
        assert {keyword.arg for keyword in call.keywords} <= {"norm", "forward_batch"}
    heads = all_calls(made.sources.parse("sglang.srt.models.deepseek_v4").tree, "fused_hc_head")
    assert heads and all({keyword.arg for keyword in call.keywords} == {"norm_eps", "hc_eps"} for call in heads)


@every_release()
def test_wo_a_rows(inspect_wheel, version):
    """What is replaced of it, each once; from 0.5.17 on the expansion is a function, and more hands weights over."""
    kinds = [r.target.replacement.rpartition(":replace_")[2] for r in found_in(inspect_wheel(version), patch="wo_a")]
    named = ["init", "load_weights", "direct", "direct_custom", "rope", "forward", *["load_model"] * 3]
    assert sorted(kinds) == sorted(named + ["expansion", "load_model", "quant_support"] * since(version, "0.5.17"))


@every_release()
def test_calibrate_finds_the_stock_operators(inspect_wheel, version, monkeypatch):
    """The functions that its providers import exist in this release under these names."""
    sources, numbers = inspect_wheel(version).sources, Version(version).release
    monkeypatch.setattr(index_select, "sglang_version", lambda: numbers)

    def defines(module, name):
        text = sources.read(module)
        return text is not None and name in functions_in(text)

    assert defines(mxfp4_moe.MARLIN, "fused_marlin_moe")
    assert defines(mxfp4_moe.REPACK, "prepare_moe_mxfp4_layer_for_marlin")
    assert defines(mxfp4_moe.WORKSPACE, "marlin_make_workspace")
    logits = index_select._stock_logits()
    assert (logits is None) == (not since(version, "0.5.13"))
    if logits is not None:
        assert defines(*logits) and sum(defines(*home) for home in index_select.TOPK) == 1
    cutlass = sources.read("sglang.srt.layers.moe.moe_runner.flashinfer_cutlass") or ""
    assert ("mxfp8_quantize" in cutlass) == (numbers >= mxfp4_moe.CUTLASS_SINCE)

    assert sum(defines(home, bf16_linear.LINEAR) for home in bf16_linear.LINEAR_HOMES) == 1
    gate = sources.read("sglang.srt.models.deepseek_v2")
    assert defines(*bf16_linear.TINY_GEMM) == defines(*bf16_linear.TINY_GEMM_ROWS) == ("tiny_gemm_bf16(" in gate)
    router = [home for home in bf16_linear.ROUTER_GEMM_HOMES if defines(home, bf16_linear.ROUTER_GEMM)]
    assert len(router) == (since(version, "0.5.15") and not since(version, "0.5.20"))
    forward = ast.unparse(
        contract.find_definition(sources.parse("sglang.srt.models.deepseek_v2").tree, "MoEGate.forward")
    )
    few = bf16_linear.ROUTER_GEMM_ROWS
    asked = (f"_device_sm in (100, 103) else {few}" in forward, f"hidden_states.shape[0] <= {few}" in forward)
    assert not router or any(asked)

    wrapper = sources.read(f"{provider.DEEP_GEMM_WRAPPER}.entrypoint")
    assert (f"envs.{provider.DEEP_GEMM_PDL}.get() and hasattr(deep_gemm" in wrapper) == (numbers >= (0, 5, 13))
    assert "ENABLE_JIT_DEEPGEMM" in sources.read(f"{provider.DEEP_GEMM_WRAPPER}.configurer")
    method = sources.read(fp8_linear.METHOD)
    tree = ast.parse(method)
    found = class_methods(tree, "Fp8LinearMethod") | class_methods(tree, "Fp8Config")
    assert {"__init__", "process_weights_after_loading", "apply", "from_config"} <= found
    assert defines(fp8_linear.UTILS, "initialize_fp8_gemm_config")
    utils = sources.read(fp8_linear.UTILS)
    assert "get_exec" in utils or "def initialize_fp8_gemm_config(server_args: ServerArgs)" in utils


@functools.cache
def functions_in(text: str) -> set[str]:
    """Names of the functions at the top of a module."""
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def class_methods(tree, name):
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


@every_release()
def test_calibrate_calls_the_boundary_that_sglang_runs(inspect_wheel, version, monkeypatch):
    """Where mhc's kernels are, what they ask of a server, and which of them are the default."""
    sources, numbers = inspect_wheel(version).sources, Version(version).release
    (text,) = [text for home in mhc.HOMES if (text := sources.read(home)) is not None]
    functions = functions_in(text)
    assert {"mhc_pre", "mhc_post", "hc_split_sinkhorn"} <= functions
    assert ("mhc_fused_post_pre" in functions) == (numbers >= mhc.FUSED_SINCE)
    environment = sources.read("sglang.srt.environ")
    assert ("SGLANG_OPT_FUSE_MHC_POST_PRE = EnvBool(True)" in environment) == (numbers >= mhc.FUSED_BY_DEFAULT_SINCE)
    assert all(f"{name} = EnvBool(True)" in environment for name in mhc.ON_SM120)
    asked = re.findall(r"\b(get_\w+group|is_allocation_\w+|use_symm\w+|is_\w+_round_robin_split|get_parallel)\(", text)
    assert set(asked) <= set(mhc.WITHOUT_SERVER)
    places = ("sglang.srt.server_args", "sglang.srt.arg_groups.model_hook")
    set_on_sm120 = "".join(sources.read(module) or "" for module in places)
    if numbers >= (0, 5, 13):  # 0.5.12 leaves it to us: sglang_patches/defaults.py
        assert all(f"envs.{name}.set(False)" in set_on_sm120 for name in mhc.ON_SM120)
