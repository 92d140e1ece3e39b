"""The plan's pools against SGLang's own configurator, executed from the wheel of every release that we know."""

import contextlib
import functools
import itertools
import json
import math
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.plan import launch, memory, models, stages
from deepseek_v4_sm120.commands.plan.request import Plan, Request
from deepseek_v4_sm120.commands.speculation import DSPARK, DSPARK_SINCE, EAGLE, Speculation
from tests.patching.conftest import sglang_wheel  # noqa: F401
from tests.patching.test_wheel_longest_prompt import Ample
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import RELEASES, WheelSources, fetch, since

HERE = Path(__file__).parent
MEMORY = int(96 * launch.REPORTED_PER_GB)
SPECULATIONS = (
    *((models.FLASH, speculation) for speculation in (None, Speculation(EAGLE, 2), Speculation(EAGLE, 4))),
    (models.FLASH_0731, Speculation(DSPARK, 4)),
)
PROFILED_BY = (
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator"),
    ("sglang.srt.model_executor.model_runner_kv_cache_mixin", "ModelRunnerKVCacheMixin"),
)
OF_A_PASS = ("prefill activations", "wo_a of a prompt", "experts of a", "page table", "index ", "log-probabilities")
PLANS = [
    {"gpus": gpus, "model": model, "speculation": speculation, "concurrency": streams, "context": context}
    for gpus in (2, 4, 8)
    for model, speculation in SPECULATIONS
    for streams, context in ((1, 393_216), (8, 131_072), (64, 8192))
]
PLANS += [
    {"gpus": gpus, "stages": of, "model": models.FLASH, "speculation": None, "concurrency": streams, "context": 131_072}
    for gpus, of in ((2, 2), (3, 3), (4, 2), (4, 4))
    for streams in (1, 9)
]


def since_when(r: Request) -> tuple[int, ...]:
    return DSPARK_SINCE if r.model is models.FLASH_0731 else stages.SINCE if r.stages > 1 else (0, 5, 12)


@functools.cache  # what all tests here begin with
def plans_of(release: str) -> list[Plan]:
    """Without prefill graphs, whose memory would be another difference between releases."""
    requests = [Request(memory_mib=MEMORY, sglang=release, prefill_graphs=0, **wanted) for wanted in PLANS]
    return [launch.make(r) for r in requests if r.version >= since_when(r)]


def cases(plan: Plan) -> list[dict]:
    """What SGLang is asked, in each stage: the bytes that the plan leaves to its pools, and the plan's own flags."""
    ends = itertools.accumulate(stage.layers for stage in plan.request.model.of_stages(plan.request.stages))
    return [_case(plan, layers) for layers in itertools.pairwise([0, *ends])]


def _case(plan: Plan, layers: tuple[int, int]) -> dict:
    return {
        "stages": plan.request.stages,
        "layers": layers,
        "available_bytes": int(plan.pool_bytes),
        "max_running_requests": plan.request.concurrency,
        "chunked_prefill_size": plan.chunk,
        "prefix_tails": plan.prefix_tails,
        "algorithm": plan.request.speculation and plan.request.speculation.algorithm,
        "rows": plan.request.rows,
    }


@pytest.fixture(scope="module")
def sglangs(sglang_wheel):  # noqa: F811
    """{release: SGLang's sizes, in the order of PLANS}"""
    ratios = json.loads((HERE / "data/flash_config.json").read_text())["compress_ratios"][: models.FLASH.layers]
    asked = {
        "wheels": {release: str(sglang_wheel(release)) for release in RELEASES},
        "compress_ratios": ratios,
        "cases": {release: [case for plan in plans_of(release) for case in cases(plan)] for release in RELEASES},
    }
    command = [sys.executable, str(HERE / "wheel_pools.py")]
    done = subprocess.run(command, input=json.dumps(asked), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = {release: iter(sizes) for release, sizes in json.loads(done.stdout).items()}
    return {release: [_of_fewest(plan, found[release]) for plan in plans_of(release)] for release in RELEASES}


def _of_fewest(plan: Plan, sizes) -> dict:
    """Those of the stage that has room for the fewest tokens, whose number SGLang takes in all."""
    return min(itertools.islice(sizes, plan.request.stages), key=lambda one: one["tokens"])


@pytest.mark.parametrize("release", RELEASES)
def test_a_plan_has_the_tokens_that_this_release_gives(sglangs, release):
    """To the page, at 2, 4 and 8 cards, without speculation, with MTP of two depths and with DSPARK, and in stages; and
    the window's slots, and the states' rows."""
    for plan, sglang in zip(plans_of(release), sglangs[release], strict=True):
        assert plan.tokens == sglang["tokens"], (plan.request, plan.tokens, sglang)
        assert plan.pools.window(plan.tokens) == sglang["window_tokens"]
        assert plan.pools.token_bytes == pytest.approx(sglang["bytes_per_full_token"])


def test_the_releases_differ_where_the_plan_says_so(sglangs):
    """The same machine and wishes: request states since 0.5.15, padded pages and slots by requests since 0.5.21."""
    of_all = 3 * len(SPECULATIONS[:-1])  # on two cards; DSPARK is not in every release
    tokens = {release: [found["tokens"] for found in sglangs[release][:of_all]] for release in RELEASES}
    assert tokens["0.5.14"] != tokens["0.5.15"] == tokens["0.5.20"] != tokens["0.5.21"]
    assert memory.PADDED_SINCE == (0, 5, 21) and memory.REQUEST_STATES_SINCE == (0, 5, 15)
    assert tuple(map(int, RELEASES[-1].split("."))) == launch.NEWEST_READ


@pytest.mark.parametrize("release", RELEASES)
def test_a_plans_flags_are_arguments_of_this_release(sglang_wheel, release):  # noqa: F811
    """As fields of its argument classes, so that argparse has them."""
    with zipfile.ZipFile(sglang_wheel(release)) as wheel:
        homes = [n for n in wheel.namelist() if re.match(r"sglang/srt/(server_args|arg_groups/.*)\.py$", n)]
        fields = set(re.findall(r"^    (\w+): ", "\n".join(wheel.read(name).decode() for name in homes), re.MULTILINE))
    for plan in plans_of(release):
        names = {flag.name.removeprefix("--").replace("-", "_") for flag in plan.flags}
        assert names <= fields, names - fields


# ---- what the pools are made of, and what is outside of them


@pytest.mark.parametrize("release", RELEASES)
def test_the_pools_have_what_this_release_leaves_them(release):
    """Its own function, on cards with what a plan says is free in front of the weights: the fraction is of that, and
    not of the card."""
    wheel, function = fetch(release), "_profile_available_bytes"
    where = next(one for one in PROFILED_BY if WheelSources(wheel).read(one[0]) is not None and _has(wheel, *one))
    for plan in plans_of(release):
        free_gb = plan.free_bytes / memory.GIB
        left_gb = free_gb - (plan.weights + plan.given_back) / memory.GIB
        said = Ample(mem_fraction_static=plan.fraction, mambaish_config=None)
        said.server_args = said
        names = {"get_schedule": lambda said=said: said, "mm_runtime_reservation_gb": lambda **_: 0.0}
        names |= {"get_available_gpu_memory": lambda *_, left=left_gb, **__: left, "math": math}
        profile = take(wheel, names, f"{where[1]}.{function}", where[0])
        if plan.pool_bytes > 0:
            assert profile(said, free_gb) == pytest.approx(plan.pool_bytes, abs=4096)


def _has(wheel, module, kind):
    return definition(wheel, f"{kind}._profile_available_bytes", module) is not None


def test_what_is_there_in_front_of_the_weights():
    """An RTX PRO 6000 as others' logs have it, and two cards by their own drivers."""
    reported, cuda = 97_887 << 20, 97_249 << 20  # 94.97 GiB
    assert reported - cuda == pytest.approx(memory.KEPT_BY_DRIVER, abs=4 << 20)
    assert memory.free_at_start(reported) == pytest.approx(94.01 * memory.GIB, abs=memory.GIB / 16)  # of four cards
    for name in ("h200", "h100"):
        xml = (HERE / f"data/nvidia_smi_{name}.xml").read_text()
        found = re.search(r"<fb_memory_usage>\s*<total>(\d+) MiB</total>\s*<reserved>(\d+)", xml)
        total, reserved = int(found[1]) << 20, int(found[2]) << 20
        assert reserved <= memory.KEPT_BY_DRIVER <= reserved + (200 << 20)
        assert memory.free_at_start(total) == total - memory.KEPT_BY_DRIVER - memory.AT_START
    assert memory.free_at_start(1 << 30) == 0


@pytest.mark.parametrize("release", [r for r in RELEASES if since(r, "0.5.16")])
def test_a_prompts_log_probabilities_have_room(release):
    """So many rows at a time as this release has it; what a plan keeps for a pass's scratch holds them."""
    text = zipfile.ZipFile(fetch(release)).read("sglang/srt/environ.py").decode()
    assert re.search(r"SGLANG_ENABLE_LOGPROB_CHUNK = EnvBool\w*\(\s*True", text)
    assert re.search(rf"SGLANG_LOGPROB_CHUNK_SIZE = EnvInt\w*\(\s*{memory.LOGPROB_ROWS}\b", text)
    for plan in plans_of(release):
        of_a_pass = [r.bytes for r in plan.reserves if any(word in r.what for word in OF_A_PASS)]
        rows = min(plan.chunk, memory.LOGPROB_ROWS)
        assert sum(of_a_pass) >= 2 * rows * plan.request.model.vocab * 4


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_of_the_request_slots_is_beside_the_pools(release):
    """SGLang's own, made when the pools have their size: 1.1 GB of 256 slots at a million tokens."""
    saver = SimpleNamespace(create=lambda **_: SimpleNamespace(region=lambda *_, **__: contextlib.nullcontext()))
    names, made = {"torch": torch, "TorchMemorySaverAdapter": saver}, SimpleNamespace()
    init = take(fetch(release), names, "ReqToTokenPool.__init__", "sglang.srt.mem_cache.memory_pool")
    init(made, 8, 4096, "cpu", False)
    planned = memory.slot_tables_bytes(8, 4096, 0)
    assert planned - 4096 * 4 <= made.req_to_token.nbytes <= planned
    plan = launch.make(Request(models.FLASH, 8, MEMORY, 1 << 20, 256, None, release))
    table = next(r.bytes for r in plan.reserves if r.what == "tables of the request slots")
    assert table >= 257 * (1 << 20) * 4 + 16 * plan.tokens
