"""Which files of a hierarchical cache a server reads: each release's own backend, in folders that two servers share."""

import os
import uuid
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.stored_pages import replace_register, replace_suffixed
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch

MODULE = "sglang.srt.mem_cache.hicache_storage"
METHODS = (
    *("_get_suffixed_key", "_get_component_key", "_collect_existing_component_keys", "batch_exists_v2"),
    *("get", "set", "exists", "_log_key", "_read_page", "_write_page", "_batch_io_v2", "batch_get_v2", "batch_set_v2"),
)
SWA, STATE = "swa", "deepseek_v4_c4_state"

pytestmark = [pytest.mark.usefixtures("opened"), every_release()]


class Pool:
    """Of the host: pages of so many layers and bytes a layer."""

    page_size = 1

    def __init__(self, layers, size):
        self.layer_num, self.size_per_token = layers, size
        self.pages = torch.zeros(4, layers * size, dtype=torch.uint8)

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.pages[0])

    def get_data_page(self, index, flat=True):
        return self.pages[index]

    def set_from_flat_data_page(self, index, page):
        self.pages[index] = page


class Server:
    """Two pools, and the files of a folder. states: the bytes of a layer's page of them."""

    def __init__(self, version, folder, states, *, ours, layers=2):
        names = {"os": os, "torch": torch, "uuid": uuid, "PoolHitPolicy": SimpleNamespace(ALL_PAGES=0)}
        names["PoolName"] = SimpleNamespace(KV="kv", MAMBA=SimpleNamespace(value="mamba"))
        names["PoolTransferResult"] = lambda pages, hits, *_, **__: pages
        wheel, register = fetch(version), "HiCacheStorage.register_mem_host_pool_v2"
        kind = {name: take(wheel, dict(names), f"HiCacheFile.{name}", MODULE) for name in METHODS}  # one is `set`
        kind["register"] = take(wheel, names, register, MODULE)
        if ours:
            kind["register"] = replace_register(kind["register"])
            kind["_get_suffixed_key"] = replace_suffixed(kind["_get_suffixed_key"])
        self.files = type("Files", (), {name: method for name, method in kind.items() if method})()
        self.files.file_path, self.files.metadata_cache = str(folder), None
        self.files._evictor = SimpleNamespace(**dict.fromkeys(("touch", "commit", "reserve"), lambda *_, **__: True))
        self.files.config_suffix = self.files.tp_config_suffix = "_model"
        self.pools = {SWA: Pool(layers, 8), STATE: Pool(layers, states)}
        for name, pool in self.pools.items():
            self.files.register(pool, name)

    def transfers(self, keys):
        slots = torch.arange(len(keys))
        return [SimpleNamespace(name=n, keys=keys, host_indices=slots, hit_policy=0) for n in self.pools]

    def write(self, *keys):
        for pool in self.pools.values():
            pool.pages.random_(1, 255)
        assert all(self.files.set(key, torch.zeros(0, dtype=torch.uint8)) for key in keys)
        assert all(map(all, self.files.batch_set_v2(self.transfers(keys)).values()))
        return {name: pool.pages[: len(keys)].clone() for name, pool in self.pools.items()}

    def finds(self, *keys):
        return self.files.batch_exists_v2(list(keys), self.transfers(keys))

    def read(self, *keys):
        assert all(map(all, self.files.batch_get_v2(self.transfers(keys)).values()))
        return {name: pool.pages[: len(keys)].clone() for name, pool in self.pools.items()}


def test_a_server_finds_its_own_pages_again(version, tmp_path):
    written = Server(version, tmp_path, 16, ours=True).write("a", "b")
    again = Server(version, tmp_path, 16, ours=True)
    assert again.finds("a", "b", "c") == 2
    read = again.read("a", "b")
    assert all(torch.equal(read[name], written[name]) for name in written)
    assert all(name.endswith("_model.bin") for name in os.listdir(tmp_path))  # by which SGLang knows what is its own


@pytest.mark.parametrize(("before", "after"), [((32, 2), (16, 2)), ((16, 2), (32, 2)), ((16, 3), (16, 2))])
def test_pages_of_another_form_are_not_there(version, tmp_path, before, after):
    Server(version, tmp_path, before[0], ours=True, layers=before[1]).write("a")
    other = Server(version, tmp_path, after[0], ours=True, layers=after[1])
    assert other.finds("a") == 0
    written = other.write("a")
    assert torch.equal(other.read("a")[STATE], written[STATE])


def test_sglang_alone_takes_longer_pages_for_its_own(version, tmp_path):
    written = Server(version, tmp_path, 32, ours=False).write("a")
    other = Server(version, tmp_path, 16, ours=False)
    assert other.finds("a") == 1
    read = other.read("a")
    assert torch.equal(read[SWA], written[SWA])
    assert torch.equal(read[STATE][0], written[STATE][0, :32])  # the first layer's, for both


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_names_are_sglangs(version, tmp_path, model, card, opened):
    opened(model, card)
    Server(version, tmp_path, 16, ours=True).write("a")
    mine = set(os.listdir(tmp_path))
    assert mine == {"a_model.bin", f"a.{SWA}_model.bin", f"a.{STATE}_model.bin"}
