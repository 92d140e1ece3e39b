"""What `plan` makes of prefill graphs: their memory, where they serve, what they may cost, and the user's own word."""

import pytest
import torch

from deepseek_v4_sm120.commands import speculation
from deepseek_v4_sm120.commands.plan import command, launch, memory, models
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.adapters import prefill_graphs
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, since
from tests.test_plan import MTP, arguments, request

DEALT = ",dealt_products=on"  # on two cards


def planned_graphs(**changes):
    """(plan, rows in graphs at most, their bytes, what DSV4_SM120_SET says)"""
    plan = launch.make(request(**({"speculation": None} | changes)))
    reserved = {r.what: r.bytes for r in plan.reserves}.get("prefill graphs")
    return plan, plan.captured, reserved, {f.name: f.value for f in plan.environment}.get("DSV4_SM120_SET")


def test_what_prefill_graphs_hold_is_what_sglang_said_that_it_captured():
    """Two H200, 0.5.17, TP2, 43 layers, context 32,768: 3.31 and 3.36 GiB, and 10 to 20 MiB from a size to the next."""
    several, one = (128, 256, 512, 1024, 8192), (8192,)
    sizes = [memory.prefill_graphs_bytes(models.FLASH, 2, captured, 32_768, True) for captured in (several, one)]
    assert sizes[0] / memory.GIB == pytest.approx(3.335, rel=0.05)
    four = memory.prefill_graphs_bytes(models.FLASH, 4, several, 32_768, True)
    assert four / memory.GIB == pytest.approx(2.91, rel=0.05)  # four H100, 0.5.23, TP4
    assert 4 * (10 << 20) < sizes[0] - sizes[1] < 4 * (24 << 20)
    usual = prefill_graphs.captured_rows(CAPTURED_ROWS)
    by_context = [memory.prefill_graphs_bytes(models.FLASH, 2, usual, 1 << n, True) for n in (15, 20)]
    rows, widths = sum(usual), [(1 << n) * 4 * (1 / 256 + 1 / 128) for n in (15, 20)]
    assert by_context[1] - by_context[0] == pytest.approx(rows * (widths[1] - widths[0]), rel=0.01)


def test_a_pass_has_a_line_of_page_table_and_lists_for_each_row_and_halves_have_theirs_beside_it():
    """At a million tokens 0.4 GB of a chunk of 8,192 rows, and as much again where it goes in halves."""
    assert memory.row_tables_bytes(10, 8192) == 10 * 4 * (32 + 64)
    sizes = {"tp": 4, "context": 1 << 20, "chunk": 8192, "rows": 1}
    table, lists = 8192 * 4096 * 4, 8192 * 8192 * 4

    def held(**more):
        return next(r.bytes for r in memory.reserves(models.FLASH, **sizes, **more) if "page table" in r.what)

    assert held() == held(halved=(8193, 0)) == table + lists
    assert held(halved=(4096, 0)) == held(halved=(8192, 0)) == 2 * (table + lists)
    captured = (1024, 4096, 8192)
    whole, one, both = (
        memory.prefill_graphs_bytes(models.FLASH, 4, captured, 1 << 20, True, rows) for rows in (0, 4097, 4096)
    )
    assert one - whole == table + lists and both - whole == 1.5 * (table + lists)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.22", "0.5.23"])
def test_sglangs_page_table_has_a_line_for_each_row(version):
    folder, name = "sglang/kernels/ops/attention", "attn_metadata_kernels.py"
    path = f"{folder}/dsv4/{name}" if version == "0.5.23" else f"{folder}/dsv4_{name}"
    names = {"torch": torch, "PageTablePositionsResult": lambda **made: made}
    module = path.removesuffix(".py").replace("/", ".")
    build = take(fetch(version), names, "build_page_table_positions", module)
    rows, context = 24, 8192
    made = build(
        req_to_token=torch.zeros(2, context, dtype=torch.int32),
        req_pool_indices_repeated=torch.tensor([0, 1]).repeat_interleave(rows // 2),
        seq_lens_casual=torch.arange(1, rows + 1),
        max_seq_len=context,
        page_size=memory.PAGE_TOKENS,
        swa_window=128,
    )
    table = made["page_table"]
    assert table.nbytes + memory.c128_list_bytes(rows, context) == memory.row_tables_bytes(rows, context)


@pytest.mark.parametrize(
    ("changes", "captured", "halved"),
    [
        ({}, 8192, (4096, 4096)),
        ({}, 1024, (4096, 0)),  # tried out by a server, in no graph
        ({"sglang": "0.5.22"}, 8192, (0, 0)),
        ({"sglang": "0.5.22", "also_set": {"prompts_in_halves": "on"}}, 8192, (4096, 0)),
        ({"also_set": {"prompts_in_halves": "on"}}, 8192, (4096, 0)),
        ({"also_set": {"prompts_in_halves": "1024"}}, 2048, (2048, 2048)),
        ({"also_set": {"prompts_in_halves": "1024"}, "sglang": "0.5.22"}, 2048, (2048, 0)),
        ({"also_set": {"prompts_in_halves": "off"}}, 8192, (0, 0)),
        ({"also_set": {"prompts_in_halves": "on"}, "sglang": "0.5.13"}, 8192, (0, 0)),
        ({"prefill_graphs": 8192}, 8192, (4096, 0)),  # the user's own, with which a plan sets no halves
        ({"also_set": {"dealt_streams": "on"}}, 8192, (0, 0)),
        ({"also_set": {"reproducible": "on"}}, 8192, (4096, 4096)),
        ({"also_set": {"reproducible": "on"}, "gpus": 4}, 8192, (0, 0)),
        ({"shadow": "1"}, 8192, (0, 0)),
        ({"off": True}, 8192, (0, 0)),
        ({"gpus": 1}, 8192, (0, 0)),
    ],
)
def test_which_passes_go_in_halves(changes, captured, halved):
    asked = request(**({"speculation": None, "gpus": 2, "sglang": "0.5.23"} | changes))
    assert asked.halved(captured) == halved


def test_a_plan_in_halves_keeps_their_tables_free():
    """Two cards, one stream, chunks of 8,192: a plan with halves has both, and no longer says less than they take."""
    plan, rows, held, said = planned_graphs(concurrency=1, context=393_216)
    assert plan.halves and "prompts_in_halves=2048" in said
    of = {r.what: r.bytes for r in plan.reserves}
    tables = memory.row_tables_bytes(8192, 393_216)
    assert of["page table and C128 lists of a prefill chunk"] == 2 * tables
    sizes = prefill_graphs.captured_rows(rows)
    assert held == memory.prefill_graphs_bytes(models.FLASH, 2, sizes, 393_216, True, 4096)
    assert held - memory.prefill_graphs_bytes(models.FLASH, 2, sizes, 393_216, True) > 2 * tables


def test_prefill_graphs_are_planned_where_they_serve_and_their_memory_is_kept_free():
    plan, rows, held, said = planned_graphs()
    assert (rows, said) == (1024, f"prefill_graphs=on{DEALT}") and 0.9e9 < held < 1.3e9
    assert plan.fits and not plan.is_tight and plan.left_free > plan.off_by > held * memory.ESTIMATE_OFF_BY
    assert any("68 ms for 173" in flag.reason for flag in plan.environment)
    plan, rows, held, said = planned_graphs(speculation=MTP)
    assert (
        (rows, said) == (1024, f"prefill_graphs=on{DEALT}") and 0.9e9 < held < 1.3e9 and plan.fits and not plan.is_tight
    )
    assert any("107 ms for 206" in flag.reason for flag in plan.environment)
    for changes in (
        {"speculation": MTP, "sglang": "0.5.22"},
        {"speculation": MTP, "prefill_graphs": 1024, "sglang": "0.5.22"},
        {"replaced": ("sparse_decode",), "context": 8192},
        {"sglang": "0.5.16"},
        {"prefill_graphs": 0},
        {"shadow": "1", "sglang": "0.5.20", "gpus": 8},  # which compares padded rows; there they may hold anything
    ):
        plan, rows, held, said = planned_graphs(**changes)
        assert (rows, held) == (0, None)
        asked = bool(changes.get("prefill_graphs"))
        assert ("prefill_graphs=on" in (said or "")) == asked  # the user's word, repeated
        assert any("prefill_graphs does nothing here" in note for note in plan.notes) == asked
        assert not any("has no room" in note for note in plan.notes)
    assert planned_graphs(shadow="1", sglang="0.5.21", gpus=8)[1] > 0
    assert planned_graphs(shadow="1", sglang="0.5.20", gpus=8, prefill_graphs=1024)[1] == 1024, "the user's word stands"


def test_the_memory_of_prefill_graphs_is_kept_beside_drafts():
    """0.5.23 captures them beside the model's own drafts, so their memory must be free."""
    tight = {"speculation": MTP, "context": 131_072, "concurrency": 64, "sglang": "0.5.23"}
    plans = [planned_graphs(**tight, prefill_graphs=rows) for rows in (0, 1024)]
    assert [rows for _, rows, _, _ in plans] == [0, 1024] and plans[1][3] == "prefill_graphs=on"
    assert plans[1][2] > 0.9e9 and plans[1][0].tokens < plans[0][0].tokens
    assert plans[1][0].left_free > 0
    dspark = {"speculation": speculation.Speculation(speculation.DSPARK, 4), "model": models.FLASH_0731}
    assert planned_graphs(**tight | dspark, prefill_graphs=1024)[1] == 0


def test_prefill_graphs_cost_no_fraction_where_there_is_room_and_no_plan():
    """On the README's cards; a card on which only a plan without them fits gets that, and a note. Where they cost
    capacity, it is more than twice what the stream holds at full length."""
    for gpus, model in ((2, models.FLASH), (4, models.find("flash", "fp8"))):
        with_graphs, without = (planned_graphs(gpus=gpus, model=model, prefill_graphs=rows)[0] for rows in (None, 0))
        assert with_graphs.captured == 1024 and with_graphs.fraction == without.fraction == memory.MOST_FRACTION
    seen = set()
    for tenths in range(840, 960, 2):
        plan, rows, _, _ = planned_graphs(memory_mib=int(tenths / 10 * launch.REPORTED_PER_GB), concurrency=1)
        left_out = planned_graphs(memory_mib=plan.request.memory_mib, concurrency=1, prefill_graphs=0)[0]
        enough = min(0.9 * left_out.tokens, 2 * plan.request.context)
        assert plan.fits == left_out.fits and plan.tokens >= min(left_out.tokens, enough)
        assert any("has no room" in note for note in plan.notes) is not bool(rows)
        seen.add(bool(rows))
    assert seen == {True, False}


def test_one_stream_gives_spare_capacity_for_prefill_graphs():
    """A request of 131,072 tokens, on two cards that hold 14 of them with their windows: the graphs of whole chunks in
    halves, and what is left; or those that are usual, where the user says that nothing goes in halves."""
    given = {"speculation": MTP, "context": 131_072, "concurrency": 1, "sglang": "0.5.23"}
    (plan, rows, _, said), (left_out, *_) = (planned_graphs(**given, prefill_graphs=word) for word in (None, 0))
    assert (rows, said) == (
        8192,
        f"draft_head=on,prefill_graphs=8192,prompts_in_halves=2048{DEALT}",
    ) and plan.chunk == 8192
    assert 2 * 131_072 <= plan.tokens < left_out.tokens
    whole, rows, _, said = planned_graphs(**given, also_set={"prompts_in_halves": "off"})
    assert (rows, said) == (2048, f"draft_head=on,prompts_in_halves=off,prefill_graphs=2048{DEALT}")
    assert max(13 * 131_072, plan.tokens) < whole.tokens <= left_out.tokens
    assert plan.left_free > plan.off_by and not any("has no room" in note for note in plan.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"also_set": {"reproducible": "on"}},
        {"also_set": {"dealt_streams": "on"}},
        {"also_set": {"dealt_streams": "4096"}},
        {"shadow": "1"},
    ],
    ids=str,
)
def test_nothing_is_given_for_halves_where_passes_go_whole(changes):
    """What keeps all of a server's passes whole (prompts_in_halves.why_not_here): graphs of whole chunks would take
    their memory, and gain nothing."""
    given = {"gpus": 4, "context": 32_768, "concurrency": 1, "sglang": "0.5.23"}
    for off in ({}, {"dealt_streams": "off"}, {"dealt_streams": "0"}):
        assert planned_graphs(**given, also_set=off)[0].halves
    plan, rows, _, said = planned_graphs(**given | changes)
    assert plan.fits and not plan.halves and rows == 4096 and "prompts_in_halves" not in said
    two = planned_graphs(**given | {"gpus": 2} | changes)[0]
    assert two.halves is (changes == {"also_set": {"reproducible": "on"}}), "whose two terms have one order"


def test_nothing_goes_in_halves_without_sums_graphs_or_where_the_user_has_said_how_it_goes():
    """Which would be reckoned with graphs of whole chunks."""
    given = {"gpus": 4, "context": 32_768, "concurrency": 1, "sglang": "0.5.23"}
    dspark = {"speculation": speculation.Speculation(speculation.DSPARK, 4), "model": models.FLASH_0731}
    for changes, expected in (
        ({}, (8192, True)),
        ({"gpus": 1, "memory_mib": 500_000}, (1024, False)),
        (dspark, (0, False)),
        ({"prefill_graphs": 8192}, (8192, False)),
        ({"also_set": {"prompts_in_halves": "on"}}, (4096, False)),
    ):
        plan, rows, *_ = planned_graphs(**given | changes)
        assert plan.fits and (rows, plan.halves) == expected


@pytest.mark.parametrize(
    ("gpus", "rows", "seen"), [(2, 2048, "two H200"), (4, 4096, "four H100"), (8, 4096, "four H100")]
)
def test_cards_that_share_a_pass_capture_more_rows_of_it_where_nobody_misses_the_room(gpus, rows, seen):
    """The host takes as long for a pass on one card as on four, which have a quarter of its work each."""
    few = {"gpus": gpus, "context": 131_072, "concurrency": 2, "sglang": "0.5.23"}
    plan, captured, held, said = planned_graphs(**few)
    halves, dealt = ",prompts_in_halves=2048" if rows >= 4096 else "", DEALT if gpus == 2 else ""
    assert (captured, said) == (rows, f"prefill_graphs={rows}{halves}{dealt}") and captured <= plan.chunk
    older, captured, _, said = planned_graphs(**few | {"sglang": "0.5.22"})
    assert (captured, said) == (rows, f"prefill_graphs={rows}{dealt}"), "in graphs from 0.5.23 on"
    assert held > planned_graphs(**few, prefill_graphs=1024)[2] and plan.tokens >= 2 * 2 * 131_072
    assert any(seen in flag.reason for flag in plan.environment)
    many = few | {"concurrency": 64, "context": 1 << 20}
    assert planned_graphs(**many)[1] in (0, 1024)


def test_the_users_own_word_on_prefill_graphs_stands(monkeypatch):
    def asked(choice, **given):
        monkeypatch.setattr(command, "settings", lambda: Settings(choices=choice))
        found = command.request_of(arguments(sglang="0.5.17", spec="none", **given))
        plan = launch.make(found)
        return plan.captured, {f.name: f.value for f in plan.environment}["DSV4_SM120_SET"]

    interval = next(word for word in asked({})[1].split(",") if word.startswith("prefill_decode"))
    assert asked({}) == (1024, f"{interval},prefill_graphs=on{DEALT}")
    assert asked({"prefill_graphs": "off"}) == (0, f"{interval},prefill_graphs=off{DEALT}")
    assert asked({"prefill_graphs": "2048"}) == (2048, f"{interval},prefill_graphs=2048{DEALT}")
    larger = planned_graphs(prefill_graphs=8192, concurrency=8)
    assert larger[0].chunk <= 4096 and larger[1] == 8192, "SGLang captures as much, whatever the chunk"
    assert asked({"prefill_graphs": "on", "mhc": "off"}) == (1024, f"mhc=off,{interval},prefill_graphs=on{DEALT}")


# ---- what is allocated when the pools have their size


@pytest.mark.parametrize(("gpus", "drafter"), [(2, 1.82e9), (4, 0.93e9)])
def test_a_drafter_that_sglang_loads_behind_the_pools_is_kept_free(gpus, drafter):
    """0.5.12 and 0.5.13 size the pools by what is free without it, and load it from what is left."""

    def planned(sglang, **changes):
        made = launch.make(request(gpus=gpus, sglang=sglang, context=65_536, **changes))
        return made, {r.what: r.bytes for r in made.reserves}.get("drafter, loaded behind the pools")

    head_and_embedding = 4 * 129_280 * 4096 / gpus
    before, held = planned("0.5.13")
    after, none = planned("0.5.14")
    alone, nothing = planned("0.5.13", speculation=None)
    assert held == pytest.approx(drafter + head_and_embedding, rel=0.01) and none is nothing is None
    assert before.weights == alone.weights == pytest.approx(after.weights - drafter, rel=0.001)
    assert before.fits and before.left_free > before.off_by
    _, in_shadow = planned("0.5.13", shadow="1", replaced=("wo_a",))
    assert in_shadow > held  # wo_a of the drafter's layer in bf16 beside its E4M3


@every_release("0.5.12")
def test_which_releases_load_the_drafter_behind_the_pools(version):
    text = content(fetch(version), "sglang/srt/managers/scheduler.py")
    start = text.index("def init_model_worker(self)")
    asked = text[start : text.index("\n    def ", start)]
    drafter = asked.index("self.maybe_init_draft_worker()")
    assert ("self.init_memory_pools()" in asked[drafter:]) is since(
        version, ".".join(map(str, memory.DRAFTER_FIRST_SINCE))
    )


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_drafters_own_embedding_and_head_leave_the_pools_less_and_then_are_free(gpus):
    """From 0.5.14 on they are there when the pools are sized: 1.06 GB at two cards."""
    own, dspark = 4 * 129_280 * 4096 / gpus, speculation.Speculation(speculation.DSPARK, 4)
    for sglang, changes, held in (
        ("0.5.13", {}, 0),
        ("0.5.14", {}, own),
        ("0.5.23", {}, own),
        ("0.5.23", {"speculation": None}, 0),
        ("0.5.23", {"speculation": dspark, "model": models.FLASH_0731}, 0),  # which is given the model's
    ):
        plan = launch.make(request(gpus=gpus, sglang=sglang, context=65_536, **changes))
        assert plan.given_back == held == plan.static_bytes - plan.weights - plan.pool_bytes
        assert plan.tokens == plan.pools.tokens(plan.pool_bytes) and not plan.is_tight
        claimed = plan.weights + plan.pool_bytes + sum(r.bytes for r in plan.reserves)
        assert plan.left_free == pytest.approx(plan.free_bytes - claimed, abs=1024)


@every_release("0.5.14")
def test_which_drafters_have_their_own_embedding_and_head_while_the_pools_are_sized(version):
    """The MTP block, whose worker shares them behind its pools; not DSPARK's, which has none."""
    block = content(fetch(version), "sglang/srt/models/deepseek_v4_nextn.py")
    assert "self.embed_tokens = VocabParallelEmbedding(" in block and "self.lm_head = ParallelLMHead(" in block
    worker = content(fetch(version), "sglang/srt/speculative/eagle_worker_v2.py")
    start = worker.index("def alloc_memory_pool(")
    sharing = worker[start : worker.index("\n    def ", start)]
    assert sharing.index("self.draft_worker.alloc_memory_pool(") < sharing.index("self.init_lm_head()")
    if since(version, "0.5.16"):
        dspark = content(fetch(version), "sglang/srt/models/deepseek_v4_dspark.py")
        assert "self.embed_tokens: Optional[nn.Module] = None" in dspark
