"""Who reads what of the prefix cache, and which slots it frees: the releases' own tree and allocator on the CPU, with
ours in it and without. Slots are numbers; a page has four, and a window is as long."""

import random
from collections import defaultdict
from types import SimpleNamespace

import numpy
import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes import shared_beginnings
from deepseek_v4_sm120.sglang_patches.rows.scheduler import SWA_CACHE
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import RELEASES, fetch, since

MODULE, CACHE = SWA_CACHE.split(":")
KEYS = "sglang.srt.mem_cache.radix_cache"
PAGE, PAGES = 4, 64
SLOTS = PAGE * (PAGES + 1)  # those of page 0 are nobody's
AFFECTED = [r for r in RELEASES if not since(r, "0.5.15")]

pytestmark = pytest.mark.parametrize("version", AFFECTED, scope="module")


class Base:
    """What the tree inherits and says nothing here."""

    def __getattr__(self, name):
        return QUIET


class Sizes(list):
    """One kind of slots: the free ones, by pages."""

    size = PAGE * PAGES

    def __init__(self):
        super().__init__(range(PAGES, 0, -1))

    def free(self, slots):
        pages = sorted({int(slot) // PAGE for slot in slots})
        assert not set(pages) & set(self), "freed twice"
        self.extend(pages)

    def available_size(self):
        return PAGE * len(self)


def allocator(version):
    module = f"sglang.srt.mem_cache.{'allocator.swa' if since(version, '0.5.13') else 'swa_memory_pool'}"
    names = {"torch": torch}
    methods = ("free", "free_swa", "_expand_to_full_pages")
    methods = {name: take(fetch(version), names, f"SWATokenToKVPoolAllocator.{name}", module) for name in methods}
    made = type("SWATokenToKVPoolAllocator", (), {name: method for name, method in methods.items() if method})()
    vars(made).update(page_size=PAGE, device="cpu", is_not_in_free_group=True, free_group=[])
    vars(made).update(full_attn_allocator=Sizes(), swa_attn_allocator=Sizes())
    made.full_to_swa_index_mapping = torch.zeros(SLOTS, dtype=torch.int64)
    return made


class Server:
    """The prefix cache of one release, and the requests that hold something of it."""

    def __init__(self, version, monkeypatch, *, ours):
        monkeypatch.setattr(shared_beginnings, "is_ours", lambda: ours)
        self.allocator = allocator(version)
        wheel, names = fetch(version), {"torch": torch, "defaultdict": defaultdict, "float64": numpy.float64}
        names |= {"KVCacheEventMixin": Base, "BasePrefixCache": object}
        names |= {"SWATokenToKVPoolAllocator": type(self.allocator), "float": float}
        names |= {"split_node_hash_value": lambda *_: (None, None), "time": SimpleNamespace(perf_counter=lambda: 0.0)}
        results = ("InsertParams", "InsertResult", "MatchPrefixParams", "MatchResult", "EvictParams", "EvictResult")
        for name in (*results, "IncLockRefResult", "DecLockRefParams", "DecLockRefResult"):
            names[name] = SimpleNamespace
        for name in ("gen_swa_uuid", "get_last_access_time", "TreeNode", "LRUList", CACHE):
            take(wheel, names, name, MODULE)
        self.key = take(wheel, {}, "RadixKey", KEYS)
        given = dict(req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=PAGE, disable=False)
        given |= dict(is_eagle=False, enable_kv_cache_events=False, enable_metrics=False, sliding_window_size=PAGE)
        kind = names[CACHE]
        kind._insert_helper = shared_beginnings.replace_insert(kind._insert_helper)
        self.cache, self.running, self.content = kind(SimpleNamespace(**given)), [], {}

    def computed(self, tokens):
        """A request has read this prompt, as cache_unfinished_req leaves it; None: there is no room for it."""
        found = self.cache.match_prefix(SimpleNamespace(key=self.key(list(tokens))))
        hit, node = found.device_indices, found.last_device_node
        lock = self.cache.inc_lock_ref(node)
        slots = self.written(tokens, hit)
        if slots is None:
            self.unlock(node, lock)
            return None
        self.insert(tokens, slots, len(hit), 0)
        found = self.cache.match_prefix(SimpleNamespace(key=self.key(list(tokens))))
        assert len(found.device_indices) == len(tokens)
        self.unlock(node, lock)
        lock = self.cache.inc_lock_ref(found.last_device_node)
        request = SimpleNamespace(
            tokens=tuple(tokens), slots=found.device_indices, node=found.last_device_node, lock=lock
        )
        self.running.append(request)
        return request

    def written(self, tokens, hit):
        """The slots of these tokens, those of `hit` and new ones; None: there is no room."""
        fresh = (len(tokens) - len(hit)) // PAGE
        full, windows = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        short = [PAGE * max(fresh - len(one), 0) for one in (full, windows)]
        self.cache.evict(SimpleNamespace(num_tokens=short[0], swa_num_tokens=short[1]))
        if min(len(full), len(windows)) < fresh:
            return None
        slots = [torch.arange(PAGE) + PAGE * full.pop() for _ in range(fresh)]
        for page in slots:
            self.allocator.full_to_swa_index_mapping[page] = torch.arange(PAGE) + PAGE * windows.pop()
        slots = torch.cat([hit, *slots]).to(torch.int64)
        self.content |= {int(slots[i]): tuple(tokens[: i + 1]) for i in range(len(hit), len(slots))}
        return slots

    def insert(self, tokens, slots, own, evicted):
        given = dict(key=self.key(list(tokens)), value=slots.clone(), prev_prefix_len=own, swa_evicted_seqlen=evicted)
        self.cache.insert(SimpleNamespace(**given))

    def answered(self, request, answer):
        """The request ends with these tokens behind its prompt, and has freed what lies behind its last window."""
        tokens, own = (*request.tokens, *answer), len(request.slots)
        slots = self.written(tokens, request.slots)
        if slots is not None:
            evicted = max(len(tokens) - 2 * PAGE, own)
            self.allocator.free_swa(slots[own:evicted])
            self.insert(tokens, slots, own, evicted)
        self.ended(request)

    def unlock(self, node, lock):
        self.cache.dec_lock_ref(node, SimpleNamespace(swa_uuid_for_lock=lock.swa_uuid_for_lock))

    def ended(self, request):
        self.running = [one for one in self.running if one is not request]
        self.unlock(request.node, request.lock)

    def free_pages(self):
        return set(self.allocator.full_attn_allocator)

    def check(self):
        """Each slot has one owner, and each running request reads what it began with."""
        full, windows, stack = [], [], list(self.cache.root_node.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            full += node.value.tolist()
            mapped = self.allocator.full_to_swa_index_mapping[node.value]
            assert bool((mapped == 0).all() if node.swa_tombstone else (mapped > 0).all())
            windows += [] if node.swa_tombstone else mapped.tolist()
        for held, free in ((full, self.allocator.full_attn_allocator), (windows, self.allocator.swa_attn_allocator)):
            assert len(held) == len(set(held)) and len(held) + free.available_size() == free.size
            assert not {slot // PAGE for slot in held} & set(free)
        assert self.cache.full_evictable_size() + self.cache.full_protected_size() == len(full)
        assert self.cache.swa_evictable_size() + self.cache.swa_protected_size() == len(windows)
        for request in self.running:
            assert not {int(slot) // PAGE for slot in request.slots} & self.free_pages(), "read, and free"
            for i, slot in enumerate(request.slots.tolist()):
                assert self.content[slot] == request.tokens[: i + 1]


def begun(server, *, runs):
    """A request that began as others did, behind whose window the slots of the windows were given to others."""
    server.ended(server.computed([*range(8), *range(90, 98)]))  # so the beginning is a node of its own
    first = server.computed(range(16))
    if not runs:
        server.ended(first)
    server.cache.evict(SimpleNamespace(num_tokens=0, swa_num_tokens=16))
    beginning = server.cache.root_node.children[tuple(range(4))]
    assert beginning.swa_tombstone and beginning.value.tolist() == first.slots[:8].tolist()
    return first


def another(server):
    return server.computed([*range(8), *range(50, 54)])


def is_free(server, slots):
    return {int(slot) // PAGE for slot in slots} <= server.free_pages()


def test_what_is_read_stays(version, monkeypatch):
    server = Server(version, monkeypatch, ours=True)
    first, second = begun(server, runs=True), another(server)
    assert first.slots[:8].tolist() == second.slots[:8].tolist()
    server.check()
    server.ended(first), server.ended(second)
    server.cache.evict(SimpleNamespace(num_tokens=SLOTS, swa_num_tokens=SLOTS))
    assert len(server.free_pages()) == len(server.allocator.swa_attn_allocator) == PAGES


def test_sglang_alone_frees_it(version, monkeypatch):
    server = Server(version, monkeypatch, ours=False)
    first, second = begun(server, runs=True), another(server)
    assert is_free(server, first.slots[:8])  # so the row is needed
    assert first.slots[:8].tolist() != second.slots[:8].tolist()


def test_what_nobody_reads_is_replaced_as_before(version, monkeypatch):
    found = []
    for ours in (True, False):
        server = Server(version, monkeypatch, ours=ours)
        first, second = begun(server, runs=False), another(server)
        assert is_free(server, first.slots[:8])
        server.check()
        found.append(second.slots.tolist())
    assert found[0] == found[1]


def test_of_a_prompt_that_goes_another_way_within_a_page_whole_pages_are_shared(version, monkeypatch):
    server = Server(version, monkeypatch, ours=True)
    first, tokens = begun(server, runs=True), [*range(6), *range(50, 56)]
    slots = server.written(tokens, torch.arange(0))  # while nobody had asked for it
    server.insert(tokens, slots, 0, 0)
    server.check()
    assert is_free(server, slots[:PAGE]) and not is_free(server, slots[PAGE:])
    assert [node.swa_tombstone for node in chain(server.cache.root_node, first.tokens)] == [False, True, False]


def test_two_that_are_read_at_once_are_kept_once(version, monkeypatch):
    """Whose beginning has its windows: nothing is given to it."""
    server = Server(version, monkeypatch, ours=True)
    first = server.computed(range(8))
    slots = server.written(first.tokens, torch.arange(0))
    server.insert(first.tokens, slots, 0, 0)
    server.check()
    assert is_free(server, slots) and not is_free(server, first.slots)


def test_what_has_lost_all_its_windows_itself_gives_none(version, monkeypatch):
    server = Server(version, monkeypatch, ours=True)
    first, tokens = begun(server, runs=True), [*range(8), *range(50, 54)]
    slots = server.written(tokens, torch.arange(0))
    server.allocator.free_swa(slots[: 2 * PAGE])
    server.insert(tokens, slots, 0, 2 * PAGE)
    server.check()
    assert [node.swa_tombstone for node in chain(server.cache.root_node, tokens)] == [True, False]
    assert is_free(server, slots[:8]) and not is_free(server, first.slots)


def test_of_what_has_lost_its_windows_itself_the_rest_is_taken(version, monkeypatch):
    server = Server(version, monkeypatch, ours=True)
    first, tokens = begun(server, runs=True), [*range(8), *range(50, 54)]
    slots = server.written(tokens, torch.arange(0))
    server.allocator.free_swa(slots[:PAGE])
    server.insert(tokens, slots, 0, PAGE)
    server.check()
    behind = [node.swa_tombstone for node in chain(server.cache.root_node, tokens)]
    assert behind == [True, False, False] and is_free(server, slots[:8])
    server.ended(first)
    server.cache.evict(SimpleNamespace(num_tokens=SLOTS, swa_num_tokens=SLOTS))
    assert len(server.free_pages()) == len(server.allocator.swa_attn_allocator) == PAGES


def chain(node, tokens):
    """The nodes of a sequence, the beginning first."""
    while tokens:
        node = node.children[tuple(tokens[:PAGE])]
        tokens = tokens[len(node.value) :]
        yield node


def run(server, seed, steps):
    """Answers are those of their prompts, so that several requests may have the same."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(1000) for _ in range(PAGE * 6)] for _ in range(4)]
    for _ in range(steps):
        if server.running and draw.random() < 0.45:
            request = draw.choice(server.running)
            answer = random.Random(sum(request.tokens)).choices(range(1000), k=PAGE * draw.randrange(2, 7))
            server.answered(request, answer) if draw.random() < 0.5 else server.ended(request)
        else:
            shared = draw.choice(beginnings)[: PAGE * draw.randrange(7)]
            more = draw.choices(range(1000), k=PAGE * draw.randrange(1, 4))
            known = [request.tokens for request in server.running]
            server.computed(draw.choice(known) if known and draw.random() < 0.3 else [*shared, *more])
        if draw.random() < 0.3:
            server.cache.evict(SimpleNamespace(num_tokens=0, swa_num_tokens=PAGE * draw.randrange(12)))
        server.check()


def test_random_load(version, monkeypatch):
    for seed in range(4):
        run(Server(version, monkeypatch, ours=True), seed, 150)
    with pytest.raises(AssertionError, match="read, and free"):
        for seed in range(4):
            run(Server(version, monkeypatch, ours=False), seed, 150)
