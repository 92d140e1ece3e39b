"""The table's settings: who decides, what is written, what children inherit. No SGLang here."""

import functools
import json
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.__main__ import _default_rows
from deepseek_v4_sm120.patching.spec import VALUE, Default
from deepseek_v4_sm120.patching.steering import HANDOVER, NOT_APPLICABLE, OFF, ON, USER, Steering
from deepseek_v4_sm120.settings import Settings, read_choices, read_settings
from deepseek_v4_sm120.sglang_patches.adapters import scheduling
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS, DECODE_STEPS_BETWEEN_CHUNKS, DEFAULTS
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.patching.test_table import status

ROWS = (
    Default(name="safe", why="w", source="s", sglang="a", on=True, how="h", environment={"STOCK_A": "0"}),
    Default(name="risky", why="w", source="s", sglang="a", on=False, how="h", environment={"STOCK_B": "1"}),
    Default(name="count", why="w", source="s", sglang="a", on=True, how="h", arguments={"steps": VALUE}, value=8),
    Default(name="later", why="w", source="s", sglang="b", on=True, how="h", environment={"STOCK_C": "1"}),
)


def steering(environ, **choices):
    made = Steering(ROWS, Settings(choices=choices), lambda versions: versions == "a")
    made.start(environ)
    return made


def apply(made, environ, arguments):
    made.apply(environ, arguments.get, arguments.__setitem__)
    return {c.default: c.state for c in made.outcomes}


def test_defaults():
    environ, arguments = {}, {"steps": None}
    states = apply(steering(environ), environ, arguments)
    assert states == {"safe": ON, "risky": OFF, "count": ON, "later": NOT_APPLICABLE}
    assert environ == {"STOCK_A": "0", HANDOVER: json.dumps({"STOCK_A": "0"})} and arguments == {"steps": 8}


@pytest.mark.parametrize("choices", [{}, {"count": "on"}])
def test_an_argument_that_a_later_sglang_has_under_another_name_ends_no_start(choices):
    environ, arguments, made = {}, {"steps_between": None}, steering({}, **choices)
    server_args = SimpleNamespace(**arguments)
    made.apply(environ, functools.partial(getattr, server_args), functools.partial(setattr, server_args))
    assert made.outcome("count").state == NOT_APPLICABLE and made.outcome("safe").state == ON
    assert made.outcome("count").reason == "this SGLang has no --steps" and vars(server_args) == arguments


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_row_of_an_argument_is_for_servers_that_have_it(is_compiled):
    row = Default(
        name="one", why="w", source="s", sglang="a", on=True, how="h", environment={"S": "0"}, only_with="compile_it"
    )
    environ, arguments = {}, {"compile_it": is_compiled}
    made = Steering((row,), Settings(), lambda versions: True)
    assert made.outcome("one").reason == "by default, with --compile-it"
    assert apply(made, environ, arguments) == {"one": ON if is_compiled else NOT_APPLICABLE}
    assert environ.get("S") == ("0" if is_compiled else None) and arguments == {"compile_it": is_compiled}
    assert made.outcome("one").reason == ("by default, with --compile-it" if is_compiled else "without --compile-it")


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("hosts", [None, 1, 2])
def test_a_row_for_one_host_is_for_several_where_it_is_asked_for(hosts, asked):
    given = {"arguments": {"steps": VALUE}, "value": 8, "only_where": ("hosts", 1)}
    row = Default(name="one", why="w", source="s", sglang="a", on=True, how="h", **given)
    made = Steering((row,), Settings(choices={"one": "on"} if asked else {}), lambda versions: True)
    arguments = {"steps": None} | ({} if hosts is None else {"hosts": hosts})
    is_on = asked or hosts != 2
    assert apply(made, {}, arguments) == {"one": ON if is_on else OFF} and arguments["steps"] == (8 if is_on else None)
    assert is_on or made.outcome("one").reason == "not by default with --hosts 2"


def test_the_users_own_wins():
    environ, arguments = {"STOCK_A": "1"}, {"steps": 0}
    states = apply(steering(environ), environ, arguments)
    assert (states["safe"], states["count"]) == (USER, USER)
    assert environ == {"STOCK_A": "1"} and arguments == {"steps": 0}


def test_what_a_script_sets_after_its_imports_is_the_users_too():
    environ = {}
    made = steering(environ)
    environ["STOCK_A"] = "1"
    assert apply(made, environ, {"steps": None})["safe"] == USER and environ["STOCK_A"] == "1"


def test_choices_turn_on_off_and_change_the_number():
    environ, arguments = {}, {"steps": None}
    states = apply(steering(environ, safe="off", risky="on", count="3"), environ, arguments)
    assert (states["safe"], states["risky"]) == (OFF, ON)
    assert environ["STOCK_B"] == "1" and "STOCK_A" not in environ and arguments == {"steps": 3}


def test_a_child_gets_back_what_the_host_overwrote():
    environ = {}
    apply(steering(environ, risky="on"), environ, {"steps": None})
    environ["STOCK_B"] = "0"  # the host's own argument resolution, after ours
    child = dict(environ)
    made = steering(child, risky="on")
    assert made.is_child and child["STOCK_B"] == "1"
    assert apply(made, child, {"steps": None})["safe"] == ON and child["STOCK_A"] == "0"


def test_twice_is_once():
    environ, arguments = {}, {"steps": None}
    made = steering(environ)
    apply(made, environ, arguments)
    assert apply(made, environ, arguments)["safe"] == ON and arguments == {"steps": 8}
    assert {c.default: c.reason for c in made.outcomes}["safe"] == "by default"
    assert [c.applied for c in made.outcomes if c.default == "safe"] == [("STOCK_A=0",)]


def test_what_a_server_was_given_is_not_the_next_ones():
    environ, arguments = {}, {"steps": None}
    made = steering(environ, risky="on")
    apply(made, environ, arguments)
    environ["STOCK_B"] = "0"  # the host's own argument resolution, after ours
    made.end(environ)
    made.begin(environ)
    assert environ == {"STOCK_B": "0"} and [c.applied for c in made.outcomes] == [()] * 4
    apply(made, environ, {"steps": 3})
    assert made.outcome("count").state == USER and environ["STOCK_B"] == "1"
    begun = steering(dict(environ))  # another server, which this process starts
    inherited = dict(environ)
    begun.begin(inherited)
    assert inherited == {} and not begun.is_child and begun.outcome("count").state == ON


@pytest.mark.parametrize("hosts", [None, "0"])
def test_what_somebody_writes_between_two_servers_is_his(hosts):
    environ = {}
    made = steering(environ, risky="on")
    apply(made, environ, {"steps": None})
    environ |= {} if hosts is None else {"STOCK_B": hosts}
    made.end(environ)
    environ |= {"STOCK_A": "2", "STOCK_B": "3"}
    made.begin(environ)
    states = apply(made, environ, {"steps": None})
    assert environ["STOCK_A"] == "2" and environ["STOCK_B"] == "3" and states["safe"] == states["risky"] == USER
    made.end(environ)
    del environ["STOCK_B"]  # and takes back
    made.begin(environ)
    assert apply(made, environ, {"steps": None})["risky"] == ON and environ["STOCK_B"] == "1"


def test_what_was_set_already_is_no_quarrel():
    environ = {}
    states = apply(steering(environ), environ, {"steps": 8})
    assert states["count"] == ON


def test_a_row_that_makes_no_sense_with_a_variable():
    row = Default(name="fp4", why="w", source="s", sglang="a", on=True, how="h", arguments={"x": VALUE}, value=1,
                  unless=(("STOCK_FP4", ("0", "false")),))  # fmt: skip
    for said, state in ((None, ON), ("1", ON), ("", ON), ("0", NOT_APPLICABLE), ("False", NOT_APPLICABLE)):
        made, arguments = Steering((row,), Settings(), lambda versions: True), {"x": None}
        environ = {} if said is None else {"STOCK_FP4": said}
        made.apply(environ, arguments.get, arguments.__setitem__)
        assert made.outcome("fp4").state == state and arguments == {"x": 1 if state == ON else None}, said
        assert (made.outcomes[0].reason == f"STOCK_FP4={said}") == (state == NOT_APPLICABLE)


def test_another_model_gets_none_of_them_until_ours_comes():
    environ, arguments = {"STOCK_A": "1"}, {"steps": None}
    made = steering(environ)
    made.set_aside("another model")
    assert {c.default: c.state for c in made.outcomes if c.reason == "another model"} == dict.fromkeys(
        ("safe", "count"), NOT_APPLICABLE
    )
    assert made.outcome("risky").state == OFF and made.value("count") == 0
    made.begin(environ)
    assert apply(made, environ, arguments) == {"safe": USER, "risky": OFF, "count": ON, "later": NOT_APPLICABLE}
    assert apply(made, environ, arguments)["safe"] == USER  # as it was decided, not as it was set aside


def test_what_reports_say_of_each():
    told = {row["default"]: (row["would_set"], row["why"]) for row in steering({}).as_rows()}
    assert told == {"safe": ("STOCK_A=0", "w"), "risky": ("STOCK_B=1", "w"), "count": ("--steps 8", "w"),
                    "later": ("", "")}  # fmt: skip


def test_validation_modes_change_nothing_unasked():
    made = Steering(ROWS, Settings(force="ops", choices={"risky": "on"}), lambda versions: True)
    assert {c.default: c.state for c in made.outcomes} == {"safe": OFF, "risky": ON, "count": OFF, "later": OFF}


def test_unknown_names_are_a_problem_in_words():
    made = steering({}, sfae="on")
    assert made.problem() == "DSV4_SM120_SET names sfae (perhaps safe?); it takes safe, risky, count, later"
    assert steering({}, safe="on").problem() is None


def test_what_has_no_number_is_off_or_on():
    def problem(**choices):
        return Steering(ROWS, Settings(choices=choices), lambda versions: True, ("mhc", "all_reduce")).problem()

    assert problem(mhc="off") is None and problem(mhc="on") is None and problem(all_reduce="host") is None
    assert problem(mhc="3") == "DSV4_SM120_SET must be on or off for mhc, which are no numbers"
    assert problem(risky="1", count="1") == "DSV4_SM120_SET must be on or off for risky, which are no numbers"
    assert "it takes safe, risky, count, later, mhc, all_reduce" in problem(mch="off")


@pytest.mark.parametrize("value", ["off", "on"])
def test_what_others_go_by_is_no_setting(value):
    fixed = {"root": "all mends hang on it"}

    def problem(**choices):
        return Steering(ROWS, Settings(choices=choices), lambda versions: True, ("mhc",), fixed).problem()

    assert problem(root=value) == "DSV4_SM120_SET: root is no setting: all mends hang on it"
    assert "names other" in problem(other=value) and "root" not in problem(other=value)
    assert problem(mhc=value) is None


def test_a_patch_may_have_the_name_of_a_default_that_is_a_number():
    made = Steering(ROWS, Settings(choices={"count": "3"}), lambda versions: True, ("mhc", "count"))
    assert made.problem() is None and made.value("count") == 3


@pytest.mark.parametrize(
    "text",
    [
        *("safe", "safe=yes", "=on", "safe=on;risky=on", "count=-1", "safe=host", "all_reduce=hots"),
        *("count=²", "count=1234567", "safe=on,safe=off"),
    ],
)
def test_malformed_choices(text):
    with pytest.raises(ValueError, match="DSV4_SM120_SET must "):
        read_choices(text)


def test_choices_are_read():
    assert read_choices(" safe=on, count = 3 ,safe=on") == {"safe": "on", "count": "3"}
    assert read_choices("all_reduce=host,mhc=off") == {"all_reduce": "host", "mhc": "off"}
    with pytest.raises(ValueError, match=r"got 'all_reduce=hots' \(all_reduce takes host and peer too\)"):
        read_choices("all_reduce=hots")


def test_the_way_of_sums_that_the_user_chose():
    asked = {value: Settings(choices={"all_reduce": value}).transport for value in ("host", "peer", "on", "off")}
    assert asked == {"host": "host", "peer": "peer", "on": None, "off": None} and Settings().transport is None


def test_every_row_of_the_table_says_why_and_how():
    assert len({row.name for row in DEFAULTS}) == len(DEFAULTS) > 5
    for row in DEFAULTS:
        assert row.why and row.how and "[" in row.source
        switches = row.name in {patch.default for patch in TABLE.patches}
        assert row.environment or row.arguments or row.value or switches
        assert not (row.on and row.source.count("[I]") and "[R]" not in row.source), row.name


def test_the_prefill_interval_holds_chunks_back_only_while_somebody_decodes(monkeypatch):
    monkeypatch.setattr(patching, "value", {scheduling.DEFAULT: 2}.__getitem__)

    class Batch(list):
        def is_empty(self):
            return not self

    class Scheduler:
        chunks = 4

        def raw(self, prefill_delayer_single_pass, running_batch):
            assert prefill_delayer_single_pass is None or given.append(prefill_delayer_single_pass) is None
            self.chunks -= 1
            return ("chunk" if self.chunks >= 0 else None), running_batch

    given = []
    Scheduler.raw = scheduling.replace_new_batch_prefill(Scheduler.raw)
    scheduler, busy = Scheduler(), Batch(["stream"])
    asked = [scheduler.raw(prefill_delayer_single_pass=None, running_batch=busy)[0] for _ in range(8)]
    assert asked == ["chunk", None, None, "chunk", None, None, "chunk", None]
    assert scheduler.raw(None, Batch())[0] == "chunk"  # nobody decodes: at once
    assert [scheduler.raw(None, busy)[0] for _ in range(3)] == [None, None, None] and scheduler.chunks == -1
    scheduler, idle = Scheduler(), Batch()
    assert scheduler.raw(None, busy) == ("chunk", busy) and scheduler.raw(None, busy) == (None, busy)
    assert scheduler.raw(None, idle) == ("chunk", idle)
    scheduler.chunks = 0
    assert [scheduler.raw(None, busy)[0] for _ in range(3)] == [None] * 3 and scheduler.chunks == -1
    scheduler.chunks = 1
    assert scheduler.raw(None, busy)[0] == "chunk", "one that came when there was none is not held back"
    assert scheduler.raw("a pass", idle)[0] is None and given == ["a pass"]
    scheduler.chunks = 1
    assert scheduler.raw(None, busy)[0] == "chunk", "nor one that came behind a batch that had ended"


def test_the_number_of_a_default_is_the_engines(monkeypatch):
    steering = SimpleNamespace(value={"a default": 5}.__getitem__)
    for engine, found in ((None, 0), (SimpleNamespace(steering=steering), 5)):
        monkeypatch.setattr(patching, "_engine", engine)
        assert patching.value("a default") == found
    assert scheduling.DEFAULT in {row.name for row in DEFAULTS}


@pytest.mark.parametrize(
    ("asked", "absent"),
    [("index_select=off", "dealt_index"), ("draft_head=on,bf16_linear=off", "draft_head"), ("mhc=off", None)],
)
def test_a_default_is_not_on_where_its_patch_is_not_in_place(python_with_torch, tree, asked, absent):
    """The two tables of one answer, and what doctor and others read of it, say the same."""
    env = {"DSV4_SM120_SET": asked}
    found = json.loads(status(python_with_torch, "--json", path=[tree()], env=env, check=False).stdout)
    rows = {row["default"]: row for row in found["defaults"]}
    if absent is None:
        assert rows["dealt_index"]["state"] == "ON"
        return
    assert (rows[absent]["state"], rows[absent]["reason"]) == ("NOT APPLICABLE", f"without {absent}")
    assert {row["patch"]: row["state"] for row in found["patches"]}[absent] == "OFF"


def test_status_shows_the_number_in_force_where_nothing_of_the_hosts_is_set():
    def shown(chosen):
        made = Steering(DEFAULTS, read_settings({"DSV4_SM120_SET": chosen}), lambda versions: True)
        return {name: value for name, _, value, _ in _default_rows({"defaults": made.as_rows()})}

    found = shown("prefill_graphs=2048,prompts_in_halves=1024")
    assert found["prefill_graphs"] == "2048" and found["prompts_in_halves"] == "1024"
    assert found["dealt_index"] == "" and found["prefill_decode_interval"].endswith(f" {DECODE_STEPS_BETWEEN_CHUNKS}")
    assert shown("prefill_graphs=on")["prefill_graphs"] == str(CAPTURED_ROWS)
    unasked = shown("")  # one is off, of the other a server finds out whether it gains
    assert unasked["prefill_graphs"] == unasked["prompts_in_halves"] == ""
