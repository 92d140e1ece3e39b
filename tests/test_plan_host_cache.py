"""--host-cache of plan and serve: prompts that the host's memory keeps. What SGLang makes of a ratio, of a size and of
neither is each release's own code."""

import re
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.plan import cards, host_cache, launch, memory
from deepseek_v4_sm120.commands.serve import command as serve
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, members, since, tree
from tests.test_plan import flags, request

ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
POOL, AUTO = "sglang.srt.mem_cache.deepseek_v4_memory_pool", "sglang.srt.mem_cache.hicache_auto_size"
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


@pytest.mark.parametrize(("available_gb", "is_enough"), [(80, False), (98, False), (102, True), (0, True)])
def test_serve_asks_the_host_for_that_memory_first(available_gb, is_enough, monkeypatch, capsys):
    """Where the system says nothing, nothing is known."""
    told = {} if not available_gb else {"MemAvailable": int(available_gb * 1e9) >> 20}
    monkeypatch.setattr(cards, "host_memory", lambda root: told)
    monkeypatch.setattr(serve, "_check_machine", lambda *_: (_ for _ in ()).throw(CommandError("the machine is next")))
    words = ["serve", "--gpus", "2", "--memory", "96", "--card", "pro", "--sglang", "0.5.23", "--host-cache", "90"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert ("the machine is next" in said) == is_enough
    assert is_enough or f"at most --host-cache {int(available_gb - 10 * 2**30 / 1e9)}" in said


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
