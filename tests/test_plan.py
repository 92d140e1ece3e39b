"""plan: bytes against the published checkpoint, what fits, flags by version, bad input."""

import argparse
import json
import re
from pathlib import Path

import pytest

from deepseek_v4_sm120 import OPS, __version__
from deepseek_v4_sm120.commands import models_table, speculation
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import facts
from deepseek_v4_sm120.commands.plan import cards as kinds
from deepseek_v4_sm120.commands.plan import command, launch, memory, models, roofline
from deepseek_v4_sm120.commands.plan.remedies import remedies
from deepseek_v4_sm120.commands.plan.request import Request
from deepseek_v4_sm120.patching import profile
from deepseek_v4_sm120.settings import Settings

CONFIG = Path(__file__).parent / "data/flash_config.json"
MEMORY = int(96 * launch.REPORTED_PER_GB)
MTP = speculation.Speculation(speculation.EAGLE, 2)


def request(**changes):
    values = dict(
        model=models.FLASH, gpus=2, memory_mib=MEMORY, context=393_216, concurrency=8, speculation=MTP, sglang="0.5.23"
    )
    return Request(**values | changes)


def flags(plan):
    return {flag.name: flag.value for flag in plan.flags}


def test_weights_are_those_of_the_published_checkpoints():
    whole = memory.weight_bytes(models.FLASH, 1, drafts=True, wo_a_bf16=False)
    assert whole == pytest.approx(159.6e9, rel=0.001)
    assert memory.weight_bytes(models.FLASH, 2, drafts=True, wo_a_bf16=False) == pytest.approx(80.5e9, rel=0.002)
    assert memory.weight_bytes(models.PRO, 1, drafts=True, wo_a_bf16=False) == pytest.approx(864.7e9, rel=0.001)
    fp8 = models.find("flash", "fp8")
    assert memory.weight_bytes(fp8, 2, drafts=True, wo_a_bf16=True) == pytest.approx(147e9, rel=0.02)


def pools(version, *, drafts=0, requests=8, chunk=4096):
    return memory.pools(models.FLASH, version, requests=requests, chunk=chunk, drafts=drafts)


def test_pools_by_hand():
    """For Flash in 0.5.17: 58.4 x 43 + 584/4 x 21 + 584/128 x 20 + 132/4 x 21 + 0.1 x 8/128 x 10240 x 21. All wheels'
    own configurators are in test_plan_pools.py."""
    by_hand = 58.4 * 43 + 146 * 21 + 4.5625 * 20 + 33 * 21 + 0.1 / 16 * 10240 * 21
    assert pools((0, 5, 17)).token_bytes == pytest.approx(by_hand)
    assert pools((0, 5, 14)).token_bytes == pytest.approx(by_hand + 0.1 * 2 * 512 * 4 * 20)
    assert pools((0, 5, 17), drafts=2).token_bytes > by_hand * 44 / 43
    assert pools((0, 5, 23)).token_bytes == pytest.approx(585 / 4 * 21 + 864 / 128 * 20 + 33 * 21)
    rows = 257 * 128 + 128 + 128  # up to the next multiple of 128
    assert memory.c128_state_bytes(models.FLASH, 256, False) == pytest.approx(rows * 1024 * 4 * 20, rel=0.005)


def test_the_bytes_of_a_token_are_the_kernels():
    from deepseek_v4_sm120.reference import kv_pages

    assert kv_pages.TOKEN_BYTES == memory.KV_TOKEN_BYTES


def test_the_bounds_are_the_operators():
    from deepseek_v4_sm120.ops import index_select

    assert index_select.PREFILL_SCRATCH_BYTES == memory.INDEX_SELECT_PREFILL_BYTES
    assert index_select.DECODE_SCRATCH_BYTES == memory.INDEX_SELECT_DECODE_BYTES


def test_what_is_ours_needs_no_logits_and_less_of_the_experts():
    def sizes(**changes):
        return {r.what: r.bytes for r in launch.make(request(context=1 << 20, **changes)).reserves}

    ours, stock = sizes(), sizes(replaced=("sparse_decode",))
    assert ours["index selection, chunk and graphs"] == (256 + 64) << 20
    assert stock["index logits, chunk and graphs"] > 1 << 30 and "index selection, chunk and graphs" not in stock
    assert memory.experts_bytes(models.FLASH, 2, 4096, True) < memory.experts_bytes(models.FLASH, 2, 4096, False)
    longer = launch.make(request(context=1 << 20, concurrency=1)).chunk
    assert longer >= launch.make(request(context=1 << 20, concurrency=1, replaced=())).chunk


def test_wo_a_stays_fp8_where_it_is_ours():
    ours, stock = launch.make(request()), launch.make(request(replaced=("sparse_decode", "index_select")))
    layer = 8 * 1024 * 4096 / 2  # a rank's
    assert stock.weights - ours.weights == pytest.approx(44 * layer, rel=0.01)
    assert {r.what: r.bytes for r in ours.reserves}["wo_a of a prompt, in bf16"] == 2 * layer
    assert not any("wo_a" in r.what for r in stock.reserves)
    told = ["FP8" in command.memory_rows(plan)[1][2] for plan in (ours, stock)]
    assert told == [True, False]


def test_the_drafts_head_is_counted_once_a_server_drafts(monkeypatch):
    def reserve(**changes):
        sizes = {
            x.what: x.bytes for x in launch.make(request(**({"concurrency": 4, "draft_head": True} | changes))).reserves
        }
        return sizes.get("drafts' head in INT4")

    for gpus in (2, 4):  # scores of four streams, two rows each
        assert reserve(gpus=gpus) == 129_280 / gpus * (4096 * 17 / 32 + 8 * 8)
    for changes in (
        {"speculation": None},
        {"replaced": ("mhc",)},
        {"draft_head": False},
        {"draft_head": None, "concurrency": 64},
    ):
        assert reserve(**changes) is None
    assert reserve(sglang="0.5.13", insist=True) is None
    monkeypatch.setattr(command, "settings", lambda: Settings(choices={"draft_head": "on"}))
    asked = command.request_of(arguments(sglang="0.5.23"))
    assert asked.draft_head is True and asked.replaced == OPS
    assert {f.name: f.value for f in launch.make(asked).environment}[
        "DSV4_SM120_SET"
    ] == "draft_head=on,prefill_graphs=on,dealt_products=on"


def arguments(**given):
    """Of `plan`, as its parser makes them."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return parser.parse_args(["--gpus", "2", "--memory", "96", *words])


def write_profile(path, **changes):
    identity = {"device": "A card", "driver": "580.1", "sglang": "0.5.23", "package": __version__}
    operators = {"index_select": {"winner": "stock"}, "mxfp4_moe": {"winner": "ours"}}
    found = {"format": 1, "identity": identity | changes.pop("identity", {}), "operators": operators} | changes
    path.write_text(json.dumps(found))
    return path


def test_a_profile_that_leaves_an_operator_out(tmp_path):
    path = write_profile(tmp_path / "p.json")
    asked = command.request_of(arguments(profile=path, sglang="0.5.23"))
    assert asked.replaced == tuple(op for op in OPS if op != "index_select")
    plan = launch.make(asked)
    assert any("leaves out index_select" in note for note in plan.notes)
    assert f"DSV4_SM120_PROFILE={path} " in launch.launch_line(plan)
    assert launch.mount(str(path), launch.PROFILE_MOUNT) in launch.docker_line(plan)
    assert f"-e DSV4_SM120_PROFILE={launch.PROFILE_MOUNT}" in launch.docker_line(plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"identity": {"sglang": "0.5.17"}}, "SGLang 0.5.17, not 0.5.23"),
        ({"identity": {"sglang": None}}, "SGLang not known, not 0.5.23"),
        ({"identity": {"package": "0.0.9"}}, "deepseek_v4_sm120 0.0.9, not"),
        ({"identity": {"package": "9"}, "operators": {"of_tomorrow": {"winner": "ours"}}}, "deepseek_v4_sm120 9, not"),
    ],
)
def test_a_profile_that_a_server_would_not_use_is_not_planned_with(tmp_path, changes, words):
    asked = command.request_of(arguments(profile=write_profile(tmp_path / "p.json", **changes), sglang="0.5.23"))
    plan = launch.make(asked)
    assert asked.replaced == OPS and any(words in note for note in plan.notes)
    assert "DSV4_SM120_PROFILE" not in launch.launch_line(plan) + launch.docker_line(plan)


def test_a_profile_of_other_cards_or_of_another_build_is_used_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "build_info", lambda: {"code": "1"})
    for made, code, words in (
        ({"tp": 2}, "1", []),
        ({"tp": 2, "quick": False}, "1", []),
        ({"tp": 4}, "1", ["of 4 cards, this server has 2"]),
        ({"tp": 2}, "2", ["another build of ours"]),
        ({"tp": 2, "quick": True}, "1", ["made with --quick, by fewer shapes"]),
    ):
        path = write_profile(tmp_path / "p.json", plan=made, build={"code": code})
        plan = launch.make(command.request_of(arguments(profile=path, sglang="0.5.23")))
        told = [note for note in plan.notes if note.startswith(f"profile {path} ")]
        assert len(told) == len(words) and all(word in note for word, note in zip(words, told, strict=True))
        assert f"DSV4_SM120_PROFILE={path} " in launch.launch_line(plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": {"package": None}},
        {"operators": {"of_nobody": {"winner": "ours"}}},
        {"operators": {"mhc": {"winner": "theirs"}}},
        {"format": 2},
        {"operators": []},
    ],
)
def test_plan_refuses_what_a_server_would_refuse(tmp_path, changes):
    path = write_profile(tmp_path / "p.json", **changes)
    told = profile.consult(str(path), "0.5.23", profile.Identity(None, None, "0.5.23", __version__)).problem
    with pytest.raises(CommandError, match="^profile ") as caught:
        command.request_of(arguments(profile=path, sglang="0.5.23"))
    assert told is not None and str(caught.value) == told


def of_sums(ours, nccl, cards=4):
    def cases(times):
        return {
            "cases": [{"case": f"{cards} cards, {rows} rows", "us": us, "error": 0.0} for rows, us in times.items()]
        }

    providers = {"ours": cases(ours), "nccl": cases(nccl), "stock": {"problem": "none"}}
    return {"operators": {"all_reduce": {"winner": "ours", "providers": providers}}}


def test_the_ceilings_have_the_sums_that_calibrate_measured(tmp_path, capsys):
    path = write_profile(tmp_path / "p.json", **of_sums({1: 5.0, 8: 7.0}, {1: 24.0, 8: 27.0}))
    asked = command.request_of(arguments(profile=path, sglang="0.5.23", gpus=4))
    assert asked.sums_us == {"ours": {1: 5.0, 8: 7.0}, "nccl": {1: 24.0, 8: 27.0}}
    rows = {int(row[0]): row for row in command.speed_rows(launch.make(asked))}
    read = roofline.step_bytes(models.FLASH, 4, 8, 8192, wo_a_bf16=False) / kinds.PRO.bytes_per_s
    assert rows[8][1].startswith(f"{8 / (read + 87 * 7e-6):.0f} at") and rows[8][3] == f"{8 / (read + 87 * 27e-6):.0f}"
    command.show(launch.make(asked))
    assert f"all-reduces as {path} has them" in capsys.readouterr().out


STRANGE = [3, {"case": 1, "us": 1}, {"case": "4 cards, 8 rows", "us": "x"}, {"case": "4 cards, 1 rows", "us": -4}]


@pytest.mark.parametrize(
    "changes",
    [
        of_sums({1: 5.0}, {1: 24.0}, cards=2),
        {"operators": {"all_reduce": {"winner": "ours", "providers": "none"}}},
        {"operators": {"all_reduce": {"winner": "ours", "providers": {"ours": {"cases": STRANGE}, "nccl": []}}}},
        {"operators": {"all_reduce": {"winner": "ours"}}},
    ],
    ids=["other cards", "no providers", "strange ones", "nothing"],
)
def test_without_such_sums_the_ceilings_are_assumed(tmp_path, changes):
    asked = command.request_of(
        arguments(profile=write_profile(tmp_path / "p.json", **changes), sglang="0.5.23", gpus=4)
    )
    plain = command.request_of(arguments(sglang="0.5.23", gpus=4))
    assert asked.sums_us == {} and command.speed_rows(launch.make(asked)) == command.speed_rows(launch.make(plain))
    few = roofline.all_reduce_seconds(models.FLASH, 4, 64, True, {8: 7.0})  # fewer rows were measured
    assert few == roofline.all_reduce_seconds(models.FLASH, 4, 64, True)


@pytest.mark.parametrize("cards", [2, 4, 8])
def test_the_least_time_of_sums_is_that_of_either_way_of_ours(cards):
    """All terms to everybody, or by way of their owner, as ops.all_reduce has both: fewer bytes, one hop more."""

    def of(rows, fast=True):
        return roofline.all_reduce_seconds(models.FLASH, cards, rows, fast) / 87 * 1e6

    row, floor = 4096 * 2 / 50e9 * 1e6, kinds.PCIE.fast_s[cards] * 1e6
    assert of(1) == pytest.approx(floor + (cards - 1) * row)
    by_owners = floor + roofline.HOP_S * 1e6 + 2 * (cards - 1) / cards * 64 * row
    assert of(64) == pytest.approx(min(by_owners, floor + (cards - 1) * 64 * row)) and of(64) < of(64, fast=False)
    assert (of(64) == pytest.approx(by_owners)) == (cards > 2)


def test_sums_between_hosts_are_nccls():
    for rows, cards in ((1, 2), (64, 8)):
        ours, theirs = (
            roofline.all_reduce_seconds(models.FLASH, cards, rows, f, link=kinds.NETWORK) for f in (True, False)
        )
        assert ours == theirs


def test_the_memory_of_the_sums():
    def reserve(gpus, **changes):
        return {x.what: x for x in launch.make(request(gpus=gpus, **changes)).reserves}.get("sums between the cards")

    assert 30e6 < reserve(2).bytes < reserve(4).bytes <= 48 << 20 and reserve(4).off_by == 0.0
    assert reserve(1) is None and reserve(4, replaced=("mhc",)) is None
    notes = launch.make(request(gpus=4, replaced=("mhc",))).notes
    assert any("PCIE_IPC" in note for note in notes) and not any(
        "PCIE_IPC" in note for note in launch.make(request(gpus=4)).notes
    )


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ("0.5.15.post1", "lmsysorg/sglang:v0.5.15.post1"),
        ("v0.5.12.post1", "lmsysorg/sglang:v0.5.12.post1"),
        ("0.5.23", "lmsysorg/sglang:v0.5.23"),
        ("0.5.22rc0", "lmsysorg/sglang:v0.5.22rc0"),
        ("0.5.24.dev7", None),
        ("0.5.23+cu130", None),
        ("0.5.24.dev7+g0123abc", None),
    ],
)
def test_the_image_is_of_exactly_the_version(given, image, capsys):
    asked = command.request_of(arguments(sglang=given))
    plan = launch.make(asked)
    line = launch.docker_line(plan)
    assert line is None if image is None else f" {image} python3 " in line
    assert asked.version == tuple(map(int, given.removeprefix("v")[:6].split("."))) and command.as_dict(plan)
    command.show(plan)
    assert ("no image of SGLang" in capsys.readouterr().out) == (image is None)


@pytest.mark.parametrize(
    ("found", "reckoned", "is_told"),
    [
        *((None, "0.5.23", False), ("0.5.17", "0.5.17", False), ("0.5.24.dev7+g01", "0.5.24.dev7+g01", False)),
        *(("0.0.0.dev1+g01", "0.5.23", True), ("main-abc", "0.5.23", True)),
    ],
)
def test_a_sglang_that_names_no_release_is_reckoned_as_the_newest(found, reckoned, is_told, monkeypatch):
    monkeypatch.setattr(command, "package_version", lambda package, sources: found)
    asked = command.request_of(arguments())
    assert asked.sglang == reckoned and any("names no release" in text for text in asked.profile_told) == is_told
    assert not any("names no release" in text for text in command.request_of(arguments(sglang="0.5.20")).profile_told)


@pytest.mark.parametrize("given", ["", "newest", "0.5", "0.5.15.garbage", "0.5.23 --x", "vv0.5.23", "0.5.٣", "0.5.1/x"])
def test_what_is_no_version_is_refused(given):
    with pytest.raises(CommandError, match="--sglang must be a version"):
        command.request_of(arguments(sglang=given))


@pytest.mark.parametrize("given", ["0", "-5", "7.9", "1025", "1e308", "inf", "nan"])
def test_what_no_card_has_is_refused(given):
    asked = arguments()
    asked.memory = float(given)
    for gpus in (2, None):
        asked.gpus = gpus
        with pytest.raises(CommandError, match="--memory must be 8 to 1024 GB per card"):
            command.request_of(asked)


def test_the_smallest_card_that_is_taken_is_planned_for():
    asked = arguments()
    asked.memory = 8.0
    assert not launch.make(command.request_of(asked)).fits


def test_the_index_logits_of_a_chunk():
    assert memory.index_logits_bytes(8192, 131_072) == 1 << 30
    assert memory.chunk_for(1 << 20, 2 << 30) == 2048


def test_the_fewest_bytes_of_a_step():
    read = roofline.step_bytes(models.FLASH, 2, 1, 8192, wo_a_bf16=False)
    assert read / kinds.PRO.bytes_per_s == pytest.approx(3.51e-3, rel=0.01)
    read = roofline.step_bytes(models.FLASH, 4, 8, 131_072, wo_a_bf16=False)
    assert read / kinds.PRO.bytes_per_s == pytest.approx(5.69e-3, rel=0.02)


def test_two_cards_hold_the_fp4_checkpoint_and_not_the_fp8_one(capsys):
    plan = launch.make(request())
    assert plan.fits and plan.fraction <= memory.MOST_FRACTION
    assert plan.fraction * MEMORY * (1 << 20) > plan.weights + plan.pools.states
    assert not launch.make(request(model=models.find("flash", "fp8"))).fits
    assert launch.make(request(model=models.find("flash", "fp8"), gpus=4)).fits
    assert not launch.make(request(model=models.PRO, gpus=8)).fits


def test_what_would_fit_is_said():
    assert "--concurrency 64" in remedies(request(concurrency=256))
    words = remedies(request(memory_mib=int(80 * launch.REPORTED_PER_GB)))
    assert "4 cards" in words
    assert any(word.startswith("--context") for word in remedies(request(sglang="0.5.12", context=1_000_000)))


@pytest.mark.parametrize("version", ("0.5.12", "0.5.14", "0.5.17", "0.5.19", "0.5.20", "0.5.23"))
def test_flags_that_this_version_knows(version):
    plan = launch.make(request(sglang=version, context=131_072))
    found = flags(plan)
    assert ("--cuda-graph-max-bs" in found) == (version == "0.5.12")
    assert ("--prefill-decode-interval" in found) == (version in ("0.5.19", "0.5.20", "0.5.23"))
    assert ("--moe-runner-backend" in found) == (version == "0.5.12")
    environment = {flag.name: flag.value for flag in plan.environment}
    set_here = {"0.5.12": [], "0.5.17": ["prefill_decode_interval_0_5_17"], "0.5.23": ["prefill_graphs"]}
    expected = set_here.get(version, []) + ["dealt_products"] * (version != "0.5.12")
    assert [one.split("=")[0] for one in environment.get("DSV4_SM120_SET", "").split(",") if one] == expected
    assert found["--max-running-requests"] == "8" and all(flag.reason for flag in plan.flags)
    assert found["--chunked-prefill-size"] in ("4096", "2048", "1024")


def test_many_short_streams_need_window_slots():
    plan = launch.make(request(context=1024, concurrency=200, sglang="0.5.12"))
    assert not plan.fits and plan.tokens > 1024
    assert "sliding-window slots for 200 streams" in command.why_not(plan)


def test_slots_of_windows_by_requests_leave_less_for_tokens():
    """From 0.5.21 on they are held whatever the tokens; a thousand streams' leave none."""
    few, many = (launch.make(request(concurrency=n)) for n in (8, 64))
    assert 0 < few.pools.window_bytes < many.pools.window_bytes and few.tokens > many.tokens
    assert pools((0, 5, 23), requests=1000).tokens(8e9) == 0


def test_what_hangs_on_estimates_is_not_said_to_fit(capsys):
    """Cards that are smaller and smaller: it fits, then it may, then it does not."""
    plans = [launch.make(request(concurrency=1, memory_mib=MEMORY - less)) for less in range(0, 24_000, 256)]
    words = [("fits" if not p.is_tight else "may") if p.fits else "not" for p in plans]
    assert words == sorted(words, key=("fits", "may", "not").index) and set(words) == {"fits", "may", "not"}
    tight = plans[words.index("may")]
    inside = 0.002 * tight.weights + tight.fraction * 0.5 * memory.GIB
    assert tight.fits and min(tight.left_free - tight.off_by, tight.spare - inside) < 0
    command.show(plans[0])
    assert "It fits:" in capsys.readouterr().out
    command.show(tight)
    said = capsys.readouterr().out
    assert "It may fit:" in said and "It fits" not in said and "may be short by" in said
    assert command.as_dict(tight)["tight"] is True


def test_scratch_that_does_not_fit_is_not_the_weights():
    plan = launch.make(request(concurrency=1000))
    assert not plan.fits and "for 1000 streams beside them" in command.why_not(plan)


def test_one_stream_needs_no_fairness():
    plan = launch.make(request(concurrency=1, context=131_072))
    assert plan.interval == 0 and "--prefill-decode-interval" not in flags(plan)
    assert flags(plan)["--chunked-prefill-size"] == "8192"


def test_long_contexts_take_smaller_chunks_where_the_logits_are_a_tensor():
    wanted = request(context=1 << 20, concurrency=1, sglang="0.5.17", speculation=None)
    assert flags(launch.make(wanted))["--chunked-prefill-size"] == "8192"
    stock = Request(**vars(wanted) | {"replaced": ("sparse_decode",)})
    assert int(flags(launch.make(stock))["--chunked-prefill-size"]) < 8192


def test_a_real_configuration_gives_the_built_in_shape():
    found = models.from_config(CONFIG, None)
    assert {k: v for k, v in vars(found).items() if k not in ("name", "path")} == {
        k: v for k, v in vars(models.FLASH).items() if k not in ("name", "path")
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is not a DeepSeek-V4 model"),
        ({"model_type": "deepseek_v3"}, "nothing of it would be ours: model_type deepseek_v3 is not deepseek_v4"),
        ({"hidden_size": None}, "must be positive whole numbers"),
        ({"compress_ratios": [0] * 43 + [7]}, None),
        ({"compress_ratios": [7] * 44}, "are not those of DeepSeek-V4"),
        ({"compress_ratios": [0]}, "one entry a layer"),
        ({"o_groups": ...}, "lacks o_groups"),
    ],
)
def test_bad_configurations_are_one_sentence(tmp_path, change, words):
    config = json.loads(CONFIG.read_text()) | change
    config = {k: v for k, v in config.items() if v is not ...}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    if words is None:
        assert models.find(str(tmp_path), None).layers == 43
        return
    with pytest.raises(CommandError, match=words):
        models.find(str(tmp_path), None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 3}, "divides into"),
        ({"gpus": -2}, "--gpus must be at least 1"),
        ({"concurrency": 100_000}, "--concurrency must be 1 to"),
        ({"context": 100}, "--context must be"),
        ({"context": 1 << 21}, "--context must be"),
        ({"concurrency": 0}, "--concurrency must be"),
        ({"memory_mib": 1024}, "--memory must be"),
        ({"sglang": "0.5.11"}, "does not have this model"),
        ({"sglang": "0.6.0"}, "newer than what this release knows"),
    ],
)
def test_contradictions_are_one_sentence(change, words):
    with pytest.raises(CommandError, match=words):
        launch.make(request(**change))


@pytest.mark.parametrize(
    ("text", "path"),
    [(path, path) for path in models.NAMES.values()] + [("DEEPSEEK-AI/deepseek-v4-flash", models.FLASH.path)],
)
def test_a_checkpoint_is_known_by_the_name_that_a_server_gets(text, path, tmp_path, monkeypatch):
    found = models.find(text, None)
    assert found.path == path and found.expert_format == ("fp8" if path.endswith("FP8") else "fp4")
    with pytest.raises(CommandError, match=f"the experts of {text} are {found.expert_format}"):
        models.find(text, {"fp4": "fp8", "fp8": "fp4"}[found.expert_format])
    assert models_table.of_model(text, 2)["model"] == f"{path}, TP2"
    (tmp_path / text).mkdir(parents=True)  # as for SGLang, a folder of that name is the model
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="config.json cannot be read"):
        models.find(text, None)


def test_a_server_that_is_switched_off_is_planned_as_stock(monkeypatch, capsys):
    monkeypatch.setattr(command, "settings", lambda: Settings(off=True, choices={"mhc": "off"}))
    plan = launch.make(command.request_of(arguments(sglang="0.5.17", spec="none")))
    assert plan.request.replaced == () and any(reserve.what.startswith("index logits") for reserve in plan.reserves)
    values = {flag.name: flag.value for flag in plan.environment}
    assert values["DSV4_SM120"] == "off" and "DSV4_SM120_SET" not in values
    assert any(note.startswith("DSV4_SM120=off leaves out sparse_decode,") for note in plan.notes)


def test_the_profile_of_the_environment_is_that_of_the_server(tmp_path, monkeypatch):
    path = write_profile(tmp_path / "p.json")
    monkeypatch.setattr(command, "settings", lambda: Settings(profile=str(path)))
    found = command.request_of(arguments(sglang="0.5.23"))
    assert found.profile == str(path) and "index_select" not in found.replaced
    for inside in (True, False):
        monkeypatch.setattr(facts, "is_container", lambda root, inside=inside: inside)
        assert any("wants its path on the host" in note for note in launch.make(found).notes) is inside
    monkeypatch.setattr(command, "settings", lambda: Settings(profile=str(tmp_path / "none.json")))
    with pytest.raises(CommandError, match="cannot be read"):
        command.request_of(arguments())
    assert command.request_of(arguments(profile=path, sglang="0.5.23")).profile == str(path)


def test_figures_of_others_stand_beside_the_checkpoint_that_they_are_of():
    """No ceiling is below what somebody reached."""
    for gpus, streams in roofline.PUBLISHED:
        (*_, row) = command.speed_rows(launch.make(request(gpus=gpus, concurrency=streams)))
        assert float(row[4]) < float(row[1].split()[0])
    fp8 = request(model=models.find("flash", "fp8"), gpus=4, concurrency=32)
    assert [row[4:] for row in command.speed_rows(launch.make(fp8))] == [("-", "nobody")] * 2
    assert "steps of 514 rows" in " ".join(launch.make(request(gpus=4, concurrency=257)).notes), "512 are ours"
    assert "rows are more" not in " ".join(launch.make(request(gpus=4, concurrency=256)).notes)
    small = request(concurrency=4096, memory_mib=8192)
    assert launch.make(small).fraction == 0.0, "no negative share where nothing fits"


def test_the_planned_container_keeps_every_cache_that_doctor_asks_for():
    line = launch.docker_line(launch.make(request()))
    kept = [Path(volume.rpartition(":")[2]) for volume in re.findall(r"-v (dsv4-\S+)", line)]
    folders = facts.cache_folders({}, Path("/root")).values()
    assert folders and all(any(folder.is_relative_to(top) for top in kept) for folder in folders)


def test_what_it_starts_answers_this_machine_alone():
    """SGLang without a key takes /update_weights_from_disk from everybody, and Docker publishes past a firewall."""
    plan = launch.make(request())
    assert " --host 127.0.0.1 --port 30000 " in launch.launch_line(plan)
    published = re.findall(r"-p (\S+)|--publish\S*|--net\S*|-P\b", launch.docker_line(plan))
    assert published == ["127.0.0.1:30000:30000"]
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    assert re.findall(r"--ipc=host -p (\S+)", text) == published


def test_output_for_people_and_programs(capsys):
    plan = launch.make(request())
    command.show(plan)
    text = capsys.readouterr().out
    assert "It fits" in text and "docker run" in text and "best published" in text
    found = command.as_dict(plan)
    assert json.loads(json.dumps(found))["tokens"] == plan.tokens
    assert plan.flags[0].value in launch.docker_line(plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hash_layers": "x"}, "num_hash_layers must be"),
        ({"expert_dtype": 7}, "experts in 7 are not"),
        ({"compress_ratios": [[]] * 99}, "compress_ratios with"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"hidden_size": 10**400}, "hidden_size must be"),
        ({"vocab_size": True}, "vocab_size must be"),
        ({"architectures": [[1]]}, "is not a DeepSeek-V4 model"),
    ],
)
def test_a_config_of_any_shape_is_one_sentence(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(CONFIG.read_text()) | changes))
    with pytest.raises(CommandError, match=words):
        models.find(str(tmp_path), None)


def test_the_rows_of_the_readme_are_what_the_plan_says():
    """With MTP, as the README adds it: that they fit, that the one which is said not to does not, and the fraction."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    table = readme.partition("| cards of 96 GB |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == 4
    for cards, checkpoint, flags_of in rows:
        model = models.find("flash", checkpoint[:3].lower())
        given = dict(re.findall(r"--([a-z-]+) ([^ `]+)", flags_of))
        streams = int(given.get("max-running-requests", 256)) if given else 1  # SGLang's own default; the best case
        plan = launch.make(request(model=model, gpus=int(cards), concurrency=streams))
        assert plan.fits == ("does not fit" not in flags_of), cards
        if plan.fits:
            assert (given["model-path"], given["tp-size"]) == (model.path, cards) and not plan.is_tight
            assert float(given.get("mem-fraction-static", 0.0)) in (0.0, plan.fraction)
    assert not launch.make(request(concurrency=256)).fits
