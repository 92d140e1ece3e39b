"""Seeds of several answers to one prompt: each release's own handling of the request, with ours in it and without."""

import asyncio
import copy
import re
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes.sample_seeds import LEAST, WITHOUT, following, replace_send
from deepseek_v4_sm120.sglang_patches.rows.http_server import SAMPLING, TOKENIZER_MANAGER
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, since

MODULE, _, MANAGER = TOKENIZER_MANAGER.partition(":")
BATCH_INFO = "sglang/srt/sampling/sampling_batch_info.py"
LARGEST = -LEAST - 1

pytestmark = pytest.mark.usefixtures("served_card")


class Asked(SimpleNamespace):
    """A request of some prompts; one of it."""

    def __getitem__(self, at):
        return Asked(**vars(self) | {"rid": self.rid[at], "seed": self.seeds[at]})

    def regenerate_rid(self, prefix=""):
        self.count.append(1)
        self.rid = f"{prefix} own {len(self.count)}"
        return self.rid


class Manager(SimpleNamespace):
    """A TokenizerManager as far as the release's _handle_batch_request asks it."""

    def __init__(self, is_awaited, ours):
        super().__init__(rid_to_state={}, sent=[], made=[])

        def send(self, tokenized):
            self.sent.append(tokenized.sampling_params)

        async def send_awaited(self, tokenized):
            send(self, tokenized)

        original = send_awaited if is_awaited else send
        self._send = replace_send(original) if ours else original

    def _send_one_request(self, tokenized):
        return self._send(self, tokenized)

    async def _tokenize_one_request(self, asked):
        self.made.append(SimpleNamespace(max_new_tokens=9, n=asked.parallel_sample_num, sampling_seed=asked.seed))
        return SimpleNamespace(sampling_params=self.made[-1], rid=asked.rid, mm_inputs=None)

    def _init_req_state(self, asked, *_):
        self.rid_to_state[asked.rid] = SimpleNamespace(time_stats=SimpleNamespace(set_finished_time=lambda: None))

    def _init_child_req_state(self, rid, asked):
        self._init_req_state(asked)

    def _remove_req_state(self, rid):
        self.rid_to_state.pop(rid, None)

    def _should_use_batch_tokenization(self, *_):
        return False

    def _raise_if_logical_request_aborted(self, *_):
        pass

    _raise_if_logical_rid_aborted = _raise_if_logical_request_aborted

    async def _wait_one_response(self, asked, request):
        yield {"meta_info": {"id": asked.rid}}

    async def _collect_batch_responses(self, generators):
        return [await generator.__anext__() for generator in generators]


def handled(version, seeds, *, ours=True, n=3):
    """(the manager, seeds of what is sent but for those that read a prompt alone) of a request of as many prompts."""
    names = {"asyncio": asyncio, "copy": copy, "getattr": getattr, "hasattr": hasattr, "isinstance": isinstance}
    names |= {"list": list, "range": range, "get_bool_env_var": lambda name: False, "enumerate": enumerate}
    names |= {"nullcontext": __import__("contextlib").nullcontext, "GenerateReqInput": Asked}
    method = take(fetch(version), names, f"{MANAGER}._handle_batch_request", MODULE)
    manager = Manager(since(version, "0.5.20"), ours)
    asked = Asked(batch_size=len(seeds), parallel_sample_num=n, seeds=seeds, count=[], stream=False, lora_path=None)
    asked.rid, asked.return_prompt_token_ids = [f"rid {at}" for at in range(len(seeds))], False
    states = {}
    for at in range(len(seeds)):
        manager._init_req_state(asked[at])
        states[asked.rid[at]] = manager.rid_to_state[asked.rid[at]]
    more = (None, states) if since(version, "0.5.22") else (None,)

    async def answers():
        return [one async for one in method(manager, asked, *more)]

    (told,) = asyncio.run(answers())
    assert len(told) == n * len(seeds)
    return manager, [params.sampling_seed for params in manager.sent if params.max_new_tokens]


@every_release()
def test_each_answer_has_a_seed_of_its_own(version):
    assert handled(version, [7], ours=False)[1] == [7, 7, 7]  # so the row is needed
    assert handled(version, [7])[1] == [7, 8, 9]
    assert handled(version, [7, 100])[1] == [7, 8, 9, 100, 101, 102]
    assert handled(version, [LARGEST])[1] == [LARGEST, LEAST, LEAST + 1]
    assert handled(version, [-2])[1] == [-2, -1, 0]
    assert handled(version, [7], n=2)[1] == [7, 8]
    assert handled(version, [None], ours=False)[1] == [None] * 3
    assert handled(version, [None])[1] == [None, WITHOUT + 1, WITHOUT + 2]


@every_release()
def test_one_answer_is_sent_as_it_is(version):
    for seed in (7, None):
        manager, seeds = handled(version, [seed], n=1)
        assert seeds == [seed] and all(a is b for a, b in zip(manager.sent, manager.made, strict=True))


@pytest.mark.parametrize("seed", ["7", 7.5, [7]])
def test_what_is_no_seed_stays(seed):
    assert handled("0.5.17", [seed])[1] == [seed] * 3


def test_elsewhere_they_stay(elsewhere):
    assert handled("0.5.23", [7])[1] == [7, 7, 7]


@every_release()
def test_what_the_releases_draw_by(version):
    """Seeds where the flag asks for them, of a request without one, their kind, and settings that may be changed."""
    text = content(fetch(version), BATCH_INFO)
    (draws_by,) = re.findall(r"^ +sampling_seed = \($(.*?)^ +else None$", text, re.MULTILINE | re.DOTALL)
    assert draws_by.rstrip().endswith("if enable_deterministic")
    found = re.search(
        r"sampling_seed is not None\s+else (\d+)\s+\)\s+for r in reqs\s+\],\s+dtype=torch\.(\w+)", draws_by
    )
    assert found.groups() == (str(WITHOUT), "int64")
    module, _, name = SAMPLING.partition(":")
    line = re.search(rf"^class {name}\b.*:$", content(fetch(version), f"{module.replace('.', '/')}.py"), re.MULTILINE)
    assert "frozen" not in line[0]


def test_the_last_seed_is_followed_by_the_first():
    assert following(LARGEST) == LEAST and following(-1) == 0 and following(None) == following(WITHOUT) == 43
