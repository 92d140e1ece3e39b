"""A release's scheduler with its pools' owners, imported from the wheel and built without a GPU: what slots_random_load
drives. Real are the scheduler, its batches and results, admission, allocators, the prefix cache, the requests' rows,
the relay between steps and EAGLE's preparation of a step; the model's pass is slots_model's.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import sys
from collections import Counter, deque
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from tests.patching import slots_model as model
from tests.patching.wheels import packages, since, unpacked
from tests.wheel_pools import Stub

SRT = "sglang.srt"
ABSENT = frozenset(
    [
        "IPython",
        "aiohttp",
        "compressed_tensors",
        "cuda",
        "datasets",
        "deep_gemm",
        "flashinfer",
        "gguf",
        "grpc",
        "interegular",
        "kernels",
        "llguidance",
        "modelscope",
        "mooncake",
        "msgpack",
        "openai",
        "outlines",
        "pynvml",
        "quack",
        "setproctitle",
        "sgl_kernel",
        "smg_grpc_servicer",
        "soundfile",
        "tilelang",
        "torchao",
        "torchvision",
        "transformers",
        "tvm_ffi",
        "uvicorn",
        "watchfiles",
        "xgrammar",
    ]
)
UNUSED = (
    "torch._dynamo",
    *(
        f"{SRT}.{name}"
        for name in [
            "configs",
            "entrypoints",
            "parser",
            "disaggregation.encoder",
            "utils.hf_transformers",
            "utils.hf_transformers_patches",
            "utils.hf_transformers_utils",
        ]
    ),
)
MODULES = {
    **{"scheduler": "managers.scheduler", "batches": "managers.schedule_batch", "results": "managers.utils"},
    **{"params": "sampling.sampling_params", "logits": "layers.logits_processor", "messages": "managers.io_struct"},
    **{"context": "runtime_context", "spec": "speculative.spec_info", "eagle": "speculative.eagle_info"},
    **{"eagle_utils": "speculative.eagle_utils", "relay": "managers.overlap_utils", "pools": "mem_cache.memory_pool"},
    **{
        "windows": "mem_cache.base_swa_memory_pool",
        "swa": "mem_cache.allocator.swa",
        "paged": "mem_cache.allocator.paged",
    },
    **{"allocation": "mem_cache.allocation", "init": "mem_cache.cache_init_params", "arguments": "server_args"},
    **{"tree": "mem_cache.unified_radix_cache", "components": "mem_cache.unified_cache.components"},
    "modes": "disaggregation.utils",
}


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The release's modules and what they import; of packages that are missing, or not used, names alone."""

    def __init__(self, version):
        sys.path[1:1] = [str(unpacked(version)), str(packages())]

    def find_spec(self, name, path=None, target=None):
        is_unused = any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED)
        if name.partition(".")[0] not in ABSENT and not is_unused:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


class Quiet:
    """What a scheduler tells, and asks of what is not there: nothing, no and zero."""

    def __init__(self, **known):
        self.__dict__.update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Quiet())

    def __call__(self, *_, **__):
        return None

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())

    def __int__(self):
        return 0

    def __add__(self, other):
        return other

    def __mod__(self, _):
        return 0

    __len__, __radd__ = __int__, __add__


class Everything:
    """A release's modules by name, and what of them is asked for."""

    def __init__(self, version):
        self.version = version
        for name, module in MODULES.items():
            setattr(self, name, importlib.import_module(f"{SRT}.{module}"))
        self.Req, self.Batch = self.batches.Req, self.batches.ScheduleBatch
        for name in ("AbortReq", "PauseGenerationReqInput", "ContinueGenerationReqInput"):
            setattr(self, name, getattr(self.messages, name))

    def request(self, name, prompt, most, priority, has_priority):
        wanted = self.params.SamplingParams(max_new_tokens=most, stop_token_ids=[model.STOP], temperature=0)
        wanted.normalize(None)
        priority = priority if has_priority else None
        return self.Req(name, "", prompt, wanted, vocab_size=1000, eos_token_ids=None, priority=priority)

    def take_ours(self):
        """The rows of ours that are about slots, in this process."""
        from packaging.specifiers import SpecifierSet

        from deepseek_v4_sm120.sglang_patches import scope
        from deepseek_v4_sm120.sglang_patches.rows import scheduler as rows

        scope.is_ours = lambda: True  # where a fix asks by another of its functions
        chunks = rows.WAITING_CHUNKS, rows.MIXED_CHUNKS, rows.PREEMPTED_REQUESTS, rows.SHORT_PROMPTS  # as in the table
        others = rows.WAITING_PROMPTS, rows.PREFIX_WALKS, rows.MIXED_GRAMMARS
        for row in (rows.CACHED_BEGINNING, rows.STRIPPED_THOUGHTS, *chunks, *others):
            for target in (t for t in row.targets if self.version in SpecifierSet(t.sglang)):
                module, _, names = target.where.partition(":")
                owner, name = getattr(importlib.import_module(module), names.partition(".")[0]), names.partition(".")[2]
                home, _, function = target.replacement.partition(":")
                importlib.import_module(home).is_ours = lambda: True
                setattr(owner, name, getattr(importlib.import_module(home), function)(getattr(owner, name)))


_found: list[Everything] = []


def everything() -> Everything:
    return _found[0]


def install(version):
    """Imports the release, and puts torch where its kernels for a GPU are. Nothing is compiled."""
    torch.compile = lambda model=None, **_: model if model is not None else lambda function: function
    importlib.import_module("tests.patching.quick_imports")
    _found.append(found := Everything(version))
    found.allocation.assign_req_to_token_pool_func = assign_slots
    if hasattr(found.eagle_utils, "assign_req_to_token_pool_func"):
        found.eagle_utils.assign_req_to_token_pool_func = assign_slots
    found.allocation.attention_backends = lambda: ("torch_native", "torch_native")
    found.paged.alloc_extend_kernel, found.paged.alloc_decode_kernel = Kernel(more_slots), Kernel(next_slots)
    found.relay.gather_spec_extras = lambda rows, *kept: tuple(k if k is None else k[rows] for k in kept)
    of_a_gpu = {name: (lambda *_, **__: Quiet()) for name in ("Event", "Stream", "current_stream", "synchronize")}
    device = SimpleNamespace(stream=lambda _: nullcontext(), **of_a_gpu)
    torch.get_device_module, torch.Tensor.record_stream = lambda *_, **__: device, lambda *_: None
    retract, mix = found.Batch.retract_decode, found.Batch.mix_with_running

    def counted(original, name):
        @functools.wraps(original)
        def function(self, *args, **kwargs):
            Worker.seen[name] += 1
            return original(self, *args, **kwargs)

        return function

    found.Batch.retract_decode, found.Batch.mix_with_running = counted(retract, "retracted"), counted(mix, "mixed")


class Kernel:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


def assign_slots(requests, slots_of, starts, ends, slots, _):
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots_of[request, start:end] = slots[at : at + end - start].to(torch.int32)
        at += end - start


def more_slots(prefixes, lengths, lasts, free, out, _, page, *__):
    at, pages = 0, itertools.chain(free.tolist(), itertools.repeat(0))  # what has no page is told afterwards
    for position, length, last in zip(prefixes.tolist(), lengths.tolist(), lasts.tolist(), strict=True):
        while position < length:
            last = next(pages) * page - 1 if position % page == 0 else last
            step = min(length - position, page - position % page)
            out[at : at + step] = torch.arange(last + 1, last + 1 + step)
            last, at, position = last + step, at + step, position + step


def next_slots(lengths, lasts, free, out, _, page, *__):
    pages = itertools.chain(free.tolist(), itertools.repeat(0))
    for at, (length, last) in enumerate(zip(lengths.tolist(), lasts.tolist(), strict=True)):
        out[at] = next(pages) * page if (length - 1) % page == 0 else last + 1


class Worker:
    """The model's pass, and of a worker that speculates what it does with slots."""

    seen: Counter = Counter()

    def __init__(self, pools, requests, allocator, drafts, chance):
        self.pools, self.requests, self.allocator = pools, requests, allocator
        self.drafts, self.chance, self.truths, self.begun = drafts, chance, {}, set()
        self.model_runner = Quiet(attn_backend=Quiet(needs_cpu_seq_lens=True), prefill_aware_swa=False)
        self.last_shared_read_runner = SimpleNamespace(shared_read_done_event=None)
        Worker.seen = Counter()

    def __getattr__(self, name):  # what of a worker is told of ends
        if name in ("on_verify_complete_cpu", "note_request_finished", "clear_cache_pool"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def forward_batch_generation(self, batch, on_publish=None, **_):
        if batch.forward_mode.is_extend():
            rows = self.prompts(batch)
        elif not self.drafts:
            given = zip(batch.seq_lens.tolist(), batch.input_ids.tolist(), batch.out_cache_loc.tolist(), strict=True)
            rows = [self.row(batch, i, length - 1, [token], [slot]) for i, (length, token, slot) in enumerate(given)]
        else:
            return self.verified(batch, on_publish)
        self.run(rows, decode=batch.forward_mode.is_decode())
        said = torch.tensor([row.truth.token(row.end) for row in rows])
        result = {"next_token_ids": said}
        if self.drafts:
            on_publish = on_publish or (lambda _: None)
            on_publish(batch.seq_lens)
            result |= {"new_seq_lens": batch.seq_lens, "next_draft_input": self.draft_input(said)}
        return self.result(**result)

    def row(self, batch, index, start, tokens, slots):
        name, request = batch.reqs[index].rid, int(batch.req_pool_indices[index])
        row = model.Rows(self.truths[name], name, request, start, tokens, slots)
        expected = row.truth.token(start)
        if tokens[0] != expected:
            raise model.Wrong(f"{name} is given {tokens[0]} at {start}, not {expected}")
        return row

    def prompts(self, batch):
        at, rows, ids, slots = 0, [], batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        for index, (end, length) in enumerate(zip(batch.seq_lens.tolist(), batch.extend_lens, strict=True)):
            rows.append(row := self.row(batch, index, end - length, ids[at : at + length], slots[at : at + length]))
            if row.tokens != [row.truth.token(position) for position in range(row.start, row.end)]:
                raise model.Wrong(f"{row.name} is given another prompt from {row.start} on")
            if row.start != batch.prefix_lens[index]:
                raise model.Wrong(f"{row.name} begins at {row.start}, its prefix is {batch.prefix_lens[index]}")
            Worker.seen["cached"] += bool(row.start and row.name not in self.begun)
            self.begun.add(row.name)
            at += length
        return rows

    def verified(self, batch, on_publish):
        slots_of, rows, accepted, said = self.requests.req_to_token, [], [], []
        guesses = batch.spec_info.bonus_tokens.tolist()
        for index, (start, token) in enumerate(zip(batch.seq_lens.tolist(), guesses, strict=True)):
            right = self.chance.choice([1, self.drafts, self.chance.randint(1, self.drafts)])
            truth = self.truths[batch.reqs[index].rid]
            tokens = [token, *(truth.token(start + j) if j < right else 99 for j in range(1, self.drafts))]
            slots = slots_of[int(batch.req_pool_indices[index]), start : start + self.drafts].tolist()
            rows.append(self.row(batch, index, start, tokens, slots))
            accepted.append(right)
            said += [truth.token(start + 1 + j) if j < right else 0 for j in range(self.drafts)]
        self.run(rows, decode=False)
        for row, right in zip(rows, accepted, strict=True):
            self.pools.forget_rejected(row, right)
        lengths = torch.tensor(accepted, dtype=torch.int32)
        if on_publish is not None:
            on_publish(batch.seq_lens + lengths)
        last = torch.tensor([said[i * self.drafts + right - 1] for i, right in enumerate(accepted)])
        of_drafts = {"accept_lens": lengths, "speculative_num_draft_tokens": self.drafts}
        of_drafts |= {"new_seq_lens": batch.seq_lens + lengths, "next_draft_input": self.draft_input(last)}
        return self.result(next_token_ids=torch.tensor(said), **of_drafts)

    def run(self, rows, *, decode):
        windows_of = self.allocator.full_to_swa_index_mapping.numpy()
        self.pools.run(rows, windows_of, self.requests.req_to_token.numpy(), decode=decode)

    @staticmethod
    def draft_input(tokens):
        nothing = {"topk_p": torch.zeros(len(tokens), 1), "hidden_states": torch.zeros(len(tokens), 1)}
        nothing["topk_index"] = torch.zeros(len(tokens), 1, dtype=torch.int64)
        return everything().eagle.EagleDraftInput(bonus_tokens=tokens.to(torch.int32), **nothing)

    @staticmethod
    def result(**given):
        found = everything()
        logits = found.logits.LogitsProcessorOutput(next_token_logits=None)
        return found.results.GenerationBatchResult(logits_output=logits, can_run_cuda_graph=False, **given)


class Ended:
    """Where answers and aborts are sent."""

    def __init__(self, version):
        self.cuts = since(version, "0.5.18")  # an answer that max_tokens ends, behind the end of it
        self.told, self.waiting, self.dropped = set(), [], []

    def send_output(self, message, request=None, *_, **__):
        if request is not None:
            self.waiting.append(request)
        elif type(message).__name__ == "AbortReq":
            self.dropped.append(message.rid)

    def stream_output(self, requests, *_, **__):
        self.waiting += [r for r in requests if r.finished() and r.rid not in self.told]
        self.told |= {r.rid for r in self.waiting}

    def _stream_output_generation(self, *_, **__):
        pass

    def taken(self, live):
        found = {r.rid: r for r in self.waiting} | {name: live[name][0] for name in self.dropped if name in live}
        self.waiting, self.dropped = [], []
        return [r for name, r in found.items() if name in live]


def publish(version, case):
    """The server's arguments, where a release's modules look for them."""
    context, wanted = everything().context, case["chunk"] * model.PAGE
    given = {
        **{"page_size": model.PAGE, "chunked_prefill_size": wanted, "max_running_requests": case["requests"]},
        **{"disable_overlap_schedule": not case["overlap"], "enable_mixed_chunk": case["mixed"], "device": "cpu"},
        **{
            "schedule_conservativeness": 0.1,
            "attention_backend": "torch_native",
            "disable_radix_cache": not case["radix"],
        },
        **{"enable_priority_scheduling": case["priority"]},
    }
    if case["drafts"]:
        given |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": case["drafts"] - 1}
        given |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": case["drafts"]}
    arguments = context.get_context().override_server_args(**given).install()
    ranks = dict.fromkeys(("attn_tp_rank", "tp_rank", "pp_rank", "attn_cp_rank", "attn_dp_rank"), 0) | {"dp_rank": None}
    parallel = context.get_parallel()
    if hasattr(type(parallel), "override_permanently"):
        parallel.override_permanently(**ranks)
    elif not since(version, "0.5.20"):
        parallel._overrides.update(ranks)
    else:
        vars(parallel).update(ranks)
    context.get_context().override("slots", pp_max_micro_batch_size=case["requests"])
    return arguments


def caches(version, case, _):
    """-> requests' rows, allocator, prefix cache; by the server's arguments"""
    found = everything()
    kept = {"__init__": lambda self: None, "device": "cpu", "swa_req_ring_size": None, "layer_transfer_counter": None}
    kept["register_mapping"] = lambda self, mapping: setattr(self, "full_to_swa_index_mapping", mapping)
    kept["translate_loc_from_full_to_swa"] = lambda self, slots: self.full_to_swa_index_mapping[slots]
    base = found.windows.BaseSWAKVPool
    kept = {name: lambda self, *_, **__: None for name in base.__abstractmethods__} | kept
    pool = type("Pool", (base,), kept)()
    requests, allocator, params = owners(case, pool)
    tree = found.tree.UnifiedRadixCache
    if not case["radix"] and not since(version, "0.5.22"):
        tree = importlib.import_module(f"{SRT}.mem_cache.chunk_cache").SWAChunkCache
    return requests, allocator, tree(params)


def owners(case, pool):
    """-> requests' rows, a device's pool's allocator, what a prefix cache is made of"""
    found, size = everything(), {name: case[name] * model.PAGE for name in ("tokens", "windows")}
    requests = found.pools.ReqToTokenPool(case["requests"], 800, "cpu", False)
    sizes = (size["tokens"], size["windows"], model.PAGE, torch.int64, "cpu", pool)
    allocator = found.swa.SWATokenToKVPoolAllocator(*sizes, need_sort=False)
    for part in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        part.use_triton_kernels = False
    kind = found.components.ComponentType
    params = {
        **{"disable": not case["radix"], "req_to_token_pool": requests, "token_to_kv_pool_allocator": allocator},
        **{"page_size": model.PAGE, "is_eagle": bool(case["drafts"]), "sliding_window_size": model.WINDOW},
        **{"chunked_prefill_size": case["chunk"] * model.PAGE, "tree_components": (kind.FULL, kind.SWA)},
    }
    return requests, allocator, found.init.CacheInitParams(**params)


def scheduler_of(version, case, chance, made_by=None):
    """-> a scheduler, its worker, where it sends what has ended. made_by: what makes caches, pools and the worker."""
    found, arguments, made_by = everything(), publish(version, case), made_by or MADE_BY
    requests, allocator, tree = made_by.caches(version, case, arguments)
    sizes = {name: case[name] * model.PAGE for name in ("tokens", "windows", "chunk")}
    pools = made_by.pools(sizes["tokens"], sizes["windows"], case["requests"], bool(case["drafts"]))
    worker, ended = made_by.worker(pools, requests, allocator, case["drafts"], chance), Ended(version)
    scheduler_class = type("Scheduler", (found.scheduler.Scheduler,), {"__getattr__": unknown})
    scheduler = scheduler_class.__new__(scheduler_class)
    same = {
        name: lambda batch, **_: batch for name in ("maybe_prepare_mlp_sync_batch", "maybe_convert_decode_to_extend")
    }
    stages = dict.fromkeys(("enter", "exit"), lambda *_: None) | {"record": lambda *_: nullcontext()}
    vars(scheduler).update(
        **{"server_args": arguments, "page_size": model.PAGE, "model_config": Quiet(vocab_size=1000, context_len=600)},
        **{"spec_algorithm": found.spec.SpeculativeAlgorithm.from_string("EAGLE" if case["drafts"] else None)},
        **{
            "enable_overlap": case["overlap"],
            "enable_priority_scheduling": case["priority"],
            "schedule_policy": "fcfs",
        },
        **{"schedule_low_priority_values_first": False, "priority_scheduling_preemption_threshold": 0},
        **{"tp_worker": worker, "model_worker": worker, "draft_worker": worker if case["drafts"] else None},
        **{"max_total_num_tokens": sizes["tokens"], "max_prefill_tokens": 2 * sizes["chunk"], "max_req_len": 599},
        **{"max_running_requests": case["requests"], "max_req_input_len": 590, "device": "cpu"},
        **{"is_hybrid_swa": True, "sliding_window_size": model.WINDOW, "full_tokens_per_layer": sizes["tokens"]},
        **{"swa_tokens_per_layer": sizes["windows"], "req_to_token_pool": requests, "tree_cache": tree},
        **{"token_to_kv_pool_allocator": allocator, "disable_radix_cache": not case["radix"], "is_generation": True},
        **{
            "scheduler_stage_metrics": SimpleNamespace(_trace_stage=None, **stages),
            "grammar_manager": Quiet(grammar_queue=[]),
        },
        **{"metrics_reporter": Quiet(num_generated_tokens=0, forward_ct_decode=0), "dp_attn_adapter": Quiet(**same)},
        **{"load_inquirer": Quiet(_get_num_pending_tokens=lambda **_: 0), "output_streamer": ended},
        **{"ngram_embedding_manager": Quiet(prepare_for_forward=lambda batch, **_: batch)},
        **{"disaggregation_mode": found.modes.DisaggregationMode.NULL, "ipc_channels": Quiet(send_to_tokenizer=ended)},
        **{
            "pp_group": SimpleNamespace(is_last_rank=True, is_first_rank=True, world_size=1),
            "_pause_intervals": deque(),
        },
        **dict.fromkeys(OFF, False),
        **dict.fromkeys(NONE),
        **dict.fromkeys(TOLD, lambda *_, **__: None),
        **{"send_abort_output": lambda _, request: ended.send_output(None, request), "processed_tokens_counter": 0},
    )
    scheduler.init_running_status()
    scheduler.init_chunked_prefill()
    scheduler.init_schedule_policy()
    scheduler.init_overlap()
    scheduler.init_batch_result_processor()
    scheduler.init_pool_stats_observer()
    scheduler.init_invariant_checker()
    scheduler.enable_skip_finishing_decode, scheduler.result_queue = case["overlap"], deque()
    return scheduler, worker, ended


MADE_BY = SimpleNamespace(caches=caches, pools=model.Pools, worker=Worker)


def unknown(self, name):
    """What a release's scheduler has that is nothing here, by other names in others."""
    if name.startswith("__"):
        raise AttributeError(name)
    return self.__dict__.setdefault(name, [] if name in ("mbs", "running_mbs") else Quiet())


OFF = [
    "enable_lora",
    "enable_overlap_mlx",
    "enable_pdmux",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_hicache_storage",
    "enable_unified_cache_external_linker",
    "enable_hisparse",
    "attn_dp_enabled",
    "enable_dp_attention",
    "enable_unified_memory",
    "is_hybrid_ssm",
    "require_mlp_sync",
    "enable_fpm",
    "abort_on_priority_when_disabled",
    "_war_barrier_enabled",
    "_sched_idled",
]
NONE = [
    "max_queued_requests",
    "max_new_tokens_limit",
    "hisparse_coordinator",
    "decode_offload_manager",
    "dynamic_chunk_sizer",
    "dllm_config",
    "metrics_collector",
    "min_free_slots_delayer",
    "truncation_align_size",
    "mm_receiver",
    "rust_server",
    "scripted_scheduler_hook",
    "lora_drainer",
    "forward_sleep_time",
    "soft_watchdog",
    "_pause_started_at",
    "kv_checksum_computer",
    "tokenizer",
]
TOLD = [
    "publish_load_snapshot",
    "maybe_send_health_check_signal",
    "_maybe_clear_mm_inputs",
    "_record_step_counters",
    "maybe_sleep_on_idle",
]
