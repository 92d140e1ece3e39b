"""A pipeline's last stage with its own tokens in place of their echo: each release's own loop, messages, sends and
receives, taken out of the wheels and run by a process a stage (gloo). Batches and the model are stand-ins: a token is
made of what each stage adds, and of the token before it. All releases were run with this; the suite has three forms."""

import builtins
import json
import os
import pickle
import select
import signal
import traceback
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepseek_v4_sm120.sglang_patches.fixes import own_outputs as fix
from tests.forks import renew_thread_pool
from tests.patching.test_wheel_mhc_sum import Part
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import RELEASES, since

STAGES, STATE = "sglang.srt.managers.scheduler_pp_mixin", "sglang.srt.distributed.parallel_state"
TURNS, SECONDS, ON_STREAM = 6, 60, "0.5.21"
SEND, RECEIVE = "_pp_send_dict_to_next_stage", "_pp_recv_dict_from_prev_stage"
LOOP = [
    *("event_loop_pp", "init_pp_loop_state", "_pp_commit_comm_work", "_pp_commit_proxy_send_work", SEND, RECEIVE),
    *("_pp_commit_send_output_work_and_preprocess_output_tensors", "_pp_send_pyobj_to_next_stage"),
    *("_pp_send_proxy_to_next_stage", "_pp_recv_typed_dict", "_pp_recv_proxy_tensors", "_pp_record_comm_event"),
    *("_pp_send_output_to_next_stage", "_pp_send_recv_and_preprocess_output_tensors"),
]


class Done(Exception):
    pass


class Tensors:
    def __init__(self, tensors):
        self.tensors = tensors


class Metadata:
    def __init__(self, device, dtype, size):
        self.device, self.dtype, self.size = device, dtype, size


class Batch(SimpleNamespace):
    return_logprob, forward_mode = False, SimpleNamespace(is_prebuilt=lambda: False)


def names_of(wheel, parallel):
    off = SimpleNamespace(get=lambda: False)
    names = vars(builtins) | {
        **{"torch": torch, "pickle": pickle, "deque": deque, "defaultdict": defaultdict, "nullcontext": nullcontext},
        **{"PPProxyTensors": Tensors, "TensorMetadata": Metadata, "DynamicGradMode": lambda: lambda f: f},
        **{"P2PWork": lambda work, sent: SimpleNamespace(work=work, sent=sent), "get_parallel": lambda: parallel},
        **{"_is_npu": False, "is_xpu": lambda: False, "pp_spec_stable_rows_enabled": lambda: False},
        "_pp_exchange_outputs_before_forward": lambda **_: False,
        "envs": SimpleNamespace(
            SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM=off, SGLANG_PP_COMM_OVERLAP=off, SGLANG_ENABLE_PP_SPEC=off
        ),
        "ScheduleBatch": lambda **_: None,
        "point_to_point_pyobj": send_requests,
    }
    names["_split_tensor_dict"] = take(wheel, names, "_split_tensor_dict", STATE)
    if definition(wheel, "_pp_can_skip_output_comm", STAGES) is not None:
        names["_pp_can_skip_output_comm"] = take(wheel, names, "_pp_can_skip_output_comm", STAGES)
    return names


def send_requests(data, rank, group, source, target, async_send):
    sent = torch.zeros(1)
    return [SimpleNamespace(work=dist.isend(sent, target, group=group), sent=sent)]


class Stage(Part):
    """A scheduler of one stage: the first batch has a step in each of TURNS turns, the others in some; in the last two
    turns there is none."""

    def __init__(self, wheel, version, rank, stages, patched):
        everyone = list(range(stages))
        groups = [dist.new_group(everyone, backend="gloo") for _ in range(3)]
        ranks = dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_async_batch_depth"), 0)
        ranks |= dict.fromkeys(("attn_tp_size", "attn_cp_size", "tp_size"), 1) | {"pp_rank": rank, "pp_size": stages}
        self.ps = self.server_args = parallel = Part(**ranks)
        names = names_of(wheel, parallel)
        sends = ("send_object", "recv_object", "send_tensor_dict", "recv_tensor_dict")
        group = type("Group", (), {name: take(wheel, names, f"GroupCoordinator.{name}", STATE) for name in sends})
        self.pp_group = group()
        vars(self.pp_group).update(world_size=stages, ranks=everyone, rank_in_group=rank, is_first_rank=not rank)
        vars(self.pp_group).update(is_last_rank=rank == stages - 1, cpu_group=groups[0], device_group=groups[1])
        vars(self).update(
            ranks, rank=rank, patched=patched, stages=stages, turns=0, sent=0, results=[], tokens=[1] * stages
        )
        vars(self).update(world_group=SimpleNamespace(cpu_group=groups[2]), copy_stream_ctx=nullcontext())
        self.attn_tp_group = SimpleNamespace(world_size=1, rank_in_group=0, all_gather=lambda x, dim: x)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.disaggregation_mode, self.drawn = SimpleNamespace(name="NULL"), torch.zeros(1, dtype=torch.int64)
        self.request_receiver, self.recv_requests = SimpleNamespace(recv_requests=self.requests), self.requests
        self.ingest_requests, self.has_plans = self.requests, since(version, "0.5.16")
        kind = type("Scheduler", (Stage,), {})
        for name in LOOP:
            if (found := take(wheel, names, f"SchedulerPPMixin.{name}", STAGES)) is not None:
                setattr(kind, name, found)
        if patched:
            by_stream = "_on_stream" if since(version, ON_STREAM) else ""
            setattr(kind, SEND, getattr(fix, f"replace_send_dict{by_stream}")(getattr(kind, SEND)))
            setattr(kind, RECEIVE, fix.replace_recv_dict(getattr(kind, RECEIVE)))
            kind._pp_recv_proxy_tensors = fix.replace_recv_proxy(kind._pp_recv_proxy_tensors)
        kind.send, self.__class__ = getattr(kind, SEND), kind
        setattr(self, SEND, self.counted)

    def counted(self, *args, msg_type, **kwargs):
        works = self.send(*args, msg_type=msg_type, **kwargs)
        self.sent += msg_type == fix.OUTPUT and bool(works)
        return works

    def requests(self):
        if self.rank:
            dist.recv(torch.zeros(1), self.rank - 1, group=self.world_group.cpu_group)
        return []

    def get_next_batch_to_run(self, **_):
        turn, index = divmod(self.turns, self.stages)
        self.turns += 1
        if turn == TURNS + 2:
            raise Done
        batch = Batch(index=index, reqs=[0]) if has_step(turn, index) else None
        return SimpleNamespace(running_batch=None, batch_to_run=batch) if self.has_plans else batch

    def _pp_launch_batch(self, index, *given):
        before = next((one.tensors for one in given if isinstance(one, Tensors)), None)
        assert before is None or before.keys() - {fix.KNOWS} == {"__msg_type__", "hidden_states"}
        assert not self.patched or before is None or fix.KNOWS not in before
        before = before and before["hidden_states"]
        after = added(self.rank, self.tokens[index] + 7 * index if before is None else int(before))
        if self.rank < self.stages - 1:
            proxy = Tensors({"hidden_states": torch.tensor([after])})
            return SimpleNamespace(pp_hidden_states_proxy_tensors=proxy, can_run_cuda_graph=False), None
        self._pp_commit_comm_work(self.send_output_work)  # as a device's streams do
        self.drawn.fill_(after)  # a graph's own buffer, which each step writes
        given[-1].append((None, Tensors({"next_token_ids": self.drawn, "not a tensor": "told"})))
        return SimpleNamespace(), None

    def _pp_prep_batch_result(self, batch, metadata, outputs):
        assert outputs.tensors["not a tensor"] == "told" and outputs.tensors["__msg_type__"] == "output"
        return SimpleNamespace(tokens=outputs.tensors["next_token_ids"].clone(), logits_output=None)

    def _pp_process_batch_result(self, batch, result):
        self.tokens[batch.index] = int(result.tokens)
        self.results.append([batch.index, int(result.tokens)])

    def run(self):
        try:
            self.event_loop_pp()
        except Done:
            stashed = sum(map(len, self._pp_tensor_dict_inbox.values()))
            return {"results": self.results, "sent": self.sent, "left": len(fix.kept(self)), "stashed": stashed}


def has_step(turn, index):
    return turn < TURNS and (not index or 1 <= turn < 4)


def added(rank, value):
    return (3 * value + rank + 1) % 10007


def expected(stages):
    """What each stage is to process, in the order of the loop."""
    found, tokens = [], [1] * stages
    for turn in range(TURNS):
        for index in range(stages):
            if has_step(turn, index):
                value = tokens[index] + 7 * index
                for rank in range(stages):
                    value = added(rank, value)
                tokens[index] = value
                found.append([index, value])
    return found


def of_processes(wheel, version, stages, patched, folder):
    """patched: the stages that are. -> what each process says."""
    ends, pids = [], []
    for rank in range(stages):
        end, told = os.pipe()
        if not (pid := os.fork()):
            said = {}
            try:
                renew_thread_pool()
                store = f"file://{folder}/{version}-{stages}-{len(patched)}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=stages)
                said = Stage(wheel, version, rank, stages, rank in patched).run()
            except BaseException:
                said = {"wrong": traceback.format_exc()}
            finally:
                os.write(told, json.dumps(said).encode())
                signal.pause()  # what it has sent may not have been received
        os.close(told)
        ends, pids = [*ends, end], [*pids, pid]
    texts = [os.read(end, 1 << 16) if select.select([end], [], [], SECONDS)[0] else b'"hangs"' for end in ends]
    for pid, end in zip(pids, ends, strict=True):
        os.close(end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [json.loads(text) for text in texts]


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(fix, "is_ours", lambda: True)


@pytest.mark.parametrize("version", ["0.5.12", "0.5.20", RELEASES[-1]])
def test_the_last_stage_needs_no_echo(version, sglang_wheel, ours, tmp_path):
    """Every stage has every step's tokens, in the order of the loop; the stage in front of the last sends none on."""
    steps = len(expected(3))
    found = of_processes(sglang_wheel(version), version, 3, {0, 1, 2}, tmp_path)
    assert [one.get("wrong") for one in found] == [None] * 3
    assert all(one["results"] == expected(3) and not one["stashed"] and not one["left"] for one in found)
    assert [one["sent"] for one in found] == [steps, 0, steps]


@pytest.mark.parametrize("patched", [set(), {1}, {0}], ids=["alone", "last", "front"])
def test_stages_need_not_agree(patched, sglang_wheel, ours, tmp_path):
    """Where one of both is without us the echo goes round."""
    steps, version = len(expected(2)), RELEASES[-1]
    found = of_processes(sglang_wheel(version), version, 2, patched, tmp_path)
    assert [one.get("wrong") for one in found] == [None] * 2
    assert all(one["results"] == expected(2) and not one["left"] and not one["stashed"] for one in found)
    assert [one["sent"] for one in found] == [steps, steps]


@pytest.mark.parametrize("why", ["cards", "drafts", "disaggregation", "others", "earlier stage", "front", None])
def test_who_keeps(why, monkeypatch):
    monkeypatch.setattr(fix, "is_ours", lambda: why != "others")
    scheduler = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=why != "earlier stage", rank_in_group=2, world_size=4),
        attn_tp_group=SimpleNamespace(world_size=1 + (why == "cards")),
        spec_algorithm=SimpleNamespace(is_none=lambda: why != "drafts"),
        disaggregation_mode=SimpleNamespace(name="PREFILL" if why == "disaggregation" else "NULL"),
        **{fix.FOUND: why != "front"},
    )
    assert fix.is_keeper(scheduler) is (why is None)
