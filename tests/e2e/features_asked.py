"""What the stage `features` asks: its engines, and the lines of its matrix (features_stage.py)."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

PREFIX = "features_"
BASE, TEXT_BASE = "base", "text"
SET, REPRODUCIBLE = "DSV4_SM120_SET", "reproducible=on,prefill_decode_interval=off,prefill_decode_interval_0_5_17=off"
SGLANGS = f"{REPRODUCIBLE},wo_a=off,mxfp4_moe=off"  # what SGLang's own layers make of a checkpoint
ROUND, ALONE, LONG, FULL = ("round", "again"), ("alone",), ("long",), ("full",)
TWICE = ("alone", "alone_again")
EXPERTS = {"n_routed_experts": 16}  # small engines: many fit a card
NO_END = {"eos_token_id": 1 << 20}  # no token of the vocabulary: answers are of the length that was asked for
HOST_POOLS_S = 300.0  # limit of an engine whose pools in host memory are page-locked at its start, 9 s each
FOLDERS_S = 260.0  # of one that loads from a folder, twelve side by side
DISK = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
CHECKPOINT, SAVED, PRESHARDED = "checkpoint", "saved", "presharded"
WRITTEN = (SAVED, PRESHARDED)  # by another engine
PRESHARDED_PLUGIN = Path(__file__).resolve().parent / "presharded_plugin"


def flags(**arguments):
    return tuple(word for name, value in arguments.items() for word in ("--set", f"{name}={json.dumps(value)}"))


def override(**more):
    return flags(json_model_override_args=json.dumps(EXPERTS | more))


def handed_over(why):
    """What our layers say where they leave theirs to SGLang's."""
    return tuple(f"{operator}: SGLang's own, as .*{why}" for operator in ("wo_a", "mxfp4_moe"))


def speculative(algorithm, **more):
    return flags(speculative_algorithm=algorithm, **more)


EAGLE = speculative("EAGLE", speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
SMALL = ("--variant", "flash6h", "--mem", "0.9", "--max-running", "16", "--context", "8192", "--graph-bs", "1", "8")
SMALL += flags(swa_full_tokens_ratio=1.0)  # whole prompts fit the sliding windows' pool
FORCED, FREE = ("--phases", "features"), ("--phases", "features_text")
RADIX, CHUNKS = ("--radix",), ("--chunk", "512")
HOST = (*RADIX, *flags(enable_hierarchical_cache=True, hicache_ratio=4.0))
DISKS = (*HOST, *flags(hicache_storage_backend="file", hicache_storage_prefetch_policy="wait_complete"))
TWO = flags(tp_size=2, enforce_disable_flashinfer_allreduce_fusion=True)
STAGES = flags(pp_size=2)
DATA_PARALLEL = (*TWO, *flags(dp_size=2, enable_dp_attention=True))
GRAMMAR = flags(grammar_backend="xgrammar", skip_tokenizer_init=False)
RECOMMENDED = (*RADIX, *CHUNKS, *EAGLE)  # README's, with its speculation
# SGLang's own mHC kernels compile 21 times at the first weights that it loads from elsewhere; SM120 has them off
UNCOMPILED = {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0"}
NORMALLY, OF_SHARDS, FROM_SHARDS = (("--load-format", name) for name in ("auto", "presharded", "sharded_state"))
WRITES, READS = "No presharded checkpoint at .*; doing first-time load", "Loading from presharded checkpoint at"
# both processes see both cards: a card's memory is opened by the other process's context of that card
DECODES = flags(disaggregation_mode="decode", disaggregation_transfer_backend="nixl", base_gpu_id=1)
DECODES += flags(decode_log_interval=1)
PREFILLS = {"disaggregation_mode": "prefill", "base_gpu_id": 0}
DSPARK = speculative("DSPARK", speculative_dspark_block_size=3)
DRAFTER = {
    **{"dspark_block_size": 3, "dspark_markov_rank": 256, "dspark_noise_token_id": 2},
    **{"dspark_target_layer_ids": [1, 3, 5], "compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0]},
}
# 0.5.23 reads it: before, that engine's loads are as fast as others'
SLOW_LOADS = "SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES"
PREFILL_GRAPHS = flags(cuda_graph_backend_prefill="breakable", cuda_graph_bs_prefill=[256, 1024, 2304])


@dataclass(frozen=True)
class Engine:
    """A start of SGLang. steps: what it is asked, in order (features_engine.py); tokens: of the KV pool."""

    options: tuple = ()
    steps: tuple = ROUND
    phases: tuple = FORCED
    tokens: int = 20000
    config: dict = field(default_factory=dict)
    settings: str = REPRODUCIBLE
    environment: dict = field(default_factory=dict)
    needs: tuple = ()  # modules, one of which must be there
    cards: int = 1
    limit_s: float = 150.0
    stock_of: str = ""  # SGLang alone, run only where that engine of ours failed
    is_stock: bool = False  # SGLang alone, run whatever becomes of ours
    loads: str = ""  # weights from a folder: CHECKPOINT, SAVED or PRESHARDED; none: the harness's
    after: str = ""  # the engine that has to have ended before: it wrote what this one loads
    plugin: Path | None = None  # of SGLang's
    prefill: dict = field(default_factory=dict)  # arguments of a second process that prefills (prefill_beside.py)


@dataclass(frozen=True)
class Feature:
    """A line of the matrix. engine: its engine; steps: those of it that count (none: all); against: the engine whose
    answers it must have (its own: each step's with the first's); same: "bits" or "text"; acts: lines of the log that
    say that it acted; counts: what the answers must count, together; not_counted: what each must count as none;
    as_asked: arguments that SGLang must not have changed; refusal: what it says where it refuses."""

    what: str
    engine: str
    against: str = BASE
    steps: tuple = ()
    same: str = "bits"
    acts: tuple = ()
    counts: tuple = ()
    not_counted: tuple = ()
    as_asked: tuple = ()
    refusal: str = ""
    lacks: tuple = ()  # lines that its log must not have
    yardstick: bool = False  # SGLang's own layers, asked twice: what they do is no defect of ours
    steady_in: str = ""  # such a one's engine: what differs there from run to run is asked for no bits
    stock: tuple = ()  # engines of SGLang alone: where these differ as well, in the same way of loading, it is SGLang's
    off: str = ""  # what SGLang says where it turns it off by itself; of a draft model too, so `acts` outweighs it


ENGINES = {  # what matters most first: the limit cuts the last
    BASE: Engine(steps=(*ROUND, *ALONE, *LONG)),
    TEXT_BASE: Engine(phases=FREE, steps=(*ROUND, *ALONE, *LONG, "min_p")),
    "radix": Engine(
        RADIX, steps=(*ROUND, "flush_cache", "flushed", *LONG, "pause:in_place", "pause:retract", "abort_all", "after")
    ),
    "recommended": Engine(RECOMMENDED, phases=FREE),
    # compiles for minutes: only the stage's limit stops it
    "compiled": Engine(
        flags(enable_torch_compile=True, torch_compile_max_bs=1),
        phases=FREE,
        steps=("alone", "round"),
        settings=f"{REPRODUCIBLE},compiled_streams=on",  # on by itself on SM120
        limit_s=600,
    ),
    "data_parallel": Engine(DATA_PARALLEL, steps=("round", *ALONE), cards=2),
    "weights": Engine(
        steps=("round", "settle", "weights:tensors", "settle", "weights:disk"),  # SGLang asserts that nothing runs
        needs=("safetensors",),
        environment=UNCOMPILED,
        limit_s=260,
    ),
    "hicache": Engine(HOST, steps=("round", "settle", "fill", "settle", "restored"), tokens=8192, limit_s=HOST_POOLS_S),
    "chunks": Engine(CHUNKS),
    "mixed": Engine((*CHUNKS, *flags(enable_mixed_chunk=True))),
    "not_overlapped": Engine(flags(disable_overlap_schedule=True)),
    "interval": Engine(
        (*CHUNKS, *flags(decode_log_interval=1)),
        settings="reproducible=on,prefill_decode_interval=4,prefill_decode_interval_0_5_17=4",
    ),
    "eager": Engine(("--eager",)),
    "prefill_graphs": Engine(("--chunk", "2048", *PREFILL_GRAPHS), steps=(*ROUND, *ALONE)),
    "recommended_graphs": Engine((*RECOMMENDED, *PREFILL_GRAPHS), phases=FREE, steps=(*ROUND, *ALONE)),
    # where a request ignores its end SGLang admits no more than fits: from 0.5.22 on always, before without the cache
    "retracted": Engine((*RADIX, *flags(schedule_conservativeness=0.05)), steps=FULL, tokens=5632, config=NO_END),
    "eagle": Engine(EAGLE, phases=FREE, steps=(*ROUND, *ALONE)),
    "eagle_min_p": Engine(EAGLE, phases=FREE, steps=("min_p",)),
    "dspark": Engine(DSPARK, phases=FREE, config=DRAFTER),
    "dspark_graphs": Engine(
        ("--chunk", "2048", *DSPARK, *PREFILL_GRAPHS), phases=FREE, steps=(*ROUND, *ALONE), config=DRAFTER
    ),
    "grammar": Engine(GRAMMAR, phases=FREE, steps=("grammar",), needs=("xgrammar",)),
    "recommended_grammar": Engine((*RECOMMENDED, *GRAMMAR), phases=FREE, steps=("grammar",), needs=("xgrammar",)),
    "recommended_hicache": Engine(
        (*RECOMMENDED, *HOST),
        phases=FREE,
        steps=("round", "settle", "fill", "settle", "restored"),
        tokens=8192,
        limit_s=HOST_POOLS_S,
    ),
    "slow_hicache_graphs": Engine(
        ("--chunk", "2048", *HOST, *PREFILL_GRAPHS),
        steps=("round", "settle", "fill", "settle", "restored"),
        tokens=8192,
        limit_s=HOST_POOLS_S,
        environment={SLOW_LOADS: "200000000"},  # 0.1 s a layer; of 1 ms a host that is busy sees nothing
    ),
    "hicache_disk": Engine(
        DISKS,
        steps=("round", "settle", "flush_cache", "restored"),
        tokens=8192,
        environment={DISK: "hicache_disk"},
        limit_s=HOST_POOLS_S,
    ),
    "two": Engine(TWO, steps=("round", *ALONE), cards=2),
    "expert_parallel": Engine((*TWO, *flags(ep_size=2)), steps=("round", *ALONE), cards=2),
    "stages": Engine(STAGES, steps=(*ROUND, *ALONE, *LONG), cards=2, settings=f"{REPRODUCIBLE},own_outputs=off"),
    "stages_own": Engine(STAGES, steps=(*ROUND, *ALONE, *LONG), cards=2),
    "stages_in_chunks": Engine((*RADIX, *CHUNKS, *STAGES), steps=(*ROUND, *ALONE), cards=2),
    "two_batches": Engine((*DATA_PARALLEL, *flags(enable_two_batch_overlap=True)), steps=("round", *ALONE), cards=2),
    "eagle_retracted": Engine(
        (*EAGLE, *RADIX, *flags(schedule_conservativeness=0.05)), phases=FREE, steps=FULL, tokens=5632, config=NO_END
    ),
    "eagle_not_overlapped": Engine((*EAGLE, *flags(disable_overlap_schedule=True)), phases=FREE, steps=("round",)),
    "eagle_eager": Engine((*EAGLE, "--eager"), phases=FREE, steps=("round",)),
    "data_parallel_eagle": Engine((*DATA_PARALLEL, *EAGLE), phases=FREE, steps=("round", *ALONE), cards=2),
    # what SGLang's own layers make of the checkpoint: what the next ones are held against, ours and SGLang's
    "loaded": Engine(NORMALLY, steps=TWICE, settings=SGLANGS, loads=CHECKPOINT),
    "loaded_stock": Engine(NORMALLY, steps=(*TWICE, "save"), settings="", is_stock=True, loads=CHECKPOINT),
    "sharded": Engine(FROM_SHARDS, steps=(*TWICE, "reload"), loads=SAVED, after="loaded_stock"),
    "sharded_off": Engine(FROM_SHARDS, steps=TWICE, settings=SGLANGS, loads=SAVED, after="loaded_stock"),
    "sharded_stock": Engine(
        FROM_SHARDS, steps=(*TWICE, "reload"), settings="", is_stock=True, loads=SAVED, after="loaded_stock"
    ),
    "offloaded": Engine((*NORMALLY, *flags(cpu_offload_gb=1)), steps=TWICE, loads=CHECKPOINT),
    "presharded": Engine(OF_SHARDS, steps=TWICE, loads=PRESHARDED),
    "presharded_ours": Engine(OF_SHARDS, steps=TWICE, loads=PRESHARDED, plugin=PRESHARDED_PLUGIN),
    "presharded_sglangs": Engine(
        OF_SHARDS, steps=TWICE, settings="", is_stock=True, loads=PRESHARDED, plugin=PRESHARDED_PLUGIN
    ),
    "presharded_ours_by_ours": Engine(
        OF_SHARDS, steps=TWICE, loads=PRESHARDED, after="presharded_ours", plugin=PRESHARDED_PLUGIN
    ),
    "presharded_ours_by_sglang": Engine(
        *(OF_SHARDS, TWICE),
        settings="",
        is_stock=True,
        loads=PRESHARDED,
        after="presharded_ours",
        plugin=PRESHARDED_PLUGIN,
    ),
    "presharded_sglangs_by_ours": Engine(
        OF_SHARDS, steps=TWICE, loads=PRESHARDED, after="presharded_sglangs", plugin=PRESHARDED_PLUGIN
    ),
    "held": Engine((*NORMALLY, *flags(weight_cache_mode="daemon")), steps=TWICE, loads=CHECKPOINT),
    "saver": Engine(
        flags(enable_memory_saver=True, enable_weights_cpu_backup=True),
        steps=("round", "settle", "release", "resumed"),  # SGLang asserts that nothing runs
        needs=("torch_memory_saver",),
    ),
    "lora": Engine(
        flags(enable_lora=True, max_lora_rank=8, lora_target_modules=["gate_up_proj", "down_proj"]), steps=("round",)
    ),
    "multiplexed": Engine(
        ("--chunk", "-1", *flags(enable_pdmux=True, disable_overlap_schedule=True)), steps=("round",)
    ),
    "mixed_eagle": Engine((*CHUNKS, *EAGLE, *flags(enable_mixed_chunk=True)), phases=FREE, steps=("round",)),
    # UCX says which transport it takes
    "disaggregated": Engine(
        DECODES,
        steps=(*ROUND, *ALONE, *LONG),
        environment={"UCX_LOG_LEVEL": "info"},
        needs=("nixl",),
        cards=2,
        limit_s=220,
        prefill=PREFILLS,
    ),
    "alone_stock": Engine(steps=TWICE, settings="", is_stock=True),
}
ENGINES["disaggregated_eagle"] = replace(ENGINES["disaggregated"], options=(*DECODES, *EAGLE), phases=FREE)
ENGINES["disaggregated_stock"] = replace(ENGINES["disaggregated"], steps=TWICE, settings="", is_stock=True)
STOCK = ("multiplexed", "compiled", "two_batches", "prefill_graphs", "hicache", "hicache_disk", "data_parallel")
STOCK += ("data_parallel_eagle", "expert_parallel", "stages", "mixed", "weights", "lora")
STOCK += ("offloaded", "presharded", "held", "disaggregated_eagle")
ENGINES |= {
    name: replace(engine, environment=UNCOMPILED, limit_s=FOLDERS_S) for name, engine in ENGINES.items() if engine.loads
}
ENGINES |= {f"{name}_stock": replace(ENGINES[name], settings="", stock_of=name) for name in STOCK}
ENGINES["held_stock"] = replace(ENGINES["held_stock"], after="held")  # the place of a card's weights is the same

# prompts in the one process, answers in the other, and never the other way
TRANSFERRED = (r"\[prefill\] .*Prefill batch.*#inflight-req: ", r"Decode batch.*#transfer-req: ")
AT_HOME = (r"(?m)^(?!\[prefill\] ).*Prefill batch", r"\[prefill\] .*Decode batch")

CAPTURED_PROMPTS = {
    "acts": ("Capture target prefill CUDA graph end",),
    "off": "Breakable CUDA graph is incompatible with|Disable prefill CUDA graph because",
}
FEATURES = (
    Feature("prefix cache (the default)", "radix", steps=ROUND, counts=("cached",)),
    Feature("flush_cache", "radix", steps=("flush_cache", "flushed"), not_counted=("cached",)),
    Feature("pause in place and resume", "radix", steps=("pause:in_place",)),
    Feature("pause with retraction and resume", "radix", steps=("pause:retract",), counts=("retracted",)),
    Feature("abort of all", "radix", steps=("abort_all", "after")),
    Feature("chunks of 512", "chunks", acts=(r"Prefill batch.*#new-token: 512\b",), as_asked=("chunked_prefill_size",)),
    Feature("mixed chunks", "mixed", as_asked=("enable_mixed_chunk", "chunked_prefill_size")),
    Feature("overlap schedule off", "not_overlapped", as_asked=("disable_overlap_schedule",)),
    Feature(
        "--prefill-decode-interval 4 (0.5.17: ours)", "interval",
        acts=(r"Prefill batch.*\n(?:.*Decode batch.*\n){3,}.*Prefill batch.*#new-token: 512\b",),
    ),
    Feature("CUDA graphs off", "eager", lacks=("Capture target decode",)),
    Feature(
        "prefill graphs (breakable)", "prefill_graphs", **CAPTURED_PROMPTS,
    ),
    # Inductor's kernels for what is torch's round otherwise: the bits are not asked for
    Feature("--enable-torch-compile, one row", "compiled", TEXT_BASE, same="text", as_asked=("enable_torch_compile",)),
    Feature(
        "prefix cache + retraction, the KV pool is full", "retracted", acts=("KV cache pool is full",),
        counts=("retracted",),
    ),
    Feature("hierarchical cache, host memory", "hicache", counts=("host",), as_asked=("enable_hierarchical_cache",)),
    Feature(
        "hierarchical cache that loads slowly + prefill graphs (breakable)", "slow_hicache_graphs", counts=("host",),
        **CAPTURED_PROMPTS,
    ),
    Feature("hierarchical cache, a folder on disk", "hicache_disk", counts=("storage",)),
    Feature("update_weights_from_tensor", "weights", steps=("round", "weights:tensors")),
    Feature("update_weights_from_disk", "weights", steps=("round", "weights:disk")),
    Feature("--enable-memory-saver, release and resume", "saver"),
    Feature("others that sample with min_p", TEXT_BASE, TEXT_BASE, ("min_p",), same="text"),
    Feature("EAGLE 3/1/4", "eagle", TEXT_BASE, same="text", counts=("verified",)),
    Feature(
        "EAGLE + others that sample with min_p", "eagle_min_p", TEXT_BASE, same="text", counts=("verified",)
    ),
    Feature("DSPARK, a block of 3", "dspark", TEXT_BASE, same="text", counts=("verified",)),
    Feature(
        "DSPARK + prefill graphs (breakable)", "dspark_graphs", TEXT_BASE, same="text", counts=("verified",),
        **CAPTURED_PROMPTS,
    ),
    Feature("xgrammar", "grammar", TEXT_BASE, same="text"),
    Feature(
        "prefix cache + chunks + EAGLE + overlap + graphs", "recommended", TEXT_BASE, same="text",
        counts=("verified", "cached"),
    ),
    Feature(
        "the same + xgrammar", "recommended_grammar", TEXT_BASE, same="text", counts=("verified",),
    ),
    Feature(
        "the same + prefill graphs (breakable)", "recommended_graphs", TEXT_BASE, same="text", counts=("verified",),
        **CAPTURED_PROMPTS,
    ),
    Feature(
        "the same + hierarchical cache", "recommended_hicache", TEXT_BASE, same="text", counts=("verified", "host"),
    ),
    Feature(
        "EAGLE + prefix cache + retraction", "eagle_retracted", TEXT_BASE, same="text", counts=("retracted", "verified")
    ),
    Feature(
        "EAGLE + overlap schedule off", "eagle_not_overlapped", TEXT_BASE, same="text", counts=("verified",),
        as_asked=("disable_overlap_schedule",),
    ),
    Feature("EAGLE + CUDA graphs off", "eagle_eager", TEXT_BASE, same="text", counts=("verified",)),
    Feature(
        "EAGLE + mixed chunks", "mixed_eagle", TEXT_BASE, same="text", as_asked=("enable_mixed_chunk",),
        refusal="enable_mixed_chunk is (required for|not supported with) speculative decoding",
    ),
    Feature("TP2, each prompt alone and all at once", "two", "two"),
    Feature(
        "DP attention, the other rank idle or busy", "data_parallel", "data_parallel", as_asked=("enable_dp_attention",)
    ),
    Feature(
        "DP attention + EAGLE, the other rank idle or busy", "data_parallel_eagle", "data_parallel_eagle", same="text",
        counts=("verified",), as_asked=("enable_dp_attention",),
    ),
    Feature("EP 2, each prompt alone and all at once", "expert_parallel", "expert_parallel", as_asked=("ep_size",)),
    Feature("PP 2, own_outputs=off", "stages", as_asked=("pp_size",)),
    Feature("PP 2", "stages_own", as_asked=("pp_size",)),
    Feature(
        "PP 2 + prefix cache + chunks of 512", "stages_in_chunks", counts=("cached",),
        as_asked=("pp_size", "chunked_prefill_size"),
    ),
    Feature(
        "--enable-two-batch-overlap (with DP attention)", "two_batches", "two_batches",
        as_asked=("enable_two_batch_overlap",),
    ),
    Feature("wo_a=off,mxfp4_moe=off, asked twice (the next lines' yardstick)", "loaded", "loaded", yardstick=True),
    Feature("SGLang alone, asked twice (a yardstick, too)", "loaded_stock", "loaded_stock", yardstick=True),
    Feature(
        "--load-format sharded_state, beside the same with wo_a=off,mxfp4_moe=off", "sharded", "sharded_off",
        steps=TWICE, acts=handed_over("ShardedStateLoader"), as_asked=("load_format",), steady_in="loaded",
    ),
    # SGLang turns the compressors' `ape` over once more when it has loaded what it saved
    Feature(
        "--load-format sharded_state, beside the checkpoint that it was saved from", "sharded", "loaded", steps=TWICE,
        stock=("sharded_stock", "loaded_stock"), steady_in="loaded",
    ),
    Feature("the same, then update_weights_from_disk", "sharded", "loaded", steps=("reload",), steady_in="loaded"),
    Feature(
        "--cpu-offload-gb 1", "offloaded", "loaded", acts=handed_over("--cpu-offload-gb"), as_asked=("cpu_offload_gb",),
        steady_in="loaded",
    ),
    Feature(
        "--load-format presharded", "presharded", "loaded", acts=(WRITES, *handed_over("PreshardedModelLoader")),
        as_asked=("load_format",), steady_in="loaded",
    ),
    # presharded_plugin: SGLang alone does not start
    Feature(
        "presharded, mended: ours writes", "presharded_ours", "loaded",
        acts=(WRITES, *handed_over("PreshardedModelLoader")), steady_in="loaded",
    ),
    Feature(
        "presharded, mended: ours loads what ours wrote", "presharded_ours_by_ours", "loaded",
        acts=(READS, *handed_over("PreshardedModelLoader")), steady_in="loaded",
    ),
    Feature(
        "presharded, mended: SGLang loads what ours wrote", "presharded_ours_by_sglang", "loaded_stock",
        acts=(READS,), steady_in="loaded_stock",
    ),
    Feature(
        "presharded, mended: SGLang writes", "presharded_sglangs", "loaded_stock", acts=(WRITES,),
        steady_in="loaded_stock",
    ),
    Feature(
        "presharded, mended: ours loads what SGLang wrote", "presharded_sglangs_by_ours", "loaded",
        acts=(READS, *handed_over("PreshardedModelLoader")), steady_in="loaded",
    ),
    Feature(
        "--weight-cache-mode daemon", "held", "loaded", acts=handed_over("--weight-cache-mode"),
        as_asked=("weight_cache_mode",), steady_in="loaded",
    ),
    Feature("LoRA of the experts", "lora", refusal="Marlin MoE backend requires a quant method exposing"),
    Feature("--enable-pdmux", "multiplexed"),
    Feature(
        "PD disaggregation, two cards of one host", "disaggregated", acts=TRANSFERRED, lacks=AT_HOME,
        as_asked=("disaggregation_mode",), stock=("disaggregated_stock", "alone_stock"),
    ),
    Feature(
        "PD disaggregation + EAGLE, in both", "disaggregated_eagle", TEXT_BASE, same="text", counts=("verified",),
        acts=TRANSFERRED, lacks=AT_HOME, as_asked=("disaggregation_mode",),
    ),
    Feature(
        "PD disaggregation, SGLang alone (a yardstick)", "disaggregated_stock", "alone_stock", acts=TRANSFERRED,
        lacks=AT_HOME, as_asked=("disaggregation_mode",), yardstick=True,
    ),
)  # fmt: skip


def of_folders():
    """The engines that load weights from folders: a session of their own."""
    return [name for name, engine in ENGINES.items() if engine.loads]


if __name__ == "__main__":
    print(*(f"{PREFIX}{name}" for name in of_folders()))
