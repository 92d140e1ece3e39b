"""Requests that are aborted by name: each release's own abort_request and grammar queue, with and without ours."""

import concurrent.futures
import functools
import uuid
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import device_gate
from deepseek_v4_sm120.sglang_patches.fixes.abort_names import replace_abort
from deepseek_v4_sm120.sglang_patches.rows.scheduler import SCHEDULER
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch, since

MODULE, _, CLASS = SCHEDULER.partition(":")
GRAMMARS = "sglang.srt.constrained.grammar_manager"
MODES = SimpleNamespace(NULL="", PREFILL="prefill", DECODE="decode")
HEX = uuid.UUID(int=10).hex

pytestmark = [pytest.mark.usefixtures("opened"), every_release()]


class Request:
    """As much of SGLang's as an abort asks for; a decode server's record of one, too."""

    grammar = kv_cache_cpu = to_finish = finished_reason = mamba_pool_idx = pending_bootstrap = None
    host_staged, kv = False, SimpleNamespace(holds_mamba=False, holds_kv=False)

    def __init__(self, rid, told=None):
        self.rid, self.kv_cache_cpu = rid, 1
        self.disagg_kv_sender = SimpleNamespace(abort=lambda: told.append(self.rid))

    def finished(self):
        return False

    def set_finish_with_abort(self, message):
        self.to_finish = message


@functools.cache
def methods(version, pipeline):
    """Of the release's scheduler, and its grammar queue's."""
    names = {"DisaggregationMode": MODES, "AbortReq": SimpleNamespace, "FINISH_ABORT": lambda *_: "aborted"}
    names["_make_abort_req"] = lambda req, **_: SimpleNamespace(rid=req.rid)
    names["get_parallel"] = lambda: SimpleNamespace(pp_size=1 + pipeline)
    own = ("collect_inflight_reqs", "_collect_inflight_batches", "abort_request")
    grammars = take(fetch(version), {"futures": concurrent.futures}, "GrammarManager.abort_requests", GRAMMARS)
    return {name: take(fetch(version), names, f"{CLASS}.{name}", MODULE) for name in own}, grammars


class Server:
    """A release's scheduler, as far as it aborts."""

    def __init__(self, version, mode="", *, ours=True, micro=False):
        kept, of_grammars = methods(version, micro)
        kept = dict(kept)
        if ours:
            kept["abort_request"] = replace_abort(kept["abort_request"])
        self.told, self.places, self.all = [], {name: [] for name in NAMES_OF_PLACES}, []
        sends = SimpleNamespace(send_output=lambda told, req: self.told.append(told.rid))
        grammars = type("GrammarManager", (), {})()
        grammars.abort_requests, grammars.grammar_queue = of_grammars.__get__(grammars), self.places["grammars"]
        batches = {name: SimpleNamespace(reqs=self.places[name]) for name in ("running", "last", "cur")}
        asked_of = ("tree_cache", "beam_coordinator", "req_to_metadata_buffer_idx_allocator")
        calls = ("_release_aborted_request", "release_aborted_prefill_waiting_req")
        self.scheduler = type("Scheduler", (), kept)()
        vars(self.scheduler).update(
            **dict.fromkeys((*asked_of, *calls), QUIET),
            **dict.fromkeys(("mm_receiver", "dllm_config", "chunked_req", "_pending_chunked_abort_req")),
            **dict.fromkeys(("enable_hicache_storage", "enable_hisparse", "enable_continuous_input_polling"), False),
            **{"ps": SimpleNamespace(pp_size=1 + micro), "disaggregation_mode": mode, "grammar_manager": grammars},
            **{"send_to_tokenizer": sends, "ipc_channels": SimpleNamespace(send_to_tokenizer=sends)},
            **{"send_abort_output": sends.send_output, "waiting_queue": self.places["waiting"]},
            **{f"{name}_batch": batch for name, batch in batches.items()},
        )
        if micro:
            of_stages = [SimpleNamespace(reqs=self.places[name]) for name in STAGES]
            vars(self.scheduler).update(running_mbs=[of_stages[0], None], mbs=[None, of_stages[1]])
        of_mode = {
            MODES.PREFILL: {
                "disagg_prefill_bootstrap_queue": SimpleNamespace(queue=self.places["bootstrap"]),
                "disagg_prefill_inflight_queue": self.places["inflight"],
            },
            MODES.DECODE: {
                "disagg_decode_prealloc_queue": SimpleNamespace(
                    queue=self.places["prealloc"], retracted_queue=self.places["retracted"]
                ),
                "disagg_decode_transfer_queue": SimpleNamespace(queue=self.places["transfer"]),
            },
        }
        vars(self.scheduler).update(of_mode.get(mode, {}))

    def put(self, place, *rids):
        for rid in rids:
            request = Request(rid, self.told)
            self.all.append(request)
            self.places[place].append(record(request, self.told) if place in ("prealloc", "transfer") else request)
        if place == "chunked":
            self.scheduler.chunked_req = self.places[place][0]

    def abort(self, rid, abort_all=False) -> set[str]:
        """The names of those that are aborted."""
        asked = {"rid": rid, "abort_all": abort_all, "finished_reason": None, "abort_message": None}
        before = [req.rid for req in self.all]
        self.scheduler.abort_request(SimpleNamespace(**asked))
        assert [req.rid for req in self.all] == before
        pending = self.scheduler._pending_chunked_abort_req
        return {req.rid for req in self.all if req.to_finish is not None or req is pending} | set(self.told)


def record(request, told):
    """What a decode server keeps of one."""
    manager = SimpleNamespace(enable_deferred_decode_kv_release=False)
    receiver = SimpleNamespace(abort=lambda: told.append(request.rid), kv_mgr=manager)
    return SimpleNamespace(req=request, host_staged=False, kv_receiver=receiver)


POLLS_SINCE = "0.5.22"  # --enable-continuous-input-polling
LOOKED_AT = {"chunked": ("0.5.14", "0.6"), "cur": ("0.5.12", "0.5.16"), "last": ("0.5.16", "0.6")}  # else in all
ALONE = ("waiting", "grammars", "running", *LOOKED_AT)
OF_ROLES = {"prefill": ("bootstrap", "inflight"), "decode": ("prealloc", "transfer", "retracted")}
STAGES = ("running of a stage", "of a stage")
NAMES_OF_PLACES = (*ALONE, *STAGES, *(place for of in OF_ROLES.values() for place in of))
PLACES = [("", place) for place in ALONE] + [(mode, place) for mode, of in OF_ROLES.items() for place in of]


def test_the_request_of_that_name_ends_and_no_other(version):
    """In each place in which a release looks: there SGLang itself ends the longer names as well."""
    for mode, place in PLACES:
        first, last = LOOKED_AT.get(place, ("0.5.12", "0.6"))
        others = {"job-10", "job-1b"} if since(version, first) and not since(version, last) else set()
        others -= {"job-1b"} if place == "chunked" else set()
        for name, ends in (("job-1", {"job-1"}), ("job-" if place != "waiting" else "ob-1", set())):
            both = [Server(version, mode, ours=ours) for ours in (False, True)]
            for server in both:
                server.put("running" if place == "waiting" else "waiting", "job-1", "other")
                server.put(place, "job-10", "job-1b")
            stock, found = (server.abort(name) for server in both)
            assert found == ends, (place, name)
            assert stock == ({"job-1", *others} if "job-1".startswith(name) else set()), (place, name)
        for ours in (False, True):
            server = Server(version, mode, ours=ours)
            server.put(place, "job-10", "job-1b")
            assert server.abort("job-10") == others & {"job-10"}, place


def test_of_a_pipelines_batches_too(version):
    for ours in (False, True):
        server = Server(version, micro=True, ours=ours)
        server.put("waiting", "job-1")
        server.put(STAGES[0], "job-10")
        server.put(STAGES[1], "job-1b")
        both = {"job-10", "job-1b"} if since(version, "0.5.16") and not ours else set()
        assert server.abort("job-1") == {"job-1"} | both


def test_of_batches_whose_results_wait_too(version):
    for ours in (False, True):
        server = Server(version, ours=ours)
        server.put("waiting", "job-1")
        server.put(STAGES[0], "job-10", "job-1b")
        queued = SimpleNamespace(reqs=server.places[STAGES[0]])
        vars(server.scheduler).update(enable_continuous_input_polling=True, result_queue=[(queued, "its result")])
        both = {"job-10", "job-1b"} if since(version, POLLS_SINCE) and not ours else set()
        assert server.abort("job-1") == {"job-1"} | both


def test_the_longer_names_that_sglang_makes_of_one_end_with_it(version):
    """Those of a request's prompts, and of its answers, where nothing has the name itself."""
    made, others = ["job_0", "job_12", f"job_{HEX}", f"job_3_{HEX}"], ["job_x", "job_1x", "job1", "job_1_2", "jobs_1"]
    server = Server(version)
    server.put("waiting", *made[:2], *others)
    server.put("running", *made[2:], "xjob_1")
    assert server.abort("job") == set(made)
    server = Server(version)
    server.put("waiting", *made, *others)
    server.put("running", "job")
    assert server.abort("job") == {"job"}
    assert Server(version).abort("job") == set()


def test_all_are_aborted_where_all_are_asked_for(version):
    server = Server(version)
    server.put("waiting", "a", "job-1")
    server.put("running", "job-10")
    assert server.abort("", abort_all=True) == {"a", "job-1", "job-10"}


def test_names_are_their_own_again_behind_an_error(version):
    server = Server(version)
    server.put("waiting", "job-10", "job-1")
    server.scheduler.grammar_manager.abort_requests = None
    with pytest.raises(TypeError):
        server.abort("job-1")
    assert [req.rid for req in server.scheduler.waiting_queue] == ["job-10"]


def test_other_models_and_cards_keep_sglangs(version, monkeypatch):
    monkeypatch.setattr(device_gate, "serves_current_device", lambda: False)
    server = Server(version)
    server.put("waiting", "job-1", "job-10")
    assert server.abort("job-1") == {"job-1", "job-10"}
