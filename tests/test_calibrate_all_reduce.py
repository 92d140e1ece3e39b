"""calibrate's sums between cards without a card: who is asked, the ranks' processes, what a profile says of them."""

import json
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.commands.calibrate import command, worker
from deepseek_v4_sm120.commands.workers import MARK
from deepseek_v4_sm120.ops.all_reduce_probe import Verdict, Way
from deepseek_v4_sm120.reference.all_reduce import all_reduce as reference
from deepseek_v4_sm120.specs import all_reduce as spec
from deepseek_v4_sm120.specs.provider import OURS, STOCK
from tests.ops import all_reduce_emulated as emulated

SHAPES = {"tp": 2, "context": 131_072, "concurrency": 8, "quick": True}

# a process of a card: the emulated operator, a gloo group for NCCL's, the probe's answer given
RANK = """
import sys
sys.path[:0] = [{repo!r}]
import torch
torch.set_num_threads(1)
from tests.ops import all_reduce_emulated as emulated
emulated.stand_in({library!r})
emulated.child.microseconds = lambda call, x, gather, capture=None: 10.0 * x.shape[0] + torch.distributed.get_rank()
from deepseek_v4_sm120.ops import all_reduce_probe as probe
from deepseek_v4_sm120.specs import all_reduce_ranks as ranks
probe.probe = lambda rank, *_, **__: probe.Verdict(2, "host", {{"host": probe.Way(None, {{1: 9.0}})}}, 0.1)
torch.distributed.new_group = lambda backend: torch.distributed.group.WORLD
{more}
sys.exit(ranks.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def library():
    return emulated.library()


@pytest.fixture
def cards(library, torch_python, monkeypatch):
    """cards(more): from here on ranks are processes of the script, with these lines more."""

    def prepare(more=""):
        script = RANK.format(repo=str(emulated.REPO), library=str(library), more=more)
        monkeypatch.setattr(spec, "RANK_PROGRAM", (*torch_python(), "-c", script))
        monkeypatch.setattr(spec, "START_S", 400.0)
        monkeypatch.setattr(spec, "CASE_S", 400.0)

    yield prepare
    for one in spec._together.values():
        one.end()
    spec._together.clear()


def test_the_shapes_of_a_step():
    cases = spec.cases(**SHAPES | {"tp": 4, "quick": False})
    assert [case.rows for case in cases] == [1, 8, 16, 32, 64] and {case.calls for case in cases} == {87}
    assert spec.cases(**SHAPES | {"concurrency": 2000})[-1].rows == 512
    assert cases[0].name == "4 cards, 1 rows" and cases[0].bytes_per_call == 4 * 8192


@pytest.mark.parametrize(
    ("tp", "cards_there", "why"), [(2, 2, None), (4, 8, None), (4, 2, "needs 4"), (1, 4, "one card")]
)
def test_a_machine_with_fewer_cards_has_nothing_to_measure(tp, cards_there, why):
    names, not_here = command.asked_here(["mhc", "all_reduce"], SHAPES | {"tp": tp}, cards_there)
    assert names == (["mhc"] if why else ["mhc", "all_reduce"])
    assert why is None and not_here == {} or why in not_here["all_reduce"]


def test_terms_do_not_depend_on_the_card(monkeypatch):
    drawn, generator = [], torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: drawn.append(device) or generator("cpu"))
    inputs = spec.correctness_inputs(spec.Case(8, 4), device="meta")
    assert {term.device.type for terms in inputs for term in terms} == {"meta"} and set(drawn) == {"cpu"}


def test_sums_are_judged_by_their_bits():
    case = spec.Case(8, 4)
    for terms in spec.correctness_inputs(case, device="cpu"):
        right = reference(terms)
        assert spec.error(OURS, right, terms) == 0.0 <= spec.max_error(OURS, case)
        rounded = terms[0]
        for term in terms[1:]:
            rounded = rounded + term  # to bf16 at every hop
        assert spec.max_error(OURS, case) < spec.error(OURS, rounded, terms) == float("inf")
        assert 0 < spec.error(spec.NCCL, rounded, terms) <= spec.max_error(spec.NCCL, case)
        assert spec.error(STOCK, terms[0], terms) > spec.max_error(STOCK, case)
    hard = spec.make_terms(4, 9, 0, hard=True)
    assert spec.differing(reference(hard), hard) == 0 and reference(hard).isnan().any() and hard[0].isinf().any()


@pytest.mark.parametrize("provider", [OURS, spec.NCCL])
def test_the_ranks_processes_check_and_time_together(provider, cards):
    cards()
    for rows in (1, 8):
        error, us, how = spec.measure(provider, spec.Case(rows, 2))
        assert us == 10.0 * rows + 1 and how == "graph"  # the slower rank's
        assert error == 0.0 if provider == OURS else error <= spec.max_error(provider, spec.Case(rows, 2))
    found = spec.found(provider)
    assert (found is None) if provider != OURS else found["transport"] == "host" and "9.0 us (1 row)" in found["text"]


WRONG = """
real = emulated.extension.load().all_reduce
def all_reduce(**arguments):
    real(**arguments)
    if arguments["rank"] == 1:
        emulated.ctypes.memset(arguments["out"], 0x11, 4)
emulated.extension.load().all_reduce = all_reduce
"""


def test_wrong_bits_on_one_rank_are_the_cases(cards):
    cards(WRONG)
    error, _, _ = spec.measure(OURS, spec.Case(8, 2))
    assert error == float("inf")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("import os; os._exit(5) if sys.argv[1] == '1' else None", "rank 1: its probe ended: exit status 5"),
        (
            "def no(*_, **__): raise RuntimeError('no memory')\nranks.measured = no",
            "rank [01]: RuntimeError: no memory",
        ),
        (
            "lost = dict.fromkeys(probe.TRANSPORTS, probe.Way('lost'))\n"
            "probe.probe = lambda *_, **__: probe.Verdict(2, None, lost, 1)",
            "RuntimeError: the sums between the cards are NCCL's; by way of each other's memory: lost",
        ),
    ],
    ids=["a rank dies", "a rank fails", "no way works"],
)
def test_a_rank_that_is_lost_ends_the_job_with_its_reason(more, words, cards):
    cards(more)
    with pytest.raises(RuntimeError, match=words):
        spec.measure(OURS, spec.Case(1, 2))


def test_a_rank_that_hangs_is_ended(cards, monkeypatch):
    cards("import time; time.sleep(600) if sys.argv[1] == '1' else None")
    monkeypatch.setattr(spec, "START_S", 1.0)
    with pytest.raises(RuntimeError, match="rank [01] said nothing for 1 s"):
        spec.measure(OURS, spec.Case(1, 2))


def test_the_next_job_ends_the_processes_of_the_last(monkeypatch):
    ended = []
    made = [
        SimpleNamespace(ask=lambda case, us=us: (0.0, us), end=lambda us=us: ended.append(us), found=None)
        for us in (1.0, 2.0)
    ]
    monkeypatch.setattr(spec, "Together", lambda provider, ranks: made.pop(0))
    monkeypatch.setattr(spec, "_together", {})
    assert spec.measure(OURS, spec.Case(1, 2))[1] == spec.measure(OURS, spec.Case(8, 2))[1] == 1.0
    assert spec.measure(STOCK, spec.Case(8, 2))[1] == 2.0 and ended == [1.0]


def test_what_a_worker_says_of_it(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(spec, "our_problem", lambda: None)
    monkeypatch.setattr(spec, "measure", lambda provider, case: (0.0 if case.rows == 1 else float("inf"), 5.0, "graph"))
    monkeypatch.setattr(spec, "found", lambda provider: {"text": "by way of"})
    providers = spec.providers()
    monkeypatch.setattr(spec, "providers", lambda: [one for one in providers if one.name != STOCK])
    worker.run_job("all_reduce", spec.NCCL, SHAPES)
    lines = [line.removeprefix(MARK) for line in capsys.readouterr().out.splitlines() if MARK in line]
    assert [json.loads(line) for line in lines] == [
        {"case": "2 cards, 1 rows", "error": 0.0, "us": 5.0, "how": "graph", "point": "1 rows", "calls": 87},
        {"case": "2 cards, 8 rows", "error": None, "allowed": 0.01},
        {"found": {"text": "by way of"}},
    ]


def test_the_probes_table_is_shown_and_kept(capsys, tmp_path):
    pings = [{"from": a, "to": 1 - a, "rows": rows, "us": 2.0 + rows} for a in (0, 1) for rows in (1, 8, 64)]
    way = Way(None, {1: 4.5, 8: 5.0}, tuple(pings))
    verdict = Verdict(2, "peer", {"peer": way, "host": Way("rank 1: refused")}, 2.5)
    job = command.Job("all_reduce", OURS, ("2 cards, 1 rows",), 8)
    cases = [{"case": "2 cards, 1 rows", "error": 0.0, "us": 4.6, "how": "graph", "point": "1 rows", "calls": 87}]
    result = command.as_result(job, command.Answers(cases, found=json.loads(json.dumps(verdict.as_dict()))), None)
    operators = {"all_reduce": command.decide("all_reduce", {OURS: result})}
    found = command.as_profile(operators, "a card", SHAPES) | {"not_reached": [], "not_here": {"mhc": "no reason"}}
    command.show(found)
    text = capsys.readouterr().out
    assert "2 cards sum by way of each other's memory: 4.5 us (1 row)" in text and "rank 1: refused" in text
    assert "66.0" in text and "mhc: no reason, so the shipped default holds" in text
    assert found["operators"]["all_reduce"]["winner"] == OURS
