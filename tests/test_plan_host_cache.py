"""--host-cache of plan and serve: prompts that the host's memory keeps. What SGLang makes of a ratio, of a size and of
neither is each release's own code."""

import re
import stat
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan import cards, host_cache, launch, memory
from deepseek_v4_sm120.commands.plan import command as plan_command
from deepseek_v4_sm120.commands.serve import command as serve
from deepseek_v4_sm120.commands.speculation import EAGLE, Speculation
from tests.patching.test_wheel_wo_a import QUIET, Quiet, take
from tests.patching.wheels import content, every_release, fetch, members, since, tree
from tests.test_plan import flags, request

ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
POOL, AUTO = "sglang.srt.mem_cache.deepseek_v4_memory_pool", "sglang.srt.mem_cache.hicache_auto_size"
HEADROOM = "sglang.srt.mem_cache.host_memory"
ARGUMENTS = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/serving.py")
FIRST = ".".join(map(str, host_cache.SINCE))


def sized(version, tokens, windows, **given):
    """-> what the release makes of pools in pages: (on the host of the KV cache, of the windows)"""
    given = SimpleNamespace(**({"hicache_size": 0, "hicache_ratio": 2.0} | given))
    count = take(fetch(version), {"get_memory": lambda: given}, "_deepseek_v4_num_host_pages", ASSEMBLER)
    pages = memory.PAGE_TOKENS
    params = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(size_full=tokens * pages))
    words = {"params": params, "page_size": pages, "swa_page_size": pages}
    words |= {"kvcache": SimpleNamespace(size=tokens * pages, swa_size=windows * pages)}
    words |= {} if since(version, "0.5.19") else {"server_args": given}
    return count(**words)[:2]


@every_release(FIRST)
def test_sglang_takes_a_ratio_of_all_pools_and_no_size(version):
    assert sized(version, 1000, 100) == (2000, 200)
    assert sized(version, 1000, 100, hicache_ratio=3.5) == (3500, 350)
    with pytest.raises(ValueError, match="--hicache-size"):
        sized(version, 1000, 100, hicache_size=40)


@every_release(FIRST)
def test_without_a_ratio_it_ends_at_its_start_since(version):
    """Its own sizing knows pools by their classes, and this model's is none of them."""
    wheel = fetch(version)
    if not since(version, ".".join(map(str, host_cache.UNSIZED_SINCE))):
        assert f"{AUTO.replace('.', '/')}.py" not in members(wheel)
        return
    (known,) = (
        {one.id for one in node.value.elts}
        for node in tree(wheel, AUTO).body
        if getattr(node, "targets", None) and node.targets[0].id == "_SIZEABLE_POOLS"
    )
    kinds = {n.name: {b.id for b in n.bases} for n in tree(wheel, POOL).body if hasattr(n, "bases")}
    bases = kinds["DeepSeekV4TokenToKVPool"]
    assert bases == {"BaseSWAKVPool"} and not known & (bases | {"DeepSeekV4TokenToKVPool"})

    class Pool:
        pass

    names = {"_SIZEABLE_POOLS": (str,), "BaseSWAKVPool": Pool}
    estimate = take(wheel, names, "_estimate_hicache_bytes", AUTO)
    params = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=Pool))
    with pytest.raises(ValueError, match="does not support Pool"):
        estimate(params, None)


def held(plan):
    """Bytes of a card's pools that go to the host, by their pages' own sizes."""
    m, pages = plan.request.model, plan.tokens // memory.PAGE_TOKENS

    def padded(entries):
        return -(-entries * memory.KV_TOKEN_BYTES // memory.PAGE_ALIGN) * memory.PAGE_ALIGN

    entries = m.layers_c4 * (padded(64) + 64 * memory.INDEX_KEY_BYTES) + m.layers_c128 * padded(2)
    ring = 16 if plan.request.rows else 8
    states = m.layers_c4 * ring * 2 * 2 * (m.head_dim + m.index_dim) * 4
    windows = plan.pools.window(plan.tokens) // memory.PAGE_TOKENS
    return pages * entries + windows * ((m.layers + bool(plan.request.rows)) * padded(256) + states)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.21", "0.5.23"])
@pytest.mark.parametrize("gb", [60, 100, 333.5])
def test_the_hosts_copies_fit_in_what_was_given_and_fill_it(version, gb):
    plan = launch.make(request(gpus=2, sglang=version, concurrency=4, context=524_288, host_cache_gb=gb))
    assert plan.fits
    said = flags(plan)
    assert said[host_cache.FLAG] == ""
    taken = float(said[host_cache.RATIO]) * held(plan) * 2 / 1e9
    tenth = 0.1 * held(plan) * 2 / 1e9
    assert gb - tenth <= taken <= gb
    (note,) = [n for n in plan.notes if "GB for it" in n]
    assert "500,000 tokens come back as 1.9 GB a card" in note


def test_without_it_a_plan_says_what_would_be_read_anew():
    plan = launch.make(request(gpus=2, concurrency=4, context=524_288))
    assert host_cache.FLAG not in flags(plan)
    (note,) = [n for n in plan.notes if "--host-cache" in n]
    assert f"{plan.tokens:,} tokens together" in note and f"{held(plan) * 2e6 / plan.tokens / 1e9:.1f} GB" in note
    for more in ({"sglang": "0.5.16"}, {"gpus": 4, "stages": 2, "speculation": None}):
        other = launch.make(request(**({"gpus": 2, "concurrency": 4} | more)))
        assert other.fits and not [n for n in other.notes if "--host-cache" in n]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host_cache_gb": 0.0}, "1 to 16384"),
        ({"host_cache_gb": float("nan")}, "1 to 16384"),
        ({"host_cache_gb": 20.0}, "2[3-7] GB and up"),
        ({"host_cache_gb": 90.0, "sglang": "0.5.16"}, "take 0.5.17 or newer"),
        ({"host_cache_gb": 90.0, "stages": 2}, "beside stages"),
        ({"host_cache_gb": 90.0, "card": cards.GB10}, "there is no other"),
    ],
)
def test_what_is_no_such_plan_is_refused(given, words):
    with pytest.raises(CommandError, match=words):
        launch.make(request(**({"gpus": 2, "concurrency": 4, "context": 524_288} | given)))


def asked_of_the_host(version, plan, ratio):
    """-> bytes of all host pools that the release's own builder makes of one card's, for these pools of the cards"""
    m, rows = plan.request.model, plan.request.rows
    tokens, windows = plan.tokens, plan.pools.window(plan.tokens)
    pages, asked = memory.PAGE_TOKENS, []

    def pool(layers, entries):
        size = -(-entries * memory.KV_TOKEN_BYTES // memory.PAGE_ALIGN) * memory.PAGE_ALIGN
        return SimpleNamespace(kv_buffer=[None] * layers, bytes_per_page_padded=size, page_size=pages)

    kinds = [ratio for ratio, layers in m.kinds() for _ in range(layers)]
    states = {i: 2 * 2 * (16 if rows else 8) * 4 for i, kind in enumerate(kinds) if kind == 4}  # bytes of one dimension
    keys = SimpleNamespace(shape=(1, 64 * memory.INDEX_KEY_BYTES), element_size=lambda: 1)
    kvcache = SimpleNamespace(
        **{"start_layer": 0, "end_layer": len(kinds), "size": tokens, "swa_size": windows, "swa_page_size": pages},
        **{"swa_kv_pool": pool(len(kinds), 256), "c4_kv_pool": pool(m.layers_c4, 64), "_unified_kv": False},
        c128_kv_pool=pool(m.layers_c128, 2),
        compress_state_pools={i: s * m.head_dim for i, s in states.items()},
        indexer_compress_state_pools={i: s * m.index_dim for i, s in states.items()},
        c4_indexer_kv_pool=SimpleNamespace(index_k_with_scale_buffer=[keys] * m.layers_c4),
        layer_mapping=[SimpleNamespace(compress_ratio=kind, compress_layer_id=0) for kind in kinds],
    )
    params, arguments = Quiet(), Quiet()  # groups and the like, which nobody sizes by
    vars(params).update(
        token_to_kv_pool_allocator=SimpleNamespace(size_full=tokens, swa_attn_allocator=QUIET),
        page_size=pages,
        mtp_draft_device_pools=[SimpleNamespace(swa_kv_pool=pool(1, 256))] * bool(rows),
    )
    vars(arguments).update(hicache_size=0, hicache_ratio=ratio)
    names = {"get_memory": lambda: arguments}
    names |= dict.fromkeys(("_DeepSeekV4LayerMappings", "_IndexerRegion"), SimpleNamespace)
    names |= {
        "DeepSeekV4PagedHostPool": lambda **given: asked.append(
            len(given["device_buffers"]) * given["item_bytes"] * given["num_host_pages"]
        ),
        "DeepSeekV4StateHostPool": lambda **given: asked.append(sum(given["state_pools"]) * given["num_host_pages"]),
    }
    parts = ("_deepseek_v4_num_host_pages", "_dsv4_compressed_region_buffers", "_dsv4_indexer_regions")
    for name in (*parts, "_resolve_deepseek_v4_layer_mappings"):
        names |= {name: found} if (found := take(fetch(version), dict(names), name, ASSEMBLER)) is not None else {}
    words = {"params": params, "kvcache": kvcache, "load_cache_event": None, "storage_backend": None}
    words |= {} if since(version, "0.5.19") else {"server_args": arguments}
    take(fetch(version), names, "build_deepseek_v4_hicache_stack", ASSEMBLER)(**words)
    return sum(asked)


@every_release(FIRST)
@pytest.mark.parametrize("drafts", [0, 1])
def test_what_a_card_locks_is_what_the_release_asks_for(version, drafts):
    drafter = Speculation(EAGLE, 2) if drafts else None
    plan = launch.make(request(gpus=2, sglang=version, concurrency=4, context=65_536, speculation=drafter))
    found = asked_of_the_host(version, plan, 2.0)
    window = plan.pools.window(plan.tokens) * memory._entry_bytes(1, True)  # the drafter's, not there up to 0.5.17
    lacks = window * bool(drafts) * (not since(version, "0.5.18"))
    assert found == pytest.approx(2 * (host_cache.host_bytes(plan) / 2 - lacks), rel=1e-3) and found > 5e9


PLANNED = ["serve", "--gpus", "2", "--memory", "96", "--card", "pro", "--dry-run", "--sglang"]


@pytest.mark.parametrize(
    ("version", "extra", "words"),
    [
        ("0.5.23", ["--enable-hierarchical-cache"], "ends its start"),
        ("0.5.21", ["--enable-hierarchical-cache", "--hicache-size", "0"], "ends its start"),
        ("0.5.23", ["--hicache-size", "40", "--enable-hierarchical-cache"], "--hicache-size behind --"),
        ("0.5.17", ["--hicache-size=40"], "--hicache-size behind --"),
        ("0.5.23", ["--enable-hicache"], "GB of the host's memory) behind it"),  # SGLang's other name for it, since
        ("0.5.23", ["--enable-hicache", "--hicache-ratio=2"], None),
        ("0.5.20", ["--enable-hierarchical-cache"], None),
        ("0.5.23", ["--enable-hierarchical-cache", "--hicache-ratio=2"], None),
        ("0.5.23", ["--enable-hierarchical-cache", "--hicache-ratio", "2"], None),
    ],
)
def test_serve_refuses_what_would_end_the_start(version, extra, words, capsys):
    assert main([*PLANNED, version, "--", *extra]) == (0 if words is None else 2)
    said = capsys.readouterr()
    assert words is None or words in said.err


def test_beside_stages_no_size_is_named_that_is_not_known(capsys):
    """A stage has a share of the layers: a copy of all of them is more than it takes."""
    words = [*PLANNED, "0.5.23", "--gpus", "4", "--pp-size", "2", "--", "--enable-hierarchical-cache"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "say --hicache-ratio" in said and "GB" not in said and "--host-cache" not in said


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])  # 20.4 and 15.4 GB
def test_what_is_named_as_the_least_is_taken(version):
    given = {"gpus": 2, "sglang": version, "concurrency": 8 if version == "0.5.17" else 1}
    with pytest.raises(CommandError, match=r"take (\d+) GB and up") as refused:
        launch.make(request(**given, host_cache_gb=2.0))
    least = float(re.search(r"take (\d+) GB", str(refused.value)).group(1))
    assert host_cache.FLAG in flags(launch.make(request(**given, host_cache_gb=least)))


@pytest.mark.parametrize("version", ["0.5.12", "0.5.12.post1"])
def test_without_its_tree_0_5_12_has_none_for_this_model(version, monkeypatch, capsys):
    """Its own class ends the start of a pool that it does not know, behind the weights."""
    names = {name: type(name, (), {}) for name in ("MHATokenToKVPool", "NSATokenToKVPool", "MLATokenToKVPool")}
    names |= {"RadixCache": object, "super": super}
    cache = take(fetch(version), names, "HiRadixCache", "sglang.srt.mem_cache.hiradix_cache")
    bases = {n.name: {b.id for b in n.bases} for n in tree(fetch(version), POOL).body if hasattr(n, "bases")}
    assert bases["DeepSeekV4TokenToKVPool"] == {"BaseSWAKVPool"}  # none of those three
    allocator = SimpleNamespace(get_kvcache=object)
    params = SimpleNamespace(enable_metrics=False, page_size=256, token_to_kv_pool_allocator=allocator)
    with pytest.raises(ValueError, match="only supports MHA, MLA"):
        cache(params, None)
    words = [*PLANNED, version, "--", host_cache.FLAG]
    assert main(words) == 2
    assert f"without {host_cache.TREE}=1 and ends its start" in capsys.readouterr().err
    monkeypatch.setenv(host_cache.TREE, "1")
    assert main(words) == 0


def test_0_5_13_takes_that_tree_by_itself(capsys):
    make = take(
        fetch("0.5.13"),
        {"envs": Quiet(), "use_mlx": lambda: False, "_create_unified_radix_cache": lambda *_: "the tree"},
        "default_radix_cache_factory",
        "sglang.srt.mem_cache.registry",
    )
    asked = SimpleNamespace(enable_hierarchical_cache=True, is_hybrid_swa=True, is_hybrid_ssm=False)
    asked.server_args = SimpleNamespace(disable_radix_cache=False, chunked_prefill_size=1)
    asked.params = asked.effective_chunked_prefill_size = None
    assert make(asked) == "the tree"
    assert main([*PLANNED, "0.5.13", "--", host_cache.FLAG]) == 0


def meminfo(root, available_gb):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {int(available_gb * 1e9) >> 10} kB\n" if available_gb else "")


@pytest.mark.parametrize(("available_gb", "is_enough"), [(80, False), (98, False), (102, True), (0, True)])
def test_serve_asks_the_host_for_that_memory_first(available_gb, is_enough, monkeypatch, tmp_path, capsys):
    """Where the system says nothing, nothing is known."""
    said = serve_said(["--host-cache", "90"], available_gb, monkeypatch, tmp_path, capsys)
    assert ("the machine is next" in said) == is_enough
    assert is_enough or f"at most --host-cache {int(available_gb - 10 * 2**30 / 1e9)}" in said


def serve_said(words, available_gb, monkeypatch, root, capsys, version="0.5.23"):
    meminfo(root, available_gb)
    available = host_cache.available_bytes(root)
    monkeypatch.setattr(host_cache, "available_bytes", lambda _: available)
    monkeypatch.setattr(serve, "_check_machine", lambda *_: (_ for _ in ()).throw(CommandError("the machine is next")))
    words = ["serve", "--gpus", "2", "--memory", "96", "--card", "pro", "--sglang", version, *words]
    assert main(words) == 2
    return capsys.readouterr().err


OWN = ["--", host_cache.FLAG, "--hicache-ratio"]


@pytest.mark.parametrize(
    ("words", "available_gb", "is_enough"),
    [
        ([*OWN, "2"], 55, True),  # two cards' pools are 21.6 GB: a copy twice, and what SGLang leaves
        ([*OWN, "2"], 48, False),
        ([*OWN[:-1], "--hicache-ratio=2"], 48, False),
        ([*OWN, "1.7"], 48, True),
        (["--host-cache", "90", *OWN[:1], "--hicache-ratio", "2"], 55, True),
        (["--host-cache", "90", *OWN[:1], "--hicache-ratio", "2"], 48, False),
        (["--", "--hicache-ratio", "2"], 20, True),  # nothing turns it on
        ([*OWN, "2", "--mem-fraction-static", "0.8"], 48, True),  # pools that nobody has planned
        ([*OWN, "2", "--speculative-num-draft-tokens=3"], 48, True),
        ([*OWN, "2", "--tp-size", "4"], 48, True),
        ([*OWN, "much"], 48, True),  # SGLang says so
    ],
)
def test_a_ratio_of_ones_own_is_asked_of_the_host_too(words, available_gb, is_enough, monkeypatch, tmp_path, capsys):
    said = serve_said(words, available_gb, monkeypatch, tmp_path, capsys)
    assert ("the machine is next" in said) == is_enough
    plan = launch.make(request(gpus=2))
    assert 21.5 < 2 * held(plan) / 1e9 < 21.7
    if not is_enough:
        (most,) = re.findall(r"at most --hicache-ratio ([\d.]+)\b", said)
        left = available_gb * 1e9 - 10 * 2**30
        assert float(most) * 2 * held(plan) <= left < (float(most) + 0.1) * 2 * held(plan)


def test_up_to_0_5_20_that_is_twice_without_a_word(monkeypatch, tmp_path, capsys):
    said = serve_said(OWN[:-1], 45, monkeypatch, tmp_path, capsys, version="0.5.20")
    assert "--hicache-ratio 2 takes" in said and "at most --hicache-ratio 1." in said


def test_where_no_ratio_keeps_more_than_the_cards_do_it_says_what_would(monkeypatch, tmp_path, capsys):
    said = serve_said([*OWN, "2"], 20, monkeypatch, tmp_path, capsys)
    assert "none fits that keeps more than the cards do, which takes 35 GB available" in said


STAT = "anon 1\nactive_file {0}\ninactive_file {0}\nslab 5"  # 2 GB each


@pytest.mark.parametrize(
    ("groups", "limit_gb", "left_gb"),
    [
        ({"memory.max": 50, "memory.current": 20, "memory.stat": STAT}, 100, 34),
        ({"memory.max": 50, "memory.high": 40, "memory.current": 20, "memory.stat": STAT}, 100, 24),
        ({"memory.max": "max", "memory.current": 20, "memory.stat": STAT}, 100, 100),
        ({"memory.max": 50, "memory.current": 20, "memory.stat": STAT}, 10, 10),
        ({"memory.max": 50, "memory.current": 60, "memory.stat": STAT}, 100, 0),
        ({"memory.max": 50, "memory.current": 20}, 100, 30),
        ({"memory.max": 50}, 100, 100),  # what is in use is not told
        ({}, 100, 100),
        ({}, 0, None),
        ({"memory.max": 50, "memory.current": 20, "memory.stat": STAT}, 0, None),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_containers_limit_counts(groups, limit_gb, left_gb, is_first, tmp_path):
    """Of control groups of either version, as 0.5.23 itself reads them."""
    meminfo(tmp_path, limit_gb)
    names = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes"}
    where = tmp_path / "sys/fs/cgroup" / ("memory" if is_first else "")
    where.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/docker/1\n" if is_first else "0::/\n")
    mounted = f"30 25 0:27 {'/docker/1' if is_first else '/'} {where} rw - "
    (tmp_path / "proc/self/mountinfo").write_text(mounted + ("cgroup c rw,memory" if is_first else "cgroup2 c rw"))
    unlimited = str(2**63 - 4096) if is_first else "max"
    for name, value in groups.items():
        value = str(value * 10**9) if isinstance(value, int) else value.format(2 * 10**9).replace("max", unlimited)
        value = value.replace("\nactive", "\ntotal_active").replace("\nin", "\ntotal_in") if is_first else value
        (where / (names.get(name, name) if is_first else name)).write_text(value)
    if is_first and "memory.high" in groups:  # version 1 has none
        left_gb = 34
    found = host_cache.available_bytes(tmp_path)
    assert found is None if left_gb is None else abs(found - left_gb * 1e9) < 2**20
    if "memory.stat" in groups and limit_gb:
        parts = ("_unescape_mount_path", "_memory_stat", "_has_protected_descendants")
        words = {"re": re, "Path": Path, "PurePosixPath": PurePosixPath, "S_ISDIR": stat.S_ISDIR}
        words |= {name: take(fetch("0.5.23"), words, name, HEADROOM) for name in parts}
        theirs = take(fetch("0.5.23"), words, "_cgroup_memory_headroom", HEADROOM)(tmp_path / "proc")
        assert found == min(cards.host_memory(tmp_path)["MemAvailable"] << 20, 2**63 if theirs is None else theirs)


def test_plan_says_where_this_machine_has_less(monkeypatch, tmp_path):
    plan = launch.make(replace(request(gpus=2, host_cache_gb=60), host_available=50 * 10**9))
    (note,) = [n for n in plan.notes if "does not start on this machine" in n]
    assert "--host-cache 60 takes" in note and "at most --host-cache 39" in note
    for available in (None, 90 * 10**9):
        other = launch.make(replace(request(gpus=2, host_cache_gb=60), host_available=available))
        assert other.notes and not [n for n in other.notes if "this machine" in n]


@pytest.mark.parametrize("in_use", [0, 5, None])
def test_of_other_cards_than_this_machines_it_says_nothing(in_use, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "_machine", lambda _: (cards.PRO, 2, 97887, in_use))
    monkeypatch.setattr(host_cache, "available_bytes", lambda _: 50 * 10**9)
    assert main(["plan", "--sglang", "0.5.23", "--host-cache", "60"]) == 0
    assert ("does not start on this machine" in capsys.readouterr().out) == (in_use is not None)


@every_release()
def test_an_answers_usage_tells_what_was_cached_where_it_is_asked_for(version):
    """By the argument that plans set, which each release's server has."""
    assert launch_flags(version)["--enable-cache-report"] == ""
    declared = {name: content(fetch(version), name) for name in ARGUMENTS if name in members(fetch(version))}
    assert any("    enable_cache_report: " in text for text in declared.values())
    names = {"sum": sum, "range": range, "len": len, "PromptTokensDetails": SimpleNamespace}
    names |= {"UsageInfo": SimpleNamespace, "CompletionTokensDetails": SimpleNamespace, "final": lambda kind: kind}
    usage = take(fetch(version), names, "UsageProcessor", "sglang.srt.entrypoints.openai.usage_processor")
    answers = [{"meta_info": {"prompt_tokens": 900, "cached_tokens": 768, "completion_tokens": 5}}]
    told, untold = (usage.calculate_response_usage(answers, 1, asked) for asked in (True, False))
    assert told.prompt_tokens_details.cached_tokens == 768 and untold.prompt_tokens_details is None


def launch_flags(version):
    return flags(launch.make(request(gpus=2, sglang=version, concurrency=4)))
