"""Random load with a hierarchical cache: slots_random_load's, with pages that go to the host, the disk, and come back.

    python3 -m tests.patching.slots_hierarchy 0.5.20 SEEDS [CASE;CASE | faults] [ours]     more of it than the suite has

Real are the prefix cache, the controller with its threads, the host's pools and the files. Copies and passes are put on
streams, and are as late as these allow; threads take turns. The device's pools are three layers: without compression,
of short groups with an indexer, and of long groups. Each slot of each holds a hash, as slots_model's. From 0.5.21 on
the tree is the one in Rust where Python is 3.12, for which the wheels have it; whose pages the host's are is not asked.
"""

import ctypes
import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import torch

from deepseek_v4_sm120.sglang_patches.fixes import fenced_copies
from deepseek_v4_sm120.sglang_patches.rows import scheduler as rows
from tests.patching import slots_model as model
from tests.patching import slots_random_load as load
from tests.patching import slots_server as server
from tests.patching.slots_streams import Device, Stream
from tests.patching.slots_threads import Queue, Turns
from tests.patching.wheels import since

MEMORY = f"{server.SRT}.mem_cache"
LAYERS = (0, 4, 128)
BYTES = 8  # of a slot's hash
CASES = {
    "host": {},
    "tight": {"windows": 11, "chunk": 2, "requests": 8, "tokens": 40},
    "small host": {"ratio": 1.0, "tokens": 40},
    "write back": {"policy": "write_back"},
    "selective": {"policy": "write_through_selective"},
    "EAGLE": {"drafts": 4, "windows": 14},
    "EAGLE, write back": {"drafts": 4, "windows": 14, "policy": "write_back"},
    "disk": {"folder": True, "ratio": 1.0, "tokens": 40},
    "disk, tight": {"folder": True, "ratio": 0.7, "tokens": 40, "windows": 11, "chunk": 2},
    "disk, best effort": {"folder": True, "wait": "best_effort"},
    "disk, complete": {"folder": True, "wait": "wait_complete", "ratio": 1.0, "tokens": 40},
    "disk, EAGLE": {"folder": True, "drafts": 4, "windows": 14, "ratio": 1.0},
    "disk, write back": {"folder": True, "policy": "write_back"},
}


class Copies:
    """What was copied, and a fault: (kind, rows from, rows to) -> rows from, rows to."""

    seen, fault = Counter(), None

    @staticmethod
    def add(kind, source, target, sources, targets, size):
        sources, targets = sources.clone(), targets.clone()

        def work():
            Copies.seen[kind] += len(sources)
            changed = Copies.fault(kind, sources, targets) if Copies.fault else (sources, targets)
            for one, other in zip(*(places.tolist() for places in changed), strict=True):
                ctypes.memmove(target + other * size, source + one * size, size)

        Device.current_stream().add(work)


def to_host(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, **_):
    for layer in range(num_layers):
        Copies.add("kept", int(src_layers[layer]), int(dst_layers[layer]), src_indices, dst_indices, item_size)


def from_host(src, dst, src_indices, dst_indices, item_size, **_):
    Copies.add("loaded", src.data_ptr(), dst.data_ptr(), src_indices, dst_indices, item_size)


class Clock:
    now = 0.0

    @staticmethod
    def perf_counter():
        return Clock.now


def device_pool(case):
    """DeepSeekV4TokenToKVPool as far as a hierarchical cache and the allocator ask for it."""
    home, page = importlib.import_module(f"{MEMORY}.deepseek_v4_memory_pool"), model.PAGE
    ring = 16 if case["drafts"] or case["wide"] else 2 * model.SHORT
    kept = {"__init__": lambda self: None}
    kept["register_mapping"] = lambda self, mapping: setattr(self, "full_to_swa_index_mapping", mapping)
    kept["translate_loc_from_full_to_swa"] = lambda self, slots: self.full_to_swa_index_mapping[slots]
    base = home.DeepSeekV4TokenToKVPool
    pool = type("Pool", (base,), {name: lambda self, *_, **__: None for name in base.__abstractmethods__} | kept)()
    windows, layers = case["windows"] * page, len(LAYERS)

    def paged(pages, slots, layers=1):
        buffers = [torch.zeros(pages, slots * BYTES, dtype=torch.uint8) for _ in range(layers)]
        return SimpleNamespace(kv_buffer=buffers, bytes_per_page_padded=slots * BYTES, page_size=page)

    def states():
        kept = torch.zeros((case["windows"] + 1) * ring, 1, dtype=torch.int64)
        return [None, SimpleNamespace(ring_size=ring, kv_score_buffer=SimpleNamespace(kv_score=kept)), None]

    pages = case["tokens"] + 1
    vars(pool).update(
        **{"device": "cpu", "dtype": torch.uint8, "size": case["tokens"] * page, "page_size": page},
        **{"layer_num": layers, "start_layer": 0, "end_layer": layers, "swa_size": windows, "swa_page_size": page},
        **{"swa_kv_pool": paged(case["windows"] + 1, page, layers), "c4_kv_pool": paged(pages, page // model.SHORT)},
        **{"c128_kv_pool": paged(pages, page // model.LONG), "is_wide": case["wide"]},
        **{"compress_state_pools": states(), "indexer_compress_state_pools": states(), "sources_by_ratio": {}},
        **dict.fromkeys(("layer_transfer_counter", "swa_req_ring_size", "request_window")),
        **dict.fromkeys(("_unified_kv", "_unified_kv_fp8"), False),
    )
    index = paged(pages, page // model.SHORT).kv_buffer
    pool.c4_indexer_kv_pool = SimpleNamespace(index_k_with_scale_buffer=index)
    places = zip(LAYERS, (None, pool.c4_kv_pool, pool.c128_kv_pool), strict=True)
    pool.layer_mapping = [home.DeepSeekV4LayerItem(ratio, 0, place) for ratio, place in places]
    pool.host_pool_decls = lambda: ()
    return pool


def words(buffer):
    return buffer.numpy().reshape(-1).view(np.uint64)


class Pools(model.Pools):
    """slots_model's over the device's buffers, layer by layer; each layer when it is there."""

    def __init__(self, device, *sizes):
        tokens, windows, requests, speculative = sizes
        super().__init__(tokens, windows, requests, speculative or device.is_wide)
        self.forwards, self.waits = Stream(), ()
        index, states = device.c4_indexer_kv_pool.index_k_with_scale_buffer, device.indexer_compress_state_pools
        places = ((device.c4_kv_pool.kv_buffer, device.compress_state_pools), (index, states))
        held = [(words(entries[0]), words(kept[1].kv_score_buffer.kv_score)) for entries, kept in places]
        longs = words(device.c128_kv_pool.kv_buffer[0])
        self.layers = [
            [((), {})],
            [((model.SHORT,), {"short": entries, "short_state": kept}) for entries, kept in held],
            [((model.LONG,), {"long": longs})],
        ]
        self.of_layers = [words(buffer) for buffer in device.swa_kv_pool.kv_buffer]

    def run(self, batch, windows_of, slots_of, *, decode):
        for wait, windows, parts in zip(self.waits, self.of_layers, self.layers, strict=True):
            wait()
            for groups, buffers in parts:
                vars(self).update({"groups": groups, "windows": windows} | buffers)
                super().run(batch, windows_of, slots_of, decode=decode)

    def forget_rejected(self, rows, accepted):
        forget = super().forget_rejected
        self.forwards.add(lambda: forget(rows, accepted))


class Waits:
    """What a pass waits for in front of a layer, as of its launch: SGLang's own wait, on this in place of a stream."""

    def __init__(self, device, layer):
        self.places = []
        with Device.stream(self):
            device.wait_layer_transfer(layer)

    def wait_event(self, event):
        if event.stream is not None:
            self.places.append((event.stream, event.place))

    def __call__(self):
        for stream, place in self.places:
            stream.run_to(place)


class Worker(server.Worker):
    """Passes are put on the forward stream, with the slots as of their launch."""

    def forward_batch_generation(self, batch, on_publish=None, **given):
        self.device = self.allocator.get_kvcache()
        self.device.layer_transfer_counter.set_consumer(batch.hicache_consumer_index)  # as TpModelWorker does
        return super().forward_batch_generation(batch, on_publish, **given)

    def run(self, rows, *, decode):
        windows_of = self.allocator.full_to_swa_index_mapping.numpy().copy()
        slots_of, pools = self.requests.req_to_token.numpy().copy(), self.pools
        waits = [Waits(self.device, layer) for layer in range(len(LAYERS))]

        def work():
            pools.waits = waits
            pools.run(rows, windows_of, slots_of, decode=decode)

        pools.forwards.add(work)


class Load(load.Load):
    def server(self, version):
        Device.reset()
        Turns.reset()
        Copies.seen.clear()
        kept = {"ratio": 2.0, "policy": "write_through", "folder": None, "wait": "timeout", "wide": False}
        self.case = kept | self.case
        self.case |= {"folder": tempfile.mkdtemp() if self.case["folder"] is True else self.case["folder"]}
        made_by = SimpleNamespace(caches=caches, worker=Worker)
        made_by.pools = lambda *sizes: Pools(caches.device, *sizes)
        scheduler, worker, ended = server.scheduler_of(version, self.case, self.chance, made_by)
        scheduler.enable_hierarchical_cache = True
        scheduler.enable_hicache_storage = self.case["folder"] is not None
        controller = scheduler.tree_cache.cache_controller
        controller.load_fence_stream = controller.write_fence_stream = worker.pools.forwards
        setattr(controller, fenced_copies.FORWARDS, worker.pools.forwards)
        return scheduler, worker, ended

    def advance(self):
        Device.advance(self.chance)
        Turns.advance(self.chance)
        Clock.now += self.chance.choice([0, 0.1, 1])

    def run(self, steps):
        super().run(steps)
        for _ in range(30):
            Device.synchronize()
            self.advance()
            load.turn(self.scheduler, self.case["overlap"])
        self.look_at_host()

    def look_at_host(self):
        """Every page of the host is free or the prefix cache's."""
        tree, owned = self.scheduler.tree_cache, {"KV": [], "SWA": []}
        if type(tree.tree_core).__name__ != "UnifiedTreeCore":  # but the one in Rust
            tree.sanity_check()
            return
        nodes = [tree.root_node]
        while nodes:
            nodes += (node := nodes.pop()).children.values()
            for name, part in zip(owned, node.component_data, strict=False):
                owned[name] += [] if part.host_value is None else part.host_value.tolist()
        for name, slots in owned.items():
            (pool,) = (one.host_pool for one in tree.host_pool_group.entries if one.name.name == name)
            given_back = [slot for part in getattr(pool, "release_slots", ()) for slot in part.tolist()]
            counted = Counter(slots + pool.free_slots.tolist() + given_back)
            if counted != Counter(range(pool.size)):
                twice = [slot for slot, count in counted.items() if count > 1]
                raise model.Wrong(f"the host's {name}: {len(twice)} twice, {pool.size - len(counted)} lost")


def caches(version, case, arguments):
    fields = {
        **{"enable_hierarchical_cache": True, "hicache_ratio": case["ratio"], "hicache_size": 0},
        **{"hicache_write_policy": case["policy"], "hicache_io_backend": "kernel"},
        **{"hicache_mem_layout": "layer_first", "hicache_storage_prefetch_policy": case["wait"]},
        **{"hicache_storage_backend": "file" if case["folder"] else None},
        **{"hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": model.PAGE})},
        **({"hicache_host_memory_mode": "cache"} if since(version, "0.5.19") else {}),
    }
    found = server.everything()
    found.context.get_context().override("hierarchy", **fields)
    parallel = found.context.get_parallel()
    widths = dict.fromkeys(("tp_size", "pp_size", "attn_tp_size", "attn_dcp_size"), 1)
    widths |= dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_dcp_rank"), 0)
    if since(version, "0.5.22"):
        parallel.override_permanently(attn_dcp_rank=0)
    else:
        parallel._overrides.update(widths)
    caches.device = device_pool(case)
    requests, allocator, params = server.owners(case, caches.device)
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = case["folder"] or ""
    tree = found.tree.UnifiedRadixCache(params)
    tree.init_hicache(Arguments(arguments, fields | {"file_storage_path": case["folder"]}), params)
    for entry in tree.host_pool_group.entries:
        entry.host_pool.pin_memory = False
    return requests, allocator, tree


class Arguments:
    """A server's, which releases before 0.5.19 ask for what later ones ask their context."""

    def __init__(self, arguments, fields):
        self.arguments = arguments
        self.__dict__.update(fields)

    def __getattr__(self, name):
        return getattr(self.arguments, name)


def resting(original):
    """The turn may be another's in front of a file and behind it."""

    def function(self, *args, **kwargs):
        Turns.rest()
        found = original(self, *args, **kwargs)
        Turns.rest()
        Copies.seen[original.__name__] += found is not None
        return found

    return function


def install(version):
    """Behind slots_server's: streams, threads, a clock, and torch where the copies' kernels are."""
    controller = importlib.import_module(f"{server.SRT}.managers.cache_controller")
    hybrid = importlib.import_module(f"{MEMORY}.hybrid_cache.hybrid_cache_controller")
    copies = importlib.import_module(f"{MEMORY}.l2_transfer") if since(version, "0.5.18") else hybrid
    controller.device_module = copies.device_module = Device
    if since(version, "0.5.23"):
        importlib.import_module(f"{server.SRT}.utils.poll_timer").time = Clock
    for module in (controller, hybrid):
        module.threading, module.Queue = Turns(), Queue
    torch.get_device_module = lambda *_, **__: Device
    host = importlib.import_module(f"{MEMORY}.memory_pool_host")
    host.transfer_kv_all_layer_mla, host.transfer_kv_per_layer_mla = to_host, from_host
    host.host_memory_budget_bytes = lambda *_, **__: 1 << 40
    host.ALLOC_MEMORY_FUNCS = defaultdict(lambda: lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype))
    host.make_kernel_ptr_table = lambda refs, *_, **__: torch.tensor([r.data_ptr() for r in refs], dtype=torch.uint64)
    files = importlib.import_module(f"{MEMORY}.hicache_storage").HiCacheFile
    for name in ("get", "set", "batch_exists_v2"):
        setattr(files, name, resting(getattr(files, name)))


def outcome(version, case, seeds, steps):
    """-> what was seen, and what went wrong in the first run that did."""
    seen = Counter()
    for seed in seeds:
        try:
            one = Load(version, case, seed)
            one.run(steps)
        except Exception as problem:  # whatever ends a scheduler ends a server
            where = traceback.extract_tb(problem.__traceback__)[-1]
            return {"seen": seen, "wrong": f"seed {seed}: {type(problem).__name__} {problem} ({where.name})"[:400]}
        seen += Copies.seen + one.worker.seen
    return {"seen": seen, "wrong": None}


def restarted(version, seed, steps, forms):
    """Servers one after the other by one folder; forms: whether a server has DSPARK's states. -> what each read of the
    folder, and what went wrong."""
    texts, read = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, is_wide in enumerate(forms):
            one = Load(version, {"folder": folder, "wait": "wait_complete", "wide": is_wide}, seed + number)
            one.texts = texts
            try:
                one.run(steps)
            except model.Wrong as problem:
                return {"read": read, "wrong": f"server {number}: Wrong {problem}"}
            texts = one.texts
            read.append(Copies.seen["get"])
    return {"read": read, "wrong": None}


def wrong_ones(version):
    """SGLang with a fault in it, or copies that go wrong -> what is seen of it."""
    device = importlib.import_module(f"{MEMORY}.deepseek_v4_memory_pool").DeepSeekV4TokenToKVPool
    assembler = importlib.import_module(f"{MEMORY}.hybrid_cache.hybrid_pool_assembler")
    build, count = assembler._DeepSeekV4Strategy.build, Counter()

    def lost(kind, every):
        def fault(copied, sources, targets):
            count[copied] += 1
            return (sources[:0], targets[:0]) if copied == kind and count[copied] % every == 0 else (sources, targets)

        return fault

    def shifted(copied, sources, targets):
        return (sources, targets.roll(1)) if copied == "loaded" else (sources, targets)

    def without_states(*args, **kwargs):
        result = build(*args, **kwargs)
        result.sidecars[:] = [one for one in result.sidecars if not one.pool_name.name.endswith("STATE")]
        return result

    faults = {
        "a page is not loaded": (Copies, "fault", lost("loaded", 12)),
        "a page is not kept": (Copies, "fault", lost("kept", 12)),
        "pages are loaded to each other's place": (Copies, "fault", shifted),
        "nothing waits for what is loaded": (device, "wait_layer_transfer", lambda self, layer: None),
        "the states are not kept": (assembler._DeepSeekV4Strategy, "build", without_states),
        "streams do not wait for each other": (Stream, "wait_stream", lambda self, other: None),
    }
    for name, (owner, attribute, value) in faults.items():
        with load.changed(owner, attribute, value):
            yield name, outcome(version, CASES["host"], range(6), 150)["wrong"]


def take_ours(version):
    from packaging.specifiers import SpecifierSet

    for target in (t for row in (rows.FENCED_COPIES, rows.STORED_PAGES) for t in row.targets):
        if version in SpecifierSet(target.sglang):
            module, _, names = target.where.partition(":")
            owner, name = getattr(importlib.import_module(module), names.partition(".")[0]), names.partition(".")[2]
            home, _, function = target.replacement.partition(":")
            importlib.import_module(home).is_ours = lambda: True
            setattr(owner, name, getattr(importlib.import_module(home), function)(getattr(owner, name)))


SUITE = {"tight": (1, 60), "EAGLE, write back": (0, 80)}  # case -> seed and steps
RESTARTED = (2, 20)  # the same of servers one after the other


def of_suite(version):
    """What the suite asks, in a process that has driven slots_random_load: a little of each, each fault, and DSPARK's
    files, without ours and with it."""
    install(version)
    found = {"cases": {name: outcome(version, CASES[name], [seed], steps) for name, (seed, steps) in SUITE.items()}}
    found["wrong ones"] = dict(wrong_ones(version))
    found["alone"] = restarted(version, *RESTARTED, (True, False))
    take_ours(version)
    found["with ours"] = restarted(version, *RESTARTED, (True, False, False))
    return found


def main():
    version, seeds = sys.argv[1], range(int(sys.argv[2]))
    warnings.simplefilter("ignore")
    os.environ["SGLANG_DEBUG_MEMORY_POOL"] = "1"
    sys.meta_path.insert(0, server.Wheel(version))
    server.install(version)
    install(version)
    logging.disable(logging.ERROR)
    if "ours" in sys.argv:
        take_ours(version)
    if "faults" in sys.argv:
        print(json.dumps(dict(wrong_ones(version)), indent=1))
        print([restarted(version, seed, 60, forms) for seed in seeds for forms in ((True, False), (False, False))])
        return
    names = sys.argv[3].split(";") if sys.argv[3:] else CASES
    for name in names:
        found = outcome(version, CASES[name], seeds, 250)
        print(version, name, found["wrong"], dict(found["seen"]), flush=True)


if __name__ == "__main__":
    main()
