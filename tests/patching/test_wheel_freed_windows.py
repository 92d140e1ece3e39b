"""Whose window is freed behind a pass with two prompts that begin alike: the releases' own allocators, and what their
prefix cache does to them, on the CPU. A page has four slots."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.freed_windows import replace_free_swa
from deepseek_v4_sm120.sglang_patches.table import FREED_WINDOWS
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import fetch, since

COMPONENT = "sglang.srt.mem_cache.unified_cache.components.swa_component"
PAGE, PAGES = 4, 8
ACTIONS = ("FreeComponentDeviceSlot", "FreeComponentHostSlot", "RebuildFullToSWAMapping", "RecoverSWAWithLockedFull")

pytestmark = [pytest.mark.usefixtures("opened"), pytest.mark.parametrize("version", ["0.5.18"], scope="module")]


class Pool:
    full_kv_pool = swa_kv_pool = None

    def register_mapping(self, mapping):
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, slots):
        return self.full_to_swa_index_mapping[slots]


class Cache:
    """The allocator of a release, and the part of its prefix cache that gives a node a window."""

    def __init__(self, version, *, ours):
        wheel, names = fetch(version), {"torch": torch, "BaseSWAKVPool": Pool, "ABC": object}
        names["abc"] = SimpleNamespace(ABC=object, abstractmethod=lambda method: method)
        kinds = (
            "base:BaseTokenToKVPoolAllocator",
            "paged:PagedTokenToKVPoolAllocator",
            "swa:SWATokenToKVPoolAllocator",
        )
        for module, _, name in (kind.partition(":") for kind in kinds):
            kind = take(wheel, names, name, f"sglang.srt.mem_cache.allocator.{module}")
        if ours:
            kind.free_swa = replace_free_swa(kind.free_swa)
        self.allocator = kind(PAGE * PAGES, PAGE * PAGES, PAGE, torch.int64, "cpu", Pool(), False)
        names |= {name: type(name, (SimpleNamespace,), {}) for name in (*ACTIONS, "SWARebuild")}
        self.names, self.values = names, {}
        self.apply = take(wheel, names, "SWAComponent.apply_component_action", COMPONENT).__get__(self)
        self.cache = SimpleNamespace(token_to_kv_pool_allocator=self.allocator)
        self.tree_core = SimpleNamespace(set_component_device_value=self.set_value)
        self.component_type, self._unified_allocator = "SWA", lambda: None  # 0.5.19's other pool

    def set_value(self, node, component, value):
        self.values[node] = value

    def _translate_full_to_swa(self, slots):
        return self.allocator.translate_loc_from_full_to_swa(slots)

    def computed(self):
        """The slots of a prompt's page, which has a window's as well: (of the KV cache, of the windows)"""
        full, window = (
            one.alloc(PAGE) for one in (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        )
        self.allocator.set_full_to_swa_mapping(full, window)
        return full, window

    def is_free(self, window):
        return int(window[0]) // PAGE in self.allocator.swa_attn_allocator.free_pages.tolist()


def passed(version, *, ours):
    """What is behind a pass: (is the longer prompt's old window free, the shorter one's, where the latter reads)"""
    cache = Cache(version, ours=ours)
    (longer, left), (shorter, window) = cache.computed(), cache.computed()
    cache.allocator.free_group_begin()
    cache.allocator.free_swa(longer)  # its window is far behind; the prefix cache has its slots of the KV cache
    cache.apply(cache.names["RecoverSWAWithLockedFull"](node_id=1, kept_full=longer, incoming_full=shorter))
    cache.allocator.free_group_end()
    assert torch.equal(cache.values[1], window)  # what the prefix cache believes
    assert cache.allocator.full_available_size() == PAGE * (PAGES - 1)
    return cache.is_free(left), cache.is_free(window), cache._translate_full_to_swa(longer).tolist(), window.tolist()


def test_a_window_that_is_read_stays_and_one_that_was_left_is_free(version):
    left, window, read, expected = passed(version, ours=True)
    assert left and not window and read == expected


def test_sglang_alone_frees_the_window_that_is_read(version):
    left, window, read, _ = passed(version, ours=False)
    assert window and not left and read == [0] * PAGE  # so the row is needed


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    assert passed(version, ours=True) == passed(version, ours=False)


def test_what_is_freed_outside_of_a_group_is_as_ever(version):
    cache = Cache(version, ours=True)
    full, window = cache.computed()
    cache.allocator.free_swa(full)
    assert cache.is_free(window) and cache.allocator.is_not_in_free_group
    cache.allocator.free_group_begin()
    cache.allocator.free_swa(cache.computed()[0])
    assert not cache.allocator.is_not_in_free_group


def test_the_releases_beside_it_look_up_what_they_free_at_once(version):
    (target,) = FREED_WINDOWS.targets
    assert target.sglang == ">=0.5.18,<0.5.19"
    left, window, read, expected = passed("0.5.19", ours=False)
    assert since("0.5.19", version) and left and not window and read == expected
