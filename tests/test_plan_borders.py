"""plan at its borders: what fits to the last token, what is tight, which requests are taken; scratch by hand."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands import speculation
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import facts
from deepseek_v4_sm120.commands.plan import cards as kinds
from deepseek_v4_sm120.commands.plan import choices, command, launch, memory, models, roofline
from deepseek_v4_sm120.commands.plan.remedies import FP4_CHECKPOINT, remedies
from deepseek_v4_sm120.commands.plan.request import PREFILL_GRAPHS_SINCE, WITH_MTP_SINCE, Plan
from deepseek_v4_sm120.ops import bf16_linear_draft_head as draft_head
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear_draft_head as adapter
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS
from deepseek_v4_sm120.sglang_patches.table import PREFILL_GRAPHS as GRAPHS
from tests.test_plan import MTP, request


def made_plan(tokens=393_216, window_tokens=None, reserves=(), fraction=0.5, weights=0.0, **changes):
    """A plan on a card with 1,000 MiB free at the start, without what `make` works out."""
    sized = memory.Pools(0, window_tokens, 0.0, 100.0)
    memory_mib = 1000 + (memory.KEPT_BY_DRIVER + int(memory.AT_START) >> 20)
    asked = request(**{"memory_mib": memory_mib, "context": 393_216} | changes)
    return Plan(asked, 4096, fraction, weights, list(reserves), sized, tokens)


def test_a_plan_fits_to_the_last_token_and_window_slot():
    assert made_plan().fits and not made_plan(tokens=393_215).fits
    needed = 2 * 4096 + 8 * (128 + 2 * 256)
    window = made_plan().pools.window
    slots = next(tokens for tokens in range(0, 1 << 20, 256) if window(tokens) >= needed)
    for tokens, fits in ((slots, True), (slots - 256, False)):
        plan = made_plan(tokens=tokens, context=1024)
        assert plan.window_needed == needed and plan.fits is fits is plan.has_window
    assert made_plan(tokens=1024, context=1024, window_tokens=256).fits  # sized by the requests: what is needed


def test_a_plan_is_tight_where_less_is_left_than_estimates_may_be_short_by():
    half = 500 << 20
    reserve = memory.Reserve("x", half - 100, "estimate", 100.0)
    spare = (1 << 30) / 100  # tokens
    plenty = {"tokens": 393_216 + spare, "reserves": [reserve]}
    assert made_plan(**plenty).left_free == 100 and not made_plan(**plenty).is_tight
    less = made_plan(**plenty | {"reserves": [memory.Reserve("x", half - 99, "estimate", 100.0)]})
    assert less.is_tight and less.fits and less.left_free == 99
    at_start = 0.5 * 0.5 * (1 << 30)  # of the static half, if CUDA and NCCL take half as much again
    most = ((1 << 30) - at_start) / memory.WEIGHTS_OFF_BY
    for weights, is_tight in ((most * 0.999, False), (most * 1.001, True)):
        assert made_plan(**plenty, weights=weights).is_tight is is_tight
    assert not made_plan(tokens=0, reserves=[reserve, reserve]).is_tight  # it does not fit at all


def test_a_smaller_chunk_is_taken_where_it_buys_capacity():
    by_tokens = lambda *sizes: [made_plan(tokens=n) for n in sizes]  # noqa: E731
    for plans, taken in (
        (by_tokens(450_000, 500_000), 0),  # a tenth is hardly any
        (by_tokens(449_999, 500_000), 1),
        (by_tokens(393_215, 400_000, 410_000), 1),
        (by_tokens(100, 300, 200), 1),  # none fits: the most
    ):
        assert launch._best(plans) is plans[taken]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, (2 * CAPTURED_ROWS, CAPTURED_ROWS, 0)),  # two cards
        ({"gpus": 1}, (CAPTURED_ROWS, 0)),
        ({"gpus": 4}, (4 * CAPTURED_ROWS, CAPTURED_ROWS, 0)),
        ({"prefill_graphs": 512}, (512,)),
        ({"prefill_graphs": 0}, (0,)),
        ({"replaced": tuple(op for op in OPS if op != "index_select"), "prefill_graphs": 512}, (0,)),
        ({"sglang": "0.5.16", "prefill_graphs": 512}, (0,)),
        ({"sglang": "0.5.17", "prefill_graphs": 512}, (512,)),
        ({"speculation": MTP}, (2 * CAPTURED_ROWS, CAPTURED_ROWS, 0)),
        ({"speculation": MTP, "sglang": "0.5.22"}, (0,)),
        ({"speculation": MTP, "prefill_graphs": 512}, (512,)),
        ({"speculation": MTP, "prefill_graphs": 0}, (0,)),
        ({"speculation": MTP, "prefill_graphs": 512, "sglang": "0.5.22"}, (0,)),
        ({"speculation": speculation.Speculation(speculation.DSPARK, 3), "prefill_graphs": 512}, (0,)),
        ({"speculation": speculation.Speculation(speculation.DSPARK, 3)}, (0,)),
    ],
)
def test_which_passes_of_prompts_may_be_in_graphs(changes, rows):
    assert request(**{"speculation": None} | changes).may_capture == rows


def test_prefill_graphs_are_planned_for_the_releases_that_are_patched():
    first = {t.replacement.rpartition(":")[2]: min(s.version for s in SpecifierSet(t.sglang)) for t in GRAPHS.targets}
    since = [".".join(map(str, version)) for version in (PREFILL_GRAPHS_SINCE, WITH_MTP_SINCE)]
    assert [min(first.values()), first["replace_with_mtp"]] == since


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({}, True),
        ({"draft_head": False}, False),
        ({"draft_head": False, "concurrency": 1}, False),
        ({"speculation": None}, False),
        ({"replaced": tuple(op for op in OPS if op != "bf16_linear")}, False),
        ({"sglang": "0.5.13"}, False),
        ({"sglang": "0.5.14"}, True),
        ({"draft_head": None}, False),  # eight streams read half of the experts in a step
        ({"draft_head": None, "concurrency": 1}, True),
        ({"draft_head": None, "concurrency": 1, "sglang": "0.5.13"}, False),
        ({"draft_head": None, "concurrency": 1, "speculation": None}, False),
        ({"draft_head": None, "concurrency": 1, "speculation": speculation.Speculation(speculation.DSPARK, 3)}, False),
        ({"draft_head": None, "concurrency": 1, "gpus": 8}, False),  # an eighth of the head
    ],
)
def test_who_has_a_draft_head(changes, has):
    assert request(**{"draft_head": True} | changes).has_draft_head is has


@pytest.mark.parametrize("said, word", [(True, "on"), (False, "off")])
def test_the_users_own_word_on_the_drafts_head_stands(said, word):
    (flag,) = (f for f in launch.make(request(draft_head=said)).environment if f.name == "DSV4_SM120_SET")
    assert flag.value.split(",")[0] == f"draft_head={word}" and flag.reason.startswith(choices.YOURS)


def test_a_draft_head_that_nobody_asked_for_is_told():
    plan = launch.make(request(concurrency=1))
    (note,) = [note for note in plan.notes if "copy of the head in INT4" in note]
    assert "with DSV4_SM120_SET=draft_head=off" in note
    steps = [
        float(command.draft_rows(launch.make(request(concurrency=1, draft_head=one)))[3][2]) for one in (None, False)
    ]
    read = 3 * 129_280 * 4096 * (2 - 17 / 32) / 2 / kinds.PRO.bytes_per_s * 1e3
    assert steps[1] - steps[0] == pytest.approx(read, abs=0.011)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, True),
        ({"draft_head": True}, False),
        ({"draft_head": False}, False),
        ({"speculation": None}, False),
        ({"replaced": ("mhc",)}, False),
    ],
)
def test_whoever_could_have_one_is_told(changes, told):
    notes = [note for note in launch.make(request(**changes)).notes if "draft_head=on" in note]
    assert len(notes) == told and all("0.15 GB a card" in note for note in notes)


@pytest.mark.parametrize(
    "changes, deals",
    [
        ({}, True),
        ({"sglang": "0.5.14"}, True),
        ({"sglang": "0.5.13"}, False),
        *(({"gpus": gpus}, False) for gpus in (1, 4, 8)),  # none of which has run it
        ({"concurrency": 32, "speculation": None}, True),
        ({"concurrency": 33, "speculation": None}, False),
        ({"concurrency": 16}, True),  # of two rows each
        ({"concurrency": 17}, False),
        *(({"replaced": tuple(op for op in OPS if op != name)}, False) for name in choices.DEALT_BY),
        ({"also_set": {"dealt_products": "off"}}, False),
        ({"also_set": {"dealt_products": "on"}}, False),  # it is set anyway
        ({"also_set": {"reproducible": "on"}}, True),
        ({"also_set": {"reproducible": "on"}, "sglang": "0.5.19"}, False),
        ({"also_set": {"reproducible": "on"}, "sglang": "0.5.20"}, True),
        ({"also_set": {"reproducible": "off"}, "sglang": "0.5.19"}, True),
        ({"also_set": {"prompts_in_halves": "63"}}, False),  # whose rows would be whole, and dealt
        *(({"also_set": {"prompts_in_halves": one}}, True) for one in ("64", "on", "off", "0")),
        ({"off": True}, False),
    ],
)
def test_who_deals_the_compressors_products(changes, deals):
    said = [f for f in launch.make(request(**{"gpus": 2} | changes)).environment if f.name == "DSV4_SM120_SET"]
    set_ = [one for flag in said for one in flag.value.split(",") if one.startswith("dealt_products")]
    asked = changes.get("also_set", {}).get("dealt_products")
    assert set_ == ([f"dealt_products={asked}"] if asked else ["dealt_products=on"] * deals)
    assert ("3.67 ms a step for 3.70 on two H200" in " ".join(flag.reason for flag in said)) is deals


def in_vain(sglang, **changes):
    notes = launch.make(request(**{"gpus": 2, "concurrency": 1, "sglang": sglang} | changes)).notes
    begins, said = "DSV4_SM120_SET: ", " does nothing here: "
    return [tuple(n.removeprefix(begins).split(said)) for n in notes if n.startswith(begins) and said in n]


@pytest.mark.parametrize(
    "sglang, changes, told",
    [
        ("0.5.23", {"also_set": {"reproducible": "on", "dealt_products": "on", "mhc": "on"}}, []),
        ("0.5.12", {"also_set": {"dealt_products": "off", "prompts_in_halves": "0"}}, []),
        ("0.5.12", {"also_set": {"dealt_products": "on"}}, [("dealt_products", "it is for SGLang >=0.5.14,<0.6")]),
        (
            "0.5.19",
            {"also_set": {"prefill_decode_interval": "4"}},
            [("prefill_decode_interval", "it is for SGLang >=0.5.20,<0.6")],
        ),
        ("0.5.16", {"prefill_graphs": 1024}, [("prefill_graphs", "it is for SGLang >=0.5.17,<0.6")]),
        (
            "0.5.22",
            {"prefill_graphs": 1024, "speculation": MTP},
            [("prefill_graphs", "with EAGLE it is for SGLang >=0.5.23")],
        ),
        ("0.5.23", {"prefill_graphs": 1024, "speculation": MTP}, []),
        (
            "0.5.23",
            {"prefill_graphs": 1024, "replaced": tuple(op for op in OPS if op != "index_select")},
            [("prefill_graphs", "index_select is left out")],
        ),
        ("0.5.23", {"draft_head": True, "speculation": None}, [("draft_head", "nothing drafts")]),
        ("0.5.23", {"draft_head": False, "prefill_graphs": 0, "speculation": None}, []),
        (
            "0.5.19",
            {"also_set": {"dealt_products": "on", "reproducible": "on"}},
            [("dealt_products", "below 0.5.20 a reproducible server's compressors are SGLang's")],
        ),
        (
            "0.5.23",
            {"also_set": {"dealt_products": "on", "prompts_in_halves": "32"}},
            [("dealt_products", "prompts_in_halves=32 is less than 64 rows")],
        ),
        *(
            ("0.5.23", {"also_set": {"dealt_products": "on"}, "replaced": tuple(o for o in OPS if o != op)}, [told])
            for op in choices.DEALT_BY
            for told in [("dealt_products", f"{op} is left out")]
        ),
        (
            "0.5.23",
            {"also_set": {"dealt_products": "on"}, "concurrency": 513, "context": 4096, "gpus": 4, "speculation": None},
            [("dealt_products", "steps of 513 rows are more than all_reduce takes")],
        ),
        ("0.5.12", {"also_set": {"dealt_products": "on"}, "off": True}, []),
    ],
)
def test_what_a_server_would_not_do_of_the_users_choices_is_told(sglang, changes, told):
    assert in_vain(sglang, **changes) == told


@pytest.mark.parametrize(
    "changes, theirs",
    [
        ({}, None),
        ({"gpus": 4}, None),
        ({"gpus": 4, "model": models.find("flash", "fp8")}, "experts in FP8"),
        ({"replaced": tuple(op for op in OPS if op not in ("mhc", "wo_a"))}, "wo_a, mhc"),
        ({"replaced": tuple(op for op in OPS if op not in ("all_reduce", "compressor", "router_topk"))}, None),
        ({"replaced": tuple(op for op in OPS if op != "all_reduce"), "gpus": 4}, "all_reduce"),
        ({"sglang": "0.5.13", "gpus": 4, "model": models.find("flash", "fp8")}, None),  # which knows no such word
    ],
)
def test_a_server_that_would_not_be_reproducible_is_told(changes, theirs):
    asked = {"gpus": 2, "sglang": "0.5.23", "also_set": {"reproducible": "on"}} | changes
    said = "DSV4_SM120_SET: reproducible=on, and yet NOT REPRODUCIBLE: SGLang's own are "
    found = [note.removeprefix(said) for note in launch.make(request(**asked)).notes if note.startswith(said)]
    assert found == ([theirs] if theirs else [])


@pytest.mark.parametrize("row", choices.DEFAULTS, ids=lambda row: row.name)
@pytest.mark.parametrize("release", ["0.5.12", "0.5.13", "0.5.14", "0.5.17", "0.5.18", "0.5.20", "0.5.23", "0.5.99"])
def test_the_ranges_of_defaults_are_read_without_packaging(row, release):
    assert choices._is_for(row.sglang, request(sglang=release)) is SpecifierSet(row.sglang).contains(release)


def test_drafts_are_not_asked_for_and_refused_at_once():
    r = request(speculation=None)
    assert command._speculation(r, "none", None) is None
    with pytest.raises(CommandError, match="--block 3 with --spec none: nothing drafts"):
        command._speculation(r, "none", 3)


def test_the_bounds_of_a_request_are_taken():
    most = models.FLASH.max_context
    for changes in ({"context": 1024}, {"context": most}, {"concurrency": 1}, {"concurrency": launch.MOST_STREAMS}):
        launch.check(request(**changes))
    for changes in ({"context": 1023}, {"context": most + 1}, {"concurrency": launch.MOST_STREAMS + 1}, {"gpus": 0}):
        with pytest.raises(CommandError):
            launch.check(request(**changes))


def test_scratch_by_hand(monkeypatch):
    """Of two cards: 4,096 hidden in 4 streams, 32 of 64 heads of 512, experts of 1,024, 129,280 words."""
    m = models.FLASH
    assert memory.activation_bytes(m, 2, 10) == 10 * 2 * (3 * 4 * 4096 + 2 * 32 * 512)
    assert memory.experts_bytes(m, 2, 10, True) == 10 * 6 * (2 * (1024 + 4096) + 64)
    assert memory.experts_bytes(m, 2, 10, False) == 10 * 6 * 2 * (2048 + 4096)
    assert memory.c128_list_bytes(10, 8192) == 10 * 64 * 4 and memory.c128_list_bytes(10, 8193) == 10 * 128 * 4
    assert memory.index_logits_bytes(10, 1024) == 10 * 256 * 4 and memory.index_logits_bytes(10, 1025) == 10 * 320 * 4
    # of four cards: 32,384 words, with a scale of two bytes for 64 numbers; scores of 64 rows at most
    words = 32_320
    for rows, scored in ((8, 8), (64, 64), (200, 64)):
        assert memory.draft_head_bytes(m, 4, rows) == words * (4096 // 2 + 4096 // 64 * 2 + 8 * scored)
    assert draft_head.UNIT_BYTES == memory.DRAFT_HEAD_VALUE * draft_head.TILE_OUTPUTS * draft_head.UNIT_INPUTS
    assert adapter.MOST_ROWS == memory.DRAFT_HEAD_ROWS
    monkeypatch.setattr(memory, "has_our_module", lambda: False)
    found = memory.attention_workspace(8, 32, 393_216)
    assert (found.bytes, found.off_by) == (8 * 32 * (2 + 48) * 512 * 2, 8 * 32 * (2 + 48) * 512)
    assert memory.sums_between_cards(m, 2).bytes == 48 << 20
    assert memory.chunk_for(1024, 8192 * 1024) == 8192 and memory.chunk_for(1024, 8192 * 1024 - 1) == 4096


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize(("gpus", "streams", "steps"), [(2, 4, None), (4, 8, None), (4, 2, 32), (8, 2, 32)])
def test_decode_keeps_its_share_with_as_few_steps_as_do(gpus, streams, steps, drafts):
    """Where 32 steps are not enough, the share that they are is said. A step with drafts takes longer: fewer do."""
    drafter = speculation.Speculation(speculation.EAGLE, drafts + 1) if drafts else None
    plan = launch.make(request(gpus=gpus, concurrency=streams, context=65_536, speculation=drafter))
    sizes = plan.request.model, gpus, streams, 65_536 // 4
    ideal = roofline.speculating_seconds(*sizes, drafts, wo_a_bf16=False)
    step, chunk = roofline.TYPICAL_OVER_IDEAL * ideal, 4096 / roofline.PUBLISHED_PREFILL[min(gpus, 4)][0]
    share = [n * step / (n * step + chunk) for n in (plan.interval - 1, plan.interval)]
    assert plan.chunk == 4096 and (drafts or steps is None or plan.interval == steps)
    assert share[0] < launch.DECODE_SHARE and (share[1] >= launch.DECODE_SHARE or plan.interval == 32)
    assert drafts or (share[1] >= launch.DECODE_SHARE) == (steps is None)
    (reason,) = (flag.reason for flag in plan.flags if flag.name == "--prefill-decode-interval")
    assert f"decode keeps about {share[1]:.0%} of the time" in reason
    assert launch._interval(request(concurrency=1), 4096) == 0


def test_an_interval_that_the_user_has_set_is_not_set_again():
    newest = launch.make(request(sglang="0.5.23", also_set={"prefill_decode_interval": "4"}))
    assert newest.interval == 0 and "--prefill-decode-interval" not in [flag.name for flag in newest.flags]

    def said(**given):
        found = launch.make(request(sglang="0.5.17", speculation=None, **given)).environment
        words = next((flag.value for flag in found if flag.name == "DSV4_SM120_SET"), "").split(",")
        return [word.partition("=")[2] for word in words if word.startswith(choices.INTERVAL_0_5_17)]

    assert len(said()) == 1 and said(also_set={choices.INTERVAL_0_5_17: "4"}) == ["4"]
    assert said(concurrency=1) == [], "nobody else decodes"
    assert said(also_set={choices.INTERVAL: "4"}) == said(), "0.5.17 makes nothing of that word's number"
    assert said(also_set={choices.INTERVAL: "off"}) == []


@pytest.mark.parametrize(
    "sglang, word, is_planned",
    [("0.5.19", "4", True), ("0.5.19", "off", False)] + [("0.5.20", w, False) for w in ("4", "on", "off")],
)
def test_an_interval_that_a_release_cannot_take_from_us_is_planned_as_its_own_flag(sglang, word, is_planned):
    found = launch.make(request(sglang=sglang, speculation=None, also_set={choices.INTERVAL: word})).flags
    assert ("--prefill-decode-interval" in [flag.name for flag in found]) is is_planned


FP8 = models.find("flash", "fp8")


@pytest.mark.parametrize(
    "gb, changes, told",
    [
        (
            96,
            {"gpus": 1, "concurrency": 512, "speculation": MTP, "context": 1 << 20},
            ["8 cards"],
        ),
        (26, {"gpus": 4, "concurrency": 1, "context": 393_216}, ["8 cards with --context 196608"]),
        (27, {"gpus": 8, "concurrency": 32, "context": 1 << 20}, ["--context 262144 with --concurrency 4"]),
        (32, {"gpus": 4, "concurrency": 8, "context": 8192, "model": FP8}, [f"{FP4_CHECKPOINT} on 8 cards"]),
        (96, {"gpus": 2, "context": 8192, "model": FP8}, ["4 cards", FP4_CHECKPOINT]),
        (8, {"gpus": 8}, []),
        (96, {"gpus": 8, "model": models.find("pro", None), "context": 8192}, []),
    ],
)
def test_what_would_fit_is_said_and_does(gb, changes, told):
    r = request(memory_mib=int(gb * launch.REPORTED_PER_GB), sglang="0.5.23", **changes)
    assert not launch.make(r).fits and remedies(r) == told
    for one in told:
        cards, context, streams = (
            re.search(pattern, one) for pattern in (r"(\d) cards", r"--context (\d+)", r"--concurrency (\d+)")
        )
        asked = {"gpus": int(cards[1])} if cards else {}
        asked |= {"context": int(context[1])} if context else {}
        asked |= {"concurrency": int(streams[1])} if streams else {}
        asked |= {"model": models.FLASH} if FP4_CHECKPOINT in one else {}
        assert launch.make(dataclasses.replace(r, **asked)).fits


def test_shadow_mode_holds_twice_what_it_compares():
    """Two cards of 96 GB have no room for the experts of SGLang beside ours, and are told what they can compare."""
    without, with_it = (launch.make(request(gpus=4, shadow=shadow)) for shadow in (None, "1"))
    expert = 3 * 4096 * 2048 * (1 / 2 + 1 / 32)
    wo_a = 8 * 1024 * (64 * 512 // 8) * 2
    assert with_it.weights - without.weights == pytest.approx(44 * (256 * expert + wo_a) / 4)
    assert [r.what for r in without.reserves if "index" in r.what and r not in with_it.reserves] == []
    assert [r.what for r in with_it.reserves if r.what.startswith("index logits")]
    assert with_it.fits and not launch.make(request(gpus=2, shadow="1")).fits
    told = remedies(request(gpus=2, shadow="1"))
    assert told == ["4 cards", "DSV4_SM120_SET=mxfp4_moe=off, to compare all but the experts"]
    others = tuple(op for op in OPS if op != "mxfp4_moe")
    assert launch.make(request(gpus=2, shadow="1", replaced=others)).fits
    assert " -e DSV4_SM120_SHADOW=1 " in launch.docker_line(with_it)
    assert "SHADOW" not in launch.docker_line(without)


# ---- whose cards

H200 = (Path(__file__).parent / "data/nvidia_smi_h200.xml").read_text()
TOTAL = "<total>143771 MiB</total>"


def cards(monkeypatch, *kinds, visible=None, order=None):
    """(cards, MiB) that a plan takes of a machine with (name, capability, MiB or None) for each GPU."""
    head, gpu, tail = re.fullmatch("(.*?)(<gpu id.*</gpu>)(.*)", H200, re.S).groups()
    told = [
        re.sub("<product_name>.*?</product_name>", f"<product_name>{name}</product_name>", gpu)
        .replace(TOTAL, f"<total>{'Not Supported' if mib is None else f'{mib} MiB'}</total>")
        .replace("</gpu>", f"<uuid>GPU-{number}a5c0000-0000</uuid></gpu>")
        for number, (name, _, mib) in enumerate(kinds)
    ]
    answers = {"-q": head + "".join(told) + tail, "--query-gpu=compute_cap": "\n".join(c for _, c, _ in kinds)}
    monkeypatch.setattr(facts, "run_command", lambda words: answers.get(words[1]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    return command._machine(argparse.Namespace(gpus=None, memory=None, card=None))[1:3]


GAMING = ("RTX 5090", "12.0", 32607)
PRO, ADA, SPARK = ("RTX PRO 6000", "12.0", 97887), ("RTX 4090", "8.9", 24564), ("NVIDIA GB10", "12.1", None)


def test_a_plan_is_for_the_cards_that_serve(monkeypatch):
    assert cards(monkeypatch, PRO, PRO) == (2, 97887)
    assert cards(monkeypatch, ADA, PRO, PRO) == cards(monkeypatch, PRO, ADA, PRO) == (2, 97887)
    assert cards(monkeypatch, *[PRO] * 4, visible="2,3") == (2, 97887)
    assert cards(monkeypatch, *[PRO] * 4, visible="") == (4, 97887)
    assert cards(monkeypatch, ADA, ADA) == (2, 24564)


def test_of_several_kinds_a_plan_is_for_those_that_are_named(monkeypatch):
    machine, by_place = (GAMING, PRO, PRO, GAMING), "PCI_BUS_ID"
    assert cards(monkeypatch, *machine, visible="1,2", order=by_place) == (2, 97887)
    assert cards(monkeypatch, *machine, visible="GPU-2a5c0000-0000, GPU-1a") == (2, 97887)
    assert cards(monkeypatch, *machine, visible="0,3", order=by_place) == (2, 32607)
    assert cards(monkeypatch, *machine, visible="1", order=by_place) == (1, 97887)
    assert cards(monkeypatch, visible="GPU-2a5c", order=by_place) == (2, int(96 * launch.REPORTED_PER_GB))  # no card
    for unknown in ("MIG-2a5c0000-0001", "GPU-9a"):
        with pytest.raises(CommandError, match=f"does not list CUDA_VISIBLE_DEVICES={unknown}: --gpus"):
            cards(monkeypatch, PRO, visible=unknown)


def test_a_card_whose_memory_is_the_hosts_is_asked_of_the_system(monkeypatch, tmp_path):
    monkeypatch.setattr(kinds, "host_memory_mib", lambda root: 124611)
    assert cards(monkeypatch, SPARK) == (1, 124611)
    monkeypatch.setattr(kinds, "host_memory_mib", lambda root: 0)
    with pytest.raises(CommandError, match="does not tell the memory of NVIDIA GB10: --memory"):
        cards(monkeypatch, SPARK)
    monkeypatch.undo()
    assert kinds.host_memory_mib(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / kinds.MEMINFO).write_text("MemTotal:       127602060 kB\nMemFree:  1 kB\n")
    assert kinds.host_memory_mib(tmp_path) == 124611


def planned_lines(monkeypatch, capsys, *words, container=False, **environ):
    """What `plan` prints: as JSON, with these variables, on four cards."""
    cards(monkeypatch, *[PRO] * 4)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(facts, "is_container", lambda *_: container)
    assert main(["plan", "--sglang", "0.5.23", "--context", "65536", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("in_use", "end"), [(700, None), (2100, ""), (13_000, ", and no request of full length fits")])
def test_what_is_in_use_on_a_card_is_told(monkeypatch, capsys, in_use, end):
    """A desktop on the second of two cards: SGLang takes its fraction of what is free on the card that has least."""
    cards(monkeypatch, PRO, PRO)
    answer, nothing = facts.run_command, "<used>0 MiB</used>"
    some = f"<used>{in_use} MiB</used>".join
    monkeypatch.setattr(facts, "run_command", lambda words: some((answer(words) or "").rsplit(nothing, 1)))
    assert main(["plan", "--sglang", "0.5.23", "--context", "393216", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = [note for note in found["notes"] if "are in use now" in note]
    assert found["request"]["in_use_mib"] == in_use and len(told) == (end is not None)
    if told:
        plan = launch.make(request())
        left = plan.pools.tokens(plan.pool_bytes - plan.fraction * in_use * (1 << 20))
        said = int(re.search(r"lacks: ([\d,]+) of", told[0])[1].replace(",", ""))
        assert said == pytest.approx(plan.tokens - left, abs=256) and (f"tokens{end}" in told[0])
        assert (left < 393_216) == bool(end)
    assert main(["plan", "--sglang", "0.5.23", "--gpus", "2", "--memory", "96", "--json"]) == 0  # another machine's
    assert not any("in use now" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_the_lines_are_for_the_cards_that_the_plan_is_for(monkeypatch, capsys):
    """Without it a second server of a host goes to the first one's cards: Docker hands on no variable."""
    chosen = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    found = planned_lines(monkeypatch, capsys, **chosen)
    assert found["request"]["gpus"] == 2
    assert " -e CUDA_VISIBLE_DEVICES=2,3 -e CUDA_DEVICE_ORDER=PCI_BUS_ID " in found["docker"]
    assert " CUDA_VISIBLE_DEVICES=2,3 CUDA_DEVICE_ORDER=PCI_BUS_ID python3 " in found["launch"]
    found = planned_lines(monkeypatch, capsys, "--gpus", "4", "--memory", "96", **chosen)  # of another machine
    assert "CUDA_" not in found["docker"] + found["launch"]


@pytest.mark.parametrize(
    ("told", "container", "shown"),
    [
        ("2,3", True, """'"device=2,3"'"""),
        ("GPU-1a5c-00,GPU-2a5c-00", True, """'"device=GPU-1a5c-00,GPU-2a5c-00"'"""),
        *((told, True, "all") for told in ("all", "void", "none", "", "/var/run/nvidia-container-devices", "2;ls")),
        ("2,3", False, "all"),
    ],
)
def test_of_a_container_with_some_cards_the_next_one_has_those(monkeypatch, capsys, told, container, shown):
    found = planned_lines(monkeypatch, capsys, container=container, NVIDIA_VISIBLE_DEVICES=told)
    assert f"docker run --rm --gpus {shown} --ipc=host" in found["docker"]
