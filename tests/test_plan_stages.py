"""plan, serve and doctor where the layers are dealt to stages (--pp-size): what SGLang's own code of each release makes
of them, and what a user is told. Their pools, by every wheel's own configurator: test_plan_pools.py."""

import itertools
import math
import os
import re
import zipfile
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.__main__ import main
from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.commands.doctor import load_checks, server
from deepseek_v4_sm120.commands.plan import choices, command, launch, memory, models, stages
from deepseek_v4_sm120.commands.plan.remedies import remedies
from deepseek_v4_sm120.commands.serve import command as serve
from deepseek_v4_sm120.settings import settings
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import every_release, fetch
from tests.test_plan import CONFIG, MTP, flags, request

UTILS, SCHEDULER = "sglang.srt.distributed.utils", "sglang.srt.managers.scheduler"
INTERVAL, OF_TURNS = "--prefill-decode-interval", ("_should_defer_prefill", "_arm_prefill_decode_interval")
# of each release's text
OF_A_BATCH = r"pp_max_micro_batch_size\s*=\s*max\(\s*self\.max_running_requests // [\w.()]*pp_size, 1"
LEFT = r"get_available_gpu_memory\(\s*self.device,\s*self.gpu_id,\s*distributed=[\w.()]*world_size > 1"
TOKENS = r"pp_size(\(\))? > 1:\s*tensor = torch.tensor\(token_capacity.{,250}ReduceOp\.MIN,\s*group=[\w.()]*world_group"
NO_OVERLAP = r'pp_size > 1:.{,200}("disable_overlap_schedule": True|disable_overlap_schedule = True)'
GIVEN = ("--memory", "96", "--sglang", "0.5.23")


def staged(of, gpus=None, **changes):
    return request(**{"gpus": gpus or of, "stages": of, "speculation": None} | changes)


@pytest.fixture
def variables(monkeypatch):
    """Sets a variable of this process, and has the settings read anew."""

    def set_(name, value):
        monkeypatch.setenv(name, value)
        settings.cache_clear()

    yield set_
    monkeypatch.undo()
    settings.cache_clear()


# ---- what SGLang makes of them


@every_release("0.5.19")
@pytest.mark.parametrize("of", [2, 4])
def test_batches_have_the_steps_between_chunks_that_a_plan_names(version, of):
    """By this release's own counting of turns, of which each batch has one in a row."""
    (flag,) = (f for f in launch.make(staged(of, concurrency=8, sglang=version)).flags if f.name == INTERVAL)
    waits, arms = (take(fetch(version), {}, f"Scheduler.{name}", SCHEDULER) for name in OF_TURNS)
    made = SimpleNamespace(prefill_decode_interval=int(flag.value), _prefill_decode_interval_remaining=0)
    made.require_mlp_sync = made.prefill_decode_interval_min_bs = 0
    given = [SimpleNamespace(batch_size=lambda: 2)] * (waits.__code__.co_argcount - 1)
    turns = []
    for _ in range(3 * of * int(flag.value)):
        turns.append("step" if waits(made, *given) else "chunk")
        arms(made, SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: turns[-1] == "chunk")))
    first, second = [turn for turn, what in enumerate(turns) if what == "chunk"][:2]
    steps = {batch: len([t for t in range(first + 1, second) if t % of == batch]) for batch in range(of)}
    assert set(steps.values()) == {int(flag.value) // of}
    assert flag.reason.startswith(f"{steps[0]} decode steps of each of {of} batches after each chunk: ")
    (share,) = re.findall(r"about (\d+)% of the time", flag.reason)
    assert 100 * launch.DECODE_SHARE <= int(share) < 40 or steps[0] == launch.MOST_INTERVAL


@every_release()
def test_a_stage_has_the_layers_that_this_release_deals_it(version):
    deal = take(fetch(version), {"os": os}, "get_pp_indices", UTILS)
    for model, of in itertools.product((models.FLASH, models.PRO), (1, 2, 3, 4, 5, 8, 43)):
        for rank, stage in enumerate(found := model.of_stages(of)):
            first, end = deal(model.layers, rank, of)
            assert stage.ratios == model.ratios[first:end] and stage.layers == end - first
            assert stage.hash_layers == len(range(min(first, 3), min(end, 3)))
        assert sum(stage.tables for stage in found) == 2 and (of == 1 or found[0].tables == found[-1].tables == 1)


@every_release()
def test_what_this_release_does_with_the_sizes(version):
    """So many requests in a batch where nobody says it; no overlap of steps, by which the windows are sized; one number
    of tokens in all stages, by the least that is left on any card."""
    with zipfile.ZipFile(fetch(version)) as wheel:
        names = [n for n in wheel.namelist() if re.match(r"sglang/srt/(managers/scheduler|model_exec|mem_cache/kv)", n)]
        text = "\n".join(wheel.read(name).decode() for name in names if name.endswith(".py"))
        said = [n for n in wheel.namelist() if re.match(r"sglang/srt/(server_args|arg_groups/.*)\.py$", n)]
        arguments = "\n".join(wheel.read(name).decode() for name in said)
    for words in (OF_A_BATCH, LEFT, TOKENS):
        assert re.search(words, text, re.DOTALL), words
    assert re.search(NO_OVERLAP, arguments, re.DOTALL)


def test_the_order_of_layers_is_the_checkpoints():
    found = models.from_config(CONFIG, None)
    assert found.ratios == models.FLASH.ratios
    for model in (found, models.PRO, models.FLASH_0731):
        assert tuple((ratio, model.ratios.count(ratio)) for ratio in (0, 4, 128)) == model.kinds()
        assert len(model.ratios) == model.layers


# ---- memory


def test_the_stages_together_have_the_models_weights_and_caches():
    whole, sizes = models.FLASH, {"drafts": False, "wo_a_bf16": False}
    for of in (2, 3, 4):
        parts = whole.of_stages(of)
        together = sum(memory.weight_bytes(m, 1, **sizes) for m in parts)
        assert together == pytest.approx(memory.weight_bytes(whole, 1, **sizes))
        of_all, of_each = (
            [memory.pools(m, (0, 5, 23), requests=8, chunk=4096, drafts=0, overlaps=False) for m in ms]
            for ms in ([whole], parts)
        )
        for name in ("token_bytes", "window_bytes", "states"):
            assert sum(getattr(p, name) for p in of_each) == pytest.approx(getattr(of_all[0], name))


def test_the_fullest_stage_decides():
    """Of Flash the last of two: 22 of 43 layers, eleven with an index, and the head. One whose first is fuller: the
    weights that are there then, and the tokens of the other."""
    plan = launch.make(staged(2))
    first, last = models.FLASH.of_stages(2)
    assert (last.layers, last.layers_c4, last.layers_c128, last.layers_plain) == (22, 11, 11, 0)
    of_each = [launch._weights_of(plan.request, m, False) for m in (first, last)]
    assert plan.weights == of_each[1] > of_each[0]
    assert plan.weights == pytest.approx(80.3e9, rel=0.002)
    assert plan.pools.token_bytes == pytest.approx(585 / 4 * 11 + 864 / 128 * 11 + 33 * 11)
    turned = models.replace(models.FLASH, ratios=(4,) * 21 + (128,) * 20 + (0, 0), hash_layers=3)
    plan = launch.make(staged(2, model=turned))
    assert plan.pools.token_bytes == pytest.approx((585 / 4 + 33) * 21)  # the first: all have an index
    parts = turned.of_stages(2)
    assert plan.weights == max(launch._weights_of(plan.request, m, False) for m in parts)


def test_what_is_beside_the_pools_is_of_stages():
    """Streams that go between them; sums between the cards where a stage has several; a step's graphs for its share of
    the streams, the slots' table for all."""

    def reserved(plan):
        return {reserve.what: reserve.bytes for reserve in plan.reserves}

    two, tensors = launch.make(staged(2, concurrency=32)), launch.make(request(speculation=None, concurrency=32))
    both, four = launch.make(staged(2, gpus=4)), launch.make(staged(4))
    streams = "streams between stages"
    assert reserved(two)[streams] == 2 * two.chunk * 4 * 4096 * 2 and streams not in reserved(tensors)
    assert reserved(four)[streams] == 4 * four.chunk * 4 * 4096 * 2
    assert ["sums between the cards" in reserved(p) for p in (two, four, both, tensors)] == [False, False, True, True]
    graphs = memory.decode_graphs_bytes(models.FLASH, 1, 16, 16, two.request.context, True)
    assert reserved(two)["decode graphs"] == graphs
    assert flags(two)["--cuda-graph-max-bs-decode"] == "16" and flags(two)["--max-running-requests"] == "32"
    slots = reserved(two)["tables of the request slots"]
    assert slots >= 33 * two.request.context * 4


@pytest.mark.parametrize("sglang", ["0.5.13", "0.5.20", "0.5.21", "0.5.23"])
@pytest.mark.parametrize(("of", "gpus"), [(2, 2), (4, 4), (2, 4), (3, 3)])
def test_the_windows_have_room_for_a_chunk_in_each_stage(sglang, of, gpus):
    for streams, context in ((1, 524_288), (8, 393_216), (64, 131_072)):
        plan = launch.make(staged(of, gpus, sglang=sglang, concurrency=streams, context=context))
        assert plan.fits and plan.window_needed >= of * plan.chunk
        assert plan.pools.window(plan.tokens) >= plan.window_needed
        told = flags(plan).get("--swa-prefix-tails")
        assert told == (None if plan.prefix_tails is None else str(plan.prefix_tails))
    keeps_none = staged(of, gpus, sglang=sglang, concurrency=1, replaced=("wo_a",))
    tight = staged(of, gpus, sglang=sglang, concurrency=256, context=524_288)  # with no room for more prefixes
    for wanted, streams in ((keeps_none, 1), (tight, 256)):
        plan = launch._sized(wanted, 8192, 0, True)
        tails = 4 * streams + math.ceil((of - 1) * 8192 / 384) if sglang >= "0.5.21" else None
        assert plan.prefix_tails == plan.pools.prefix_tails == tails
        assert plan.pools.window_tokens is None or plan.pools.window_tokens >= plan.window_needed


# ---- what a user is told


@pytest.fixture
def looked_for(monkeypatch):
    """How many cards each start of `serve` looks for; it starts nothing."""
    found = []
    monkeypatch.setattr(serve, "_check_machine", lambda gpus, host, port: found.append(gpus))
    monkeypatch.setattr(serve, "supervise", lambda words, environ, url: 0)
    monkeypatch.setattr(serve, "taken", lambda plan: [])
    return found


@pytest.fixture
def told(capsys):
    """-> (exit status, what was said) of a command line."""

    def run(*words):
        status = main(list(words))
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("--gpus 2 --pp-size 2", "--tp-size 1 --pp-size 2 --pp-max-micro-batch-size 4"),
        ("--gpus 4 --pp-size 4", "--tp-size 1 --pp-size 4 --pp-max-micro-batch-size 2"),
        ("--gpus 4 --pp-size 2", "--tp-size 2 --pp-size 2 --pp-max-micro-batch-size 4"),
        ("--gpus 3 --pp-size 3 --concurrency 1", "--tp-size 1 --pp-size 3 --pp-max-micro-batch-size 1"),
        ("--gpus 2 --pp-size 2 --spec none --concurrency 9", "--tp-size 1 --pp-size 2 --pp-max-micro-batch-size 5"),
        ("--gpus 2 --spec none", "--tp-size 2"),
        ("--gpus 2 --spec none --pp-size 1", "--tp-size 2"),
    ],
)
def test_the_command_line_takes_the_cards_that_were_asked_for(asked, given, told):
    """And has nothing that is for tensors alone."""
    status, said = told("serve", *GIVEN, *asked.split(), "--dry-run")
    line = said.splitlines()[-1]
    assert status == 0 and f" {given} --trust-remote-code " in line and "card(s), the plan" not in said
    words = line.split()
    gpus = int(asked.split()[1])
    assert serve.cards_of(words[words.index("sglang.launch_server") + 1 :]) == gpus
    assert ("--pp-size" in line) is ("DSV4_SM120_SET=" not in line) and "--speculative" not in line
    status, said = told("plan", *GIVEN, *asked.split())
    assert status == 0 and said.count(f" {given} --trust-remote-code ") == 2  # as it is installed, and with Docker
    is_staged = "--pp-size 1" not in asked and "--pp-size" in asked
    notes = "1,609 ms, by tensors 2,257", "no speculation with stages"
    for words in (*notes, " stages, SGLang 0.5.23", "of the stage that"):
        assert (words in said) is is_staged, words


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("--gpus 2 --pp-size 2 --spec mtp", "--pp-size 2 with EAGLE with 1 draft a step: SGLang stops up to 0.5.20"),
        ("--gpus 2 --pp-size 2 --block 3", "what a drafter holds beside stages is not planned. Instead: --spec none"),
        ("--gpus 2 --pp-size 3", "--pp-size 3: each stage has as many cards, --gpus 2 is no multiple of it"),
        ("--gpus 1 --pp-size 2", "--pp-size 2: each stage has as many cards, --gpus 1 is no multiple of it"),
        ("--gpus 6 --pp-size 2", "--pp-size 2 of --gpus 6 are 3 cards a stage; Flash divides into [1, 2, 4, 8] ranks"),
        ("--gpus 2 --pp-size 0", "--pp-size must be 1 to 43 stages, of a layer each at least, got 0"),
        ("--gpus 64 --pp-size 64", "--pp-size must be 1 to 43 stages"),
        ("--gpus 2 --pp-size 2 --nodes 2", "--pp-size 2 with --nodes 2: stages in several hosts are not planned"),
        ("--gpus 2 --pp-size 2 --sglang 0.5.12", "SGLang 0.5.12 sizes each stage's pools for all layers; take 0.5.13"),
        ("--gpus 2 --pp-size 2 --experts fp8", "on a card with 100.9 GB for them. What would: 4 cards, or the FP4"),
    ],
)
def test_what_is_not_planned_is_refused_with_the_reason(asked, sentence, told):
    status, said = told("plan", *GIVEN, *asked.split())
    assert status != 0 and sentence in said


def test_layers_that_the_user_deals_are_not_planned(told, variables):
    variables(stages.PARTITION, "20,23")
    status, said = told("plan", *GIVEN, "--gpus", "2", "--pp-size", "2")
    assert status == 2 and f"{stages.PARTITION}: stages of other layers than an even share are not planned" in said
    assert told("plan", *GIVEN, "--gpus", "2")[0] == 0


@pytest.mark.parametrize("own", ["--pp-size 2", "--pp-size=2", "--pipeline-parallel-size 2", "--pp-s 2"])
def test_stages_behind_the_dashes_are_told_where_they_go(own, told):
    """Where they would stand beside a plan of tensors, whose cards they multiply."""
    before = ("serve", *GIVEN, "--gpus", "2", "--spec", "none", "--dry-run")
    status, said = told(*before, "--", *own.split())
    assert status == 2 and "--pp-size behind --" in said and "in front of it --gpus <all cards> --pp-size 2" in said
    assert told(*before, "--pp-size", "2", "--", *own.split())[0] == 0  # the same again
    assert told(*before, "--", "--pp-size", "1")[0] == 0
    assert told(*before, "--", "--pp-max-micro-batch-size", "2")[0] == 0


@pytest.mark.parametrize(
    ("asked", "own", "cards"),
    [
        ("--gpus 2", "--tp 4", 4),
        ("--gpus 2", "--tensor-parallel-size=4", 4),
        ("--gpus 2", "--tp-size 1", 1),
        ("--gpus 2", "--dp-size 2", 4),
        ("--gpus 2", "--dp-size 2 --enable-dp-attention", 2),
        ("--gpus 2", "--tp-size 2", 2),
        ("--gpus 4 --pp-size 2", "--tp-size 4", 8),
        ("--gpus 2 --pp-size 2", "--tp-size 1", 2),
    ],
)
def test_other_cards_than_the_plans_are_told_and_looked_for(asked, own, cards, told, looked_for):
    status, said = told("serve", *GIVEN, *asked.split(), "--spec", "none", "--", *own.split())
    gpus = int(asked.split()[1])
    sentence = f"your own arguments the server takes {cards} card(s), the plan is for {gpus}: its memory and flags are"
    assert status == 0 and looked_for == [cards] and (sentence in said) is (cards != gpus)


def test_a_file_of_arguments_is_told(told):
    words = ("serve", *GIVEN, "--gpus", "2", "--spec", "none", "--dry-run", "--")
    status, said = told(*words, "--config", "own.yaml")
    assert status == 0 and "--config: its file is not read here; stages, speculation" in said
    assert "not read here" not in told(*words, "--log-level", "debug")[1]


def test_several_hosts_have_their_own_cards_looked_for(told, looked_for):
    words = ("serve", *GIVEN, "--gpus", "2", "--nodes", "2", "--node-rank", "0", "--dist-init-addr", "10.0.0.1:20000")
    status, said = told(*words, "--spec", "none")
    assert status == 0 and looked_for == [2] and "the plan is for" not in said
    status, said = told(*words, "--spec", "none", "--", "--tp-size", "8")
    assert status == 0 and looked_for == [2, 4] and "takes 8 card(s), the plan is for 4" in said


@pytest.mark.parametrize(("slots", "share"), [("9", "5"), ("32", "16"), ("1", "1")])
def test_slots_of_the_user_have_batches_and_graphs_of_stages(slots, share, told):
    words = ("serve", *GIVEN, "--gpus", "2", "--spec", "none", "--dry-run")
    _, said = told(*words, "--pp-size", "2", "--", "--max-running-requests", slots)
    assert f"--pp-max-micro-batch-size {share} " in said and f"--cuda-graph-max-bs-decode {share} " in said
    _, said = told(*words, "--", "--max-running-requests", slots)
    assert f"--cuda-graph-max-bs-decode {slots} " in said and "--pp-max" not in said


# ---- choices


@pytest.mark.parametrize(("of", "gpus"), [(2, 2), (4, 4), (2, 4)])
@pytest.mark.parametrize("sglang", ["0.5.17", "0.5.23"])
def test_nothing_is_chosen_that_is_for_tensors_alone(of, gpus, sglang):
    tensors = launch.make(request(gpus=gpus, speculation=None, sglang=sglang, concurrency=1))
    plan = launch.make(staged(of, gpus, sglang=sglang, concurrency=1))
    assert {name.partition("=")[0] for name, _ in choices.of(tensors, None)} & set(choices.OF_TENSORS)
    assert choices.of(plan, None) == [] and plan.captured == 0 and not plan.halves
    assert plan.request.halved(8192) == (0, 0) and launch.make(request(gpus=gpus, stages=1)).captured > 0


def test_what_a_user_chooses_in_vain_is_told_and_the_rest_is_kept(told, variables):
    asked = ["dealt_products=on", "dealt_streams=on", "prefill_graphs=on", "prompts_in_halves=2048", "reproducible=on"]
    variables("DSV4_SM120_SET", ",".join(asked))
    status, said = told("plan", *GIVEN, "--gpus", "2", "--pp-size", "2")
    assert status == 0
    for name in asked[:4]:
        assert f"DSV4_SM120_SET: {name.partition('=')[0]} does nothing here: not with stages (--pp-size)" in said
    assert "reproducible does nothing" not in said and choices.NOT_REPRODUCIBLE not in said
    assert "not with stages" not in told("plan", *GIVEN, "--gpus", "2", "--spec", "none")[1]


def test_sums_of_more_cards_than_have_one_order_are_those_of_a_stage():
    but = tuple(op for op in request().replaced if op != "all_reduce")
    four = {"replaced": but, "also_set": {"reproducible": "on"}}
    assert any("all_reduce" in text for text in choices.in_vain(request(gpus=4, speculation=None, **four)))
    assert not choices.in_vain(staged(2, 4, **four))
    notes = [*launch.make(staged(4, replaced=but)).notes, *launch.make(staged(4, concurrency=4096, context=1024)).notes]
    assert not any("PCIE_IPC" in note or "will be NCCL's" in note for note in notes)


def test_a_request_by_hand_is_checked_as_one_by_words():
    with pytest.raises(CommandError, match="with EAGLE"):
        launch.make(staged(2, speculation=MTP))


def test_more_cards_are_more_of_each_stage():
    wanted = staged(2, model=models.find("flash", "fp8"), sglang="0.5.23")
    assert not launch.make(wanted).fits and "4 cards" in remedies(wanted)


def test_a_step_goes_through_all_stages_with_its_share_of_the_streams():
    """By bytes: of one stream twice the weights of tensors on two cards; nothing is summed with one card a stage."""
    one, many = command.speed_rows(launch.make(staged(2, concurrency=8)))
    tensors = command.speed_rows(launch.make(request(speculation=None)))[0]
    assert 1.5 < float(one[2]) / float(tensors[2]) < 2.0 and one[4:] == ("-", "nobody")
    assert float(many[1].split()[0]) == pytest.approx(8 / float(many[2]) * 1e3, rel=0.01)
    assert many[1].split()[0] == many[3]  # by NCCL the same
    sizes = models.FLASH, 1, 4, command.roofline.CONTEXT
    assert float(many[2]) == pytest.approx(1e3 * command.roofline.step_seconds(*sizes, wo_a_bf16=False), abs=0.01)
    of_four = command.speed_rows(launch.make(request(speculation=None, concurrency=4, gpus=1, memory_mib=1 << 18)))
    assert of_four == []


def test_sums_that_calibrate_measured_are_those_of_a_stages_cards(told, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "_sums", lambda measured, cards: asked.append(cards) or {})
    for words in ("--gpus 4 --pp-size 2", "--gpus 4 --pp-size 4", "--gpus 4 --spec none"):
        assert told("plan", *GIVEN, *words.split())[0] == 0
    assert asked == [2, 1, 4]


# ---- doctor


def test_doctor_counts_the_states_of_a_stage():
    def told_of(**more):
        info = {"version": "0.5.23", "model_path": "deepseek-v4-flash", "max_running_requests": 256, **more}
        (found,) = server._memory(server.Answers(info, None))
        return float(re.search(r"take ([\d.]+) GB", found.cost)[1])

    whole = told_of()
    assert told_of(pp_size=2) == pytest.approx(whole * 11 / 20, abs=0.1)
    assert told_of(pp_size=-3) == told_of(pp_size=10**9) == told_of(pp_size="2") == whole


WRITES = {"token_usage": 0.2, "prompt_tokens_total": 100_000.0, "cached_tokens_total": 50_000.0}


@pytest.mark.parametrize(
    ("more", "metrics", "said"),
    [
        ({}, {"generation_tokens_total": 2_501.0}, "2, and 20.0 new tokens of prompts for each that is written"),
        ({}, {"generation_tokens_total": 100_000.0, "cached_tokens_total": 2e5}, "2, and 0.0 new tokens"),
        ({}, {"generation_tokens_total": 2_500.0}, None),
        ({}, {"generation_tokens_total": 0.0}, None),
        ({}, {}, None),
        ({"pp_size": 1}, {"generation_tokens_total": 1e5}, None),
    ],
)
def test_doctor_names_stages_where_text_is_written(more, metrics, said):
    info = {"version": "0.5.23", "model_path": "deepseek-v4-flash", "tp_size": 2, "pp_size": 2, **more}
    answers = server.Answers(info, WRITES | metrics)
    found = [finding for finding in load_checks.checks(answers) if finding.check == "stages"]
    assert [finding.found.startswith(said) for finding in found] == ([] if said is None else [True])
    assert all(f.state == "WARN" and f.fix.startswith("--tp-size 4 in place of --pp-size 2") for f in found)


def test_tokens_that_are_written_are_those_of_all_labels():
    text = (
        'sglang:generation_tokens_total{is_streaming="False"} 3\nsglang:generation_tokens_total{is_streaming="True"} 4'
    )
    assert server.read_metrics(text) == {"generation_tokens_total": 7.0}
