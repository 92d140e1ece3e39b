"""What plan, serve and doctor make of a speculation that is known to go wrong, and which block they recommend. The
facts themselves: tests/patching/test_wheel_speculation.py."""

import argparse
import json
import re
from pathlib import Path

import pytest

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands import speculation
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import server
from deepseek_v4_sm120.commands.doctor.finding import FAIL, NOT_RUN, OK, WARN
from deepseek_v4_sm120.commands.plan import cards, command, launch, memory, models, roofline
from deepseek_v4_sm120.commands.speculation import (
    COMPACT,
    DOUBT,
    DSPARK,
    EAGLE,
    STOPS,
    STRUCTURE,
    TEXT,
    WRONG,
    Speculation,
    of_command,
)
from deepseek_v4_sm120.settings import settings
from tests.doctor.test_server import PLANNED
from tests.patching.wheels import RELEASES

CHAIN = "--speculative-algorithm EAGLE --speculative-eagle-topk 1"


def plan_of(*words, sglang="0.5.23"):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    asked = parser.parse_args(["--gpus", "4", "--memory", "96", "--sglang", sglang, *words])
    return launch.make(command.request_of(asked))


def flags(plan):
    return {flag.name: flag.value for flag in plan.flags}


@pytest.mark.parametrize("version", RELEASES)
def test_what_is_recommended_is_safe_in_its_release(version):
    for model in ("flash", "flash-0731"):
        for streams in ("1", "8", "32", "128"):
            for load in (TEXT, STRUCTURE):
                words = "--model", model, "--concurrency", streams, "--load", load
                if model == "flash-0731" and tuple(map(int, version.split(".")[:3])) < speculation.DSPARK_SINCE:
                    with pytest.raises(CommandError, match="the server stops, because of DSPARK: .*0.5.16 or newer"):
                        plan_of(*words, sglang=version)
                    assert plan_of(*words, "--spec", "none", sglang=version).request.rows == 0
                    continue
                r = plan_of(*words, sglang=version).request
                found = list(speculation.hazards(r.version, r.speculation, OPS))
                is_sent = model == "flash" or r.version >= speculation.DSPARK_SYNCED_SINCE  # what each card draws
                assert [kind for kind, _ in found] == ([] if is_sent else [DOUBT])


@pytest.mark.parametrize(
    ("words", "sglang", "drafts"),
    [
        ((), "0.5.23", (EAGLE, 1)),
        (("--load", STRUCTURE), "0.5.12", (EAGLE, 2)),
        (("--concurrency", "64", "--load", STRUCTURE), "0.5.12", (EAGLE, 3)),
        (("--concurrency", "65", "--load", STRUCTURE), "0.5.23", (EAGLE, 2)),  # 260 rows
        (("--concurrency", "85"), "0.5.23", (EAGLE, 2)),
        (("--concurrency", "86"), "0.5.23", (EAGLE, 1)),  # 258 rows
        (("--concurrency", "1"), "0.5.12", (EAGLE, 2)),
        (("--concurrency", "1", "--load", STRUCTURE), "0.5.17", (EAGLE, 2)),
        (("--model", "flash-0731"), "0.5.17", (DSPARK, 3)),
        (("--model", "flash-0731", "--concurrency", "1"), "0.5.23", (DSPARK, 3)),
        (("--model", "flash-0731", "--concurrency", "1", "--load", STRUCTURE), "0.5.18", (DSPARK, 4)),
        (("--model", "flash-0731", "--concurrency", "1", "--load", STRUCTURE), "0.5.17", (DSPARK, 3)),
        (("--model", "flash-0731", "--block", "4"), "0.5.23", (DSPARK, 4)),
        (("--spec", "none"), "0.5.23", None),
    ],
)
def test_the_launch_line_has_the_block_of_the_load(words, sglang, drafts):
    plan = plan_of(*words, sglang=sglang)
    found = flags(plan)
    if drafts is None:
        assert not any("speculative" in name for name in found)
        return
    algorithm, block = drafts
    assert found["--speculative-algorithm"] == algorithm
    if algorithm == DSPARK:
        assert found["--speculative-dspark-block-size"] == str(block) and "--speculative-num-steps" not in found
    else:
        assert found["--speculative-num-steps"] == str(block)
        assert found["--speculative-num-draft-tokens"] == str(block + 1)
    line = launch.launch_line(plan)
    assert of_command(line.split(), {}, None) == plan.request.speculation  # what SGLang makes of it
    reasons = {flag.name: flag.reason for flag in plan.flags}
    assert any(re.search("sglang #|recipes #|by bytes", reason) for reason in reasons.values())


@pytest.mark.parametrize(
    ("words", "sglang", "sentence"),
    [
        (("--block", "4"), "0.5.13", r"SGLang 0\.5\.13, EAGLE with 4 drafts a step: answers are wrong.*sglang #34189"),
        (("--model", "flash-0731", "--block", "5"), "0.5.16", r"DSPARK with 5 drafts.*Instead: .*0\.5\.18.*--insist"),
        (("--block", "10"), "0.5.17", r"EAGLE with 10 drafts.*more than 10 rows.*Instead: 9 drafts.*--insist"),
        (("--block", "10"), "0.5.23", "the server stops, because of more than 10 rows"),
        (("--block", "0"), "0.5.23", "--block must be at least 1 draft, got 0"),
        (("--spec", "dspark"), "0.5.23", "Flash brings an MTP block"),
        (("--model", "flash-0731", "--spec", "mtp"), "0.5.23", "Flash-0731 brings DSPARK's drafter"),
    ],
)
def test_plan_refuses_in_one_sentence(words, sglang, sentence):
    with pytest.raises(CommandError, match=sentence) as caught:
        plan_of(*words, sglang=sglang)
    assert "\n" not in str(caught.value)


def test_who_insists_gets_the_plan_and_the_reason():
    plan = plan_of("--block", "4", "--insist", sglang="0.5.13")
    assert flags(plan)["--speculative-num-steps"] == "4" and any("#34189" in note for note in plan.notes)
    with pytest.raises(CommandError, match="the server stops"):  # nothing to insist on
        plan_of("--block", "10", "--insist")


def bytes_read(batch, rows, drafts, tp=4, context=8192, m=models.FLASH):
    """Of a step, counted another way: the verification's rows, and each draft's pass by itself."""

    def experts(n):
        return 256 * (1 - (250 / 256) ** n)

    total = roofline.step_bytes(m, tp, batch, context, wo_a_bf16=False)
    one, head = memory.expert_bytes(m) / tp, 2 * m.vocab * m.hidden / tp
    total += 43 * one * (experts(batch * rows) - experts(batch))
    for draft in range(drafts):
        touched = experts(batch * rows if draft == 0 else batch)
        total += head + one * touched + 2 * (4096 * 4096 + 32 * 32) + batch * 128 * 584
        parts = memory.layer_weights(m, 0, False)
        total += sum(size / (tp if divided else 1) for part, (size, divided) in parts.items() if part != "routed")
    return total


@pytest.mark.parametrize(("streams", "drafts"), [(1, 0), (1, 1), (8, 1), (32, 2), (64, 3)])
def test_what_a_step_with_drafts_takes(streams, drafts):
    rows = drafts + 1
    seconds = roofline.speculating_seconds(models.FLASH, 4, streams, 8192, drafts, wo_a_bf16=False)
    sums = 87 * roofline.all_reduce_seconds(models.FLASH, 4, streams * rows, True) / 87
    for draft in range(drafts):
        sums += roofline.all_reduce_seconds(models.FLASH, 4, streams * (1 if draft else rows), True) * 3 / 87
    assert seconds == pytest.approx(bytes_read(streams, rows, drafts) / cards.PRO.bytes_per_s + sums, rel=1e-9)
    if drafts == 0:
        assert seconds == roofline.step_seconds(models.FLASH, 4, streams, 8192, wo_a_bf16=False)


def test_from_which_share_of_right_guesses_a_draft_pays():
    assert roofline.pays_from(1.3, 1) == pytest.approx(0.3, abs=1e-3)  # 1 + a tokens for 1.3 times the time
    share = roofline.pays_from(1.4, 2)
    assert (1 + share + share**2) / (1 + share) == pytest.approx(1.4, abs=1e-3)
    assert roofline.pays_from(1.5, 2) is None and roofline.pays_from(2.0, 1) is None  # not if every guess were right
    assert roofline.pays_from(1.0, 3) < 0.01


def test_the_plan_says_from_which_share_on_a_draft_pays(capsys):
    """More streams read more of the experts anyway: from 8 on a second draft pays earlier and earlier."""
    shares = []
    for streams in ("8", "16", "32", "64"):
        plan = plan_of("--concurrency", streams, "--context", "8192")
        rows = command.as_dict(plan)["drafts"]
        assert [row[:2] for row in rows] == [(str(d), str(int(streams) * (d + 1))) for d in range(4)]
        shares.append(int(rows[2][3].rstrip("%")))
        length = float(rows[2][4])
        assert length == pytest.approx(1 + shares[-1] / 100, abs=0.01)
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1] + 20
    command.show(plan)
    assert "Drafts of the MTP block at 64 stream(s), by bytes as above" in capsys.readouterr().out
    for words in (("--spec", "none"), ("--model", "flash-0731")):
        assert command.as_dict(plan_of(*words))["drafts"] == []


def test_block_5_is_a_note_where_only_its_thread_is_open():
    notes = plan_of("--model", "flash-0731", "--block", "5").notes
    assert any("in doubt" in note and "#33800" in note for note in notes)
    assert not any("#33800" in note for note in plan_of("--model", "flash-0731", "--block", "6").notes)


def test_more_drafts_and_stages_take_more_of_the_card():
    flash, dspark = plan_of(), plan_of("--model", "flash-0731")
    stage = dspark.weights - flash.weights  # three stages for one MTP block
    assert 2 * 3.3e9 / 4 < stage < 2 * 3.8e9 / 4 + 0.2e9
    assert plan_of("--block", "3").tokens < flash.tokens < plan_of("--spec", "none").tokens


def test_a_checkpoint_with_its_own_drafter(tmp_path):
    config = json.loads((Path(__file__).parent / "data/flash_config.json").read_text())
    drafter = {"dspark_block_size": 5, "dspark_target_layer_ids": [1, 20, 40]}
    (tmp_path / "config.json").write_text(json.dumps(config | drafter))
    found = models.find(str(tmp_path), None)
    assert (found.drafter, found.dspark_block, found.draft_layers) == (DSPARK, 5, 3)
    assert flags(plan_of("--model", str(tmp_path)))["--speculative-algorithm"] == DSPARK
    for wrong in ({"dspark_block_size": "5"}, {"dspark_target_layer_ids": []}, {"dspark_block_size": 0}):
        (tmp_path / "config.json").write_text(json.dumps(config | drafter | wrong))
        with pytest.raises(CommandError, match="dspark_block_size must be a whole number"):
            models.find(str(tmp_path), None)


@pytest.mark.parametrize(
    ("words", "environ", "found"),
    [
        ("--tp-size 2", {}, None),
        ("--speculative-algo NEXTN", {}, Speculation("NEXTN", 4)),
        ("--speculative-algorithm=EAGLE --speculative-num-steps 5 --speculative-num-draft-tokens 2", {},
         Speculation(EAGLE, 6, topk=None)),
        ("--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-num-steps 7 "
         "--speculative-eagle-topk 1", {}, Speculation(EAGLE, 8)),
        ("--speculative-algorithm EAGLE --speculative-eagle-topk 2", {}, Speculation(EAGLE, 4, topk=2)),
        ("--speculative-algorithm dspark", {}, Speculation("dspark", 4)),
        ("--speculative-algorithm DSPARK --speculative-num-draft-tokens 8", {}, Speculation(DSPARK, 8)),
        ("--speculative-algorithm DSPARK --speculative-dspark-block-size 3 --enable-symm-mem",
         {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, Speculation(DSPARK, 4, mode=COMPACT, symmetric=True)),
        (f"{CHAIN}", {"SGLANG_PREP_IN_CUDA_GRAPH": "False"}, Speculation(EAGLE, 4, host_plan=True)),
        (f"{CHAIN} --pipeline-parallel-size 2", {}, Speculation(EAGLE, 4, stages=2)),
        (f"{CHAIN} --pp-size 2", {"SGLANG_ENABLE_PP_SPEC": "True"},
         Speculation(EAGLE, 4, stages=2, may_have_stages=True)),
        (f"{CHAIN} --disaggregation-mode prefill", {}, Speculation(EAGLE, 4, may_have_stages=True)),
    ],
)  # fmt: skip
def test_what_a_command_line_speculates_with(words, environ, found):
    assert of_command(words.split(), environ, 5) == found


def test_without_a_checkpoints_block_it_is_sglangs():
    assert of_command(["--speculative-algorithm", "DSPARK"], {}, None).block == speculation.DSPARK_BLOCK


# ---- serve


def dry_run(*words, own=(), sglang="0.5.17", model="flash"):
    words = ["serve", "--gpus", "4", "--memory", "96", "--sglang", sglang, "--model", model, "--dry-run", *words]
    return main([*words, "--", *own] if own else words)


@pytest.mark.parametrize(
    ("own", "sglang", "model", "environ", "sentence"),
    [
        (["--speculative-num-steps", "4"], "0.5.13", "flash", {}, "more than 4 rows"),
        (["--speculative-num-steps", "4"], "0.5.17", "flash", {"DSV4_SM120_SET": "compressor=off"}, "more than 4 rows"),
        (["--speculative-dspark-block-size=5"], "0.5.16", "flash-0731", {}, "more than 4 rows"),
        ([], "0.5.17", "flash", {"SGLANG_PREP_IN_CUDA_GRAPH": "0"}, "SGLANG_PREP_IN_CUDA_GRAPH=0"),
        ([], "0.5.17", "flash-0731", {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, "#32470"),
        (["--enable-symm-mem"], "0.5.19", "flash-0731", {"DSV4_SM120_SET": "mhc=off"}, "#34021"),
        (["--enable-symm-mem"], "0.5.19", "flash-0731", {"DSV4_SM120": "off"}, "#34021"),
        (["--enable-streaming-session"], "0.5.23", "flash", {}, "turns read each other's tokens"),
    ],
)
def test_serve_refuses_what_answers_wrongly_unless_it_is_insisted_on(
    own, sglang, model, environ, sentence, capsys, monkeypatch
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    try:
        assert dry_run(own=own, sglang=sglang, model=model) == 2
        told = capsys.readouterr().err
        assert sentence in told and "or --insist" in told and len(told.splitlines()) == 1
        assert dry_run("--insist", own=own, sglang=sglang, model=model) == 0
        assert sentence in capsys.readouterr().out
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_serve_refuses_what_does_not_run_and_takes_the_rest(capsys, monkeypatch):
    assert dry_run(own=["--speculative-num-steps", "10"], sglang="0.5.23") == 2
    assert dry_run("--insist", own=["--speculative-num-steps", "10"], sglang="0.5.23") == 2
    assert dry_run(own=["--speculative-num-steps", "x"], sglang="0.5.23") == 2
    assert "invalid int value" in capsys.readouterr().err
    assert dry_run(own=["--speculative-num-steps", "4"], sglang="0.5.18") == 0
    assert dry_run(own=["--speculative-num-steps", "5"], sglang="0.5.17") == 0  # compressor is ours
    assert dry_run(own=["--enable-symm-mem"], sglang="0.5.19", model="flash-0731") == 0  # mhc is ours
    for word in ("NEXTN", "eagle", "NGRAM"):
        assert dry_run("--insist", own=["--speculative-algorithm", word]) == 2
        told = capsys.readouterr().err
        assert (
            f"{word} with 1 draft a step: the server stops" in told and "Instead: --speculative-algorithm EAGLE" in told
        )
    assert dry_run(own=["--speculative-algorithm", "EAGLE"]) == 0
    assert dry_run("--spec", "none", own=["--speculative-algorithm", "EAGLE"]) == 2
    assert "Instead: --speculative-eagle-topk 1" in capsys.readouterr().err
    assert dry_run("--spec", "none", own=CHAIN.split()) == 0
    for more in ([], ["--disaggregation-mode", "prefill"]):  # beside an EAGLE of the user's
        assert dry_run("--pp-size=2", own=[*CHAIN.split(), *more], sglang="0.5.20") == 2
        told = capsys.readouterr().err
        assert "--pp-size above 1" in told and "--spec none" in told and "PP_SPEC" not in told
        assert dry_run("--pp-size=2", own=more, sglang="0.5.20") == 0
    assert dry_run("--pp-size=2", own=CHAIN.split(), sglang="0.5.23") == 2
    assert "SGLANG_ENABLE_PP_SPEC=1" in capsys.readouterr().err
    assert dry_run("--pp-size=2", own=[*CHAIN.split(), "--disaggregation-mode", "prefill"], sglang="0.5.23") == 0
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    assert dry_run(sglang="0.5.23", model="flash-0731") == 2
    assert "#34384" in capsys.readouterr().err
    assert dry_run(sglang="0.5.23") == 0  # EAGLE has one length


# ---- doctor


def speculating(algorithm, rows, version, **more):
    changed = {"version": version, "speculative_algorithm": algorithm, "speculative_num_draft_tokens": rows} | more
    return PLANNED | changed | {"max_running_requests": 1}


def findings(info, variables=None, applied=frozenset(OPS), model_type="deepseek_v4"):
    answers = server.Answers(info, {"token_usage": 0.1}, applied, model_type=model_type, variables=variables)
    return [f for f in server.checks(answers) if f.check == "speculation"]


def test_doctor_fails_a_server_that_answers_wrongly():
    (found,) = findings(speculating(EAGLE, 6, "0.5.14"), applied=frozenset(OPS) - {"compressor"})
    assert found.state == FAIL and "EAGLE with 5 drafts a step: more than 4 rows" in found.found
    assert "#34189" in found.cost and "0.5.18" in found.fix
    assert not findings(speculating(EAGLE, 6, "0.5.14")) and not findings(speculating(EAGLE, 6, "0.5.18"))
    assert not findings(speculating(EAGLE, 4, "0.5.14"))
    assert not findings(speculating(EAGLE, 6, "0.5.14"), model_type="deepseek_v3")  # has no such compressors


@pytest.mark.parametrize(
    ("version", "rows", "variables", "states"),
    [
        ("0.5.17", 6, {}, {FAIL, WARN}),  # and what each of its cards draws
        ("0.5.23", 6, {}, {WARN}),
        ("0.5.23", 5, {}, set()),
        ("0.5.23", 7, {}, {WARN}),
        ("0.5.17", 4, {}, {WARN}),
        ("0.5.19", 4, {}, set()),
        ("0.5.17", 4, {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, {FAIL, WARN}),
        ("0.5.23", 4, {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, {WARN}),
        ("0.5.23", 4, None, {NOT_RUN}),
        ("0.5", 4, {}, {NOT_RUN}),
        ("0.5.23", None, {}, {NOT_RUN}),
    ],
)
def test_doctor_of_a_server_with_dspark(version, rows, variables, states):
    assert {f.state for f in findings(speculating(DSPARK, rows, version), variables)} == states


def test_doctor_of_operators_that_are_not_in_place():
    info = speculating(DSPARK, 4, "0.5.18", enable_symm_mem=True, tp_size=1)
    assert not findings(info, {})
    assert [f.state for f in findings(info, {}, applied=frozenset({"sparse_decode"}))] == [FAIL]
    unknown = findings(info, {}, applied=None)
    assert [f.state for f in unknown] == [WARN, WARN] and all(DOUBT in f.cost for f in unknown)


def test_every_kind_is_met_somewhere():
    kinds = {WRONG, STOPS, DOUBT, speculation.REFUSED}
    assert {hazard.kind for hazard in speculation.HAZARDS} == kinds and OK not in kinds


def test_a_block_longer_than_the_drafters_is_told():
    def told(block, trained):
        asked = Speculation(DSPARK, block + 1, trained=trained)
        return [kind for kind, _ in speculation.hazards((0, 5, 23), asked, OPS) if kind == speculation.REFUSED]

    assert told(6, 5) and told(8, 7) and not (told(4, 5) or told(5, 5) or told(7, 7))
    words = ["--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "7"]
    assert of_command(words, {}, 7).trained == 7 and of_command(words, {}, None).trained == 5
    (found,) = findings(speculating(DSPARK, 8, "0.5.23"), {})
    assert found.state == WARN and "4.4%" in found.cost and "block-size 4" in found.fix
