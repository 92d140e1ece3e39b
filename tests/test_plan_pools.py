"""The plan's pools against SGLang's own configurator, executed from the wheel of every release that we know."""

import functools
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands.plan import launch, memory, models
from deepseek_v4_sm120.commands.plan.request import Plan, Request
from deepseek_v4_sm120.commands.speculation import DSPARK, DSPARK_SINCE, EAGLE, Speculation
from tests.patching.conftest import sglang_wheel  # noqa: F401
from tests.patching.wheels import RELEASES

HERE = Path(__file__).parent
MEMORY = int(96 * launch.REPORTED_PER_GB)
SPECULATIONS = (
    *((models.FLASH, speculation) for speculation in (None, Speculation(EAGLE, 2), Speculation(EAGLE, 4))),
    (models.FLASH_0731, Speculation(DSPARK, 4)),
)
PLANS = [
    {"gpus": gpus, "model": model, "speculation": speculation, "concurrency": streams, "context": context}
    for gpus in (2, 4, 8)
    for model, speculation in SPECULATIONS
    for streams, context in ((1, 393_216), (8, 131_072), (64, 8192))
]


@functools.cache  # what all tests here begin with
def plans_of(release: str) -> list[Plan]:
    """Without prefill graphs, whose memory would be another difference between releases."""
    requests = [Request(memory_mib=MEMORY, sglang=release, prefill_graphs=0, **wanted) for wanted in PLANS]
    return [launch.make(r) for r in requests if r.model is models.FLASH or r.version >= DSPARK_SINCE]


def case(plan: Plan) -> dict:
    """What SGLang is asked: the bytes that the plan leaves to its pools, and the plan's own flags."""
    return {
        "available_bytes": int(plan.static_bytes - plan.weights),
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
        "cases": {release: [case(plan) for plan in plans_of(release)] for release in RELEASES},
    }
    command = [sys.executable, str(HERE / "wheel_pools.py")]
    done = subprocess.run(command, input=json.dumps(asked), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("release", RELEASES)
def test_a_plan_has_the_tokens_that_this_release_gives(sglangs, release):
    """To the page, at 2, 4 and 8 cards, without speculation, with MTP of two depths and with DSPARK; and the window's
    slots, and the states' rows."""
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
