"""How a prefix cache's tree is walked: each release's own walks and keys, with ours in them and without, find and keep
the same; and how many tokens they copy. Nodes, and how one is cut in two, stand in; a page has four tokens."""

import random
from array import array
from collections import defaultdict
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.sglang_patches.fixes import prefix_walks as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import PREFIX_WALKS, SWA_CACHE, TREE_CORE, UNIFIED_CACHE
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import RELEASES, fetch, since

KEYS = "sglang.srt.mem_cache.radix_cache"
PAGE, BASE = 4, "full"
MOST = 20_000  # copies of a tree's keys: a walk that does not end has more
OF_RELEASE = {  # the caches that a release has for this model: without a hierarchy, and with one
    **{r: (SWA_CACHE, UNIFIED_CACHE) for r in RELEASES if not since(r, "0.5.16")},
    **{r: (UNIFIED_CACHE,) for r in RELEASES if since(r, "0.5.16") and not since(r, "0.5.17")},
    **{r: (TREE_CORE,) for r in RELEASES if since(r, "0.5.17") and not since(r, "0.5.21")},
}
CACHES = [(release, cache) for release, caches in OF_RELEASE.items() for cache in caches]
Phase = Enum("Phase", ["WALK", "COMMIT", "TAIL"])


@pytest.fixture(params=CACHES, ids=lambda one: f"{one[0]} {one[1].partition(':')[2]}", scope="module")
def cache(request):
    return request.param


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: True)


class Node:
    evicted, backuped, swa_tombstone, swa_uuid = False, False, False, None

    def __init__(self, *_, **__):
        self.children, self.parent, self.key, self.id = {}, None, None, 0
        self.component_data = defaultdict(lambda: SimpleNamespace(value=None))
        self.priority, self.full_lock_ref, self.swa_lock_ref, self.last_access_time = 0, 0, 0, 0

    def component(self, _):
        return self.component_data[BASE]


class ValueNode(Node):
    """Of 0.5.15's tree, whose nodes have one value."""

    value = property(lambda self: self.component_data[BASE].value)

    @value.setter
    def value(self, value):
        self.component_data[BASE].value = value


class Tree:
    page_size, sliding_window_size, is_eagle = PAGE, PAGE, False
    enable_storage = enable_hicache = disable = False
    cache_controller, components, _components_tuple, tree_components = None, (), (), (BASE,)
    full_evictable_size_ = swa_evictable_size_ = 0

    def __init__(self):
        self.root_node, self.component_evictable_size_ = self._new_node(), defaultdict(int)
        self.token_to_kv_pool_allocator = self.full_lru_list = self.swa_lru_list = QUIET

    def __getattr__(self, name):
        return QUIET

    def _split_node(self, key, node, length):
        assert type(key) is type(node.key) is self.names["RadixKey"]
        first, value = self._new_node(), node.component_data[BASE].value
        first.parent, first.key = node.parent, node.key[:length]
        first.parent.children[key.child_key(PAGE)] = first
        node.parent, node.key = first, node.key[length:]
        first.children = {node.key.child_key(PAGE): node}
        first.component_data[BASE].value, node.component_data[BASE].value = value[:length], value[length:]
        return (first, None) if self.where == TREE_CORE else first

    def _new_node(self, *_, **__):
        return (ValueNode if self.where == SWA_CACHE else Node)()

    def find(self, key):
        (
            values,
            *_,
        ) = self._match_prefix_helper(key)
        return torch.cat(values).tolist() if values else []

    def insert(self, key, value):
        params = SimpleNamespace(priority=0, prev_prefix_len=0, chunked=False, swa_evicted_seqlen=0, session_id=None)
        params.rotation_base = None
        if self.where == SWA_CACHE:
            return self._insert_helper(self.root_node, key, value, 0)
        if self.where == UNIFIED_CACHE:
            return self._insert_helper(self.root_node, key, value, params).prefix_len
        given = dict(phase=Phase.WALK, node=self.root_node, key=key, value=value, params=params, priority=0)
        given |= dict(pending_actions=[], total_prefix_length=0, is_new_leaf=False, target_node=None)
        state = SimpleNamespace(**given, result=Result(prefix_len=0))
        while state.phase is Phase.WALK:
            self._insert_walk_step(state)
        self._insert_commit_step(state)
        return state.total_prefix_length

    def kept(self, node=None):
        """Each node's tokens and slots, by the way to it."""
        found, node = [], node or self.root_node
        for child_key, child in node.children.items():
            assert type(child.key) is self.names["RadixKey"] and child_key == child.key.child_key(PAGE)
            of_child = type(child.key.token_ids), list(child.key.token_ids), child.key.is_bigram, child.key.extra_key
            found.append((child_key, *of_child, child.component_data[BASE].value.tolist(), self.kept(child)))
        return sorted(found, key=lambda one: one[0])


class Result(SimpleNamespace):
    def record_adopted_range(self, *_):
        pass


def made(release, where, *, ours, left_out=()):
    """One release's tree, its keys, and how many tokens of keys it has copied."""
    wheel, (module, name) = fetch(release), where.split(":")
    names = {"torch": torch, "array": array, "float64": float, "InsertResult": Result, "BASE_COMPONENT_TYPE": BASE}
    names |= {"UnifiedTreeNode": Node, "TreeNode": ValueNode, "_InsertPhase": Phase, "float": float}
    key = take(wheel, dict(names, hashlib=QUIET), "RadixKey", KEYS)
    methods = ("_match_prefix_helper", "_insert_helper", "_add_new_node", "_insert_walk_step", "_insert_commit_step")
    methods = {method: take(wheel, names, f"{name}.{method}", module) for method in methods}
    kind = type(name, (Tree,), {method: code for method, code in methods.items() if code})
    kind.where, kind.names, copied = where, {"RadixKey": key}, []
    slice_of = key.__getitem__

    def counted(self, part):
        copied.append(len(found := slice_of(self, part)))
        assert len(copied) < MOST, "a walk does not end"
        return found

    key.__getitem__ = counted
    owners = {f"{KEYS}:RadixKey": key, where: kind}
    for target in (t for t in PREFIX_WALKS.targets if ours and release in SpecifierSet(t.sglang)):
        owner, _, method = target.where.rpartition(".")
        function = target.replacement.partition(":")[2]
        if owner in owners and function not in left_out:
            setattr(owners[owner], method, getattr(fix, function)(getattr(owners[owner], method)))
    return kind(), key, copied


def ids(release, tokens):
    return array("q", tokens) if since(release, "0.5.13") else list(tokens)


def same(cache, left_out=(), steps=30):
    """Random prompts, that go on from each other: what is found, what is new, and what is kept."""
    release, where = cache
    for bigram, extra in ((False, None), (True, "salt")):
        trees, draw, known = [made(release, where, ours=ours, left_out=left_out) for ours in (False, True)], None, [[]]
        draw = random.Random(1)
        for step in range(steps):
            begun = draw.choice(known)
            begun = begun[: draw.randint(0, len(begun))]
            tokens = begun + [draw.randrange(3) for _ in range(PAGE * draw.randint(0, 5))]
            length = (len(tokens) - bigram) // PAGE * PAGE
            if length <= 0:
                continue
            tokens, found = tokens[: length + bigram], []
            for tree, key, _ in trees:
                made_key = key(ids(release, tokens), extra, is_bigram=bigram)
                given = torch.arange(length) + 1000 * step
                asked = tree.find(made_key) if step % 3 == 0 else tree.insert(made_key, given)
                found.append((asked, tree.kept(), list(made_key.token_ids) == tokens))
            assert found[0] == found[1]
            known.append(tokens)
        assert len(str(found[0][1])) > 1000, "a tree of some nodes"


def test_they_find_and_keep_the_same(cache):
    same(cache)


@pytest.mark.parametrize("left_out", ["replace_node", "replace_match"])
def test_each_part_is_needed(cache, left_out):
    """What a node keeps is a copy, and a node's key is compared with a key."""
    with pytest.raises((AssertionError, AttributeError, TypeError)):
        same(cache, (left_out,), steps=8)


def copies(cache, ours, turns=32):
    """-> of a conversation's look-up and of its next turn: so many tokens were copied, for each of its own"""
    release, where = cache
    tree, key, copied = made(release, where, ours=ours)
    tokens, found = [], []
    for turn in range(turns):
        tokens += [1000 + turn * PAGE + i for i in range(PAGE)]
        tree.insert(key(ids(release, tokens)), torch.arange(len(tokens)))
    for ask in (tree.find, lambda one: tree.insert(one, torch.arange(len(tokens) + PAGE))):
        copied.clear()
        ask(key(ids(release, tokens + list(range(PAGE)))))
        found.append(sum(copied) / len(tokens))
    return found


def test_what_is_copied_grows_with_the_prompt_alone(cache):
    """Thirty-two nodes: SGLang copies half of the prompt at each. The look-up of 0.5.20 does not."""
    before, behind = copies(cache, False), copies(cache, True)
    assert before[1] > 12 and (before[0] > 12 or since(cache[0], "0.5.20"))
    assert max(behind) < 4, "a page for the child, and a node's own length, at each"


def test_other_models_are_left_alone(cache, monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: False)
    assert copies(cache, True) == copies(cache, False)
