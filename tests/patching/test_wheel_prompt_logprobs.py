"""Whose log-probabilities are told where a request of the same pass was retracted: each release's own processing of a
pass's results on the CPU, with ours in it and without."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.prompt_logprobs import of_pass, replace_apply, replace_process
from deepseek_v4_sm120.sglang_patches.rows.sampling import RESULTS
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import content, every_release, fetch, since

FIRST, PLACE = "0.5.14", RESULTS.partition(":")[0]
METHODS = ("move_logprobs_to_cpu", "_apply_prefill_logprobs", "_apply_chunked_prefill_logprobs")
COUNTS = "sglang.srt.managers.scheduler_components.logprob_result_processor"
ASKED, CHUNKS = ([5, 6, 7], [15, 16, 17, 18], [25, 26]), (0, 0, 1)  # the prompts; of the last one a part is read

pytestmark = pytest.mark.usefixtures("opened")


class Request(SimpleNamespace):
    def __getattr__(self, name):
        return QUIET


def request(prompt, more, *, retracted=False, finished=False):
    made = Request(origin_input_ids=prompt, output_ids=array("q"), return_logprob=True, is_retracted=retracted)
    made.inflight_middle_chunks, made.send_output_token_logprobs_offset = more, 0
    made.finished, made.told, made.discard_output_reason = (lambda: finished), [], None
    return made


class Counts:
    """SchedulerLogprobResultProcessor as far as it says whose the numbers are."""

    def __init__(self, version):
        count = take(fetch(version), {}, "SchedulerLogprobResultProcessor.calculate_num_input_logprobs", COUNTS)
        self.calculate_num_input_logprobs = lambda *a: count(self, *a)
        self._is_multi_item_scoring = lambda req: False
        self._scoring_positions = lambda req: None

    def add_input_logprob_return_values(self, i, req, output, start, number, last_prefill_chunk):
        req.told += output.input_token_logprobs[start : start + number]

    def add_logprob_return_values(self, i, req, start, next_token_ids, number, output):
        self.add_input_logprob_return_values(i, req, output, start, number, True)


def processed(version, requests, *, ours, asks=True):
    """The requests, told what they are of one pass. A log-probability is here the number of its token."""
    wheel = fetch(version)
    methods = {name: take(wheel, {}, f"SchedulerBatchResultProcessor.{name}", PLACE) for name in METHODS}
    methods["process"] = take(wheel, {}, "SchedulerBatchResultProcessor.process_batch_result_prefill", PLACE)
    if ours:
        methods["process"] = replace_process(methods["process"])
        methods |= {name: replace_apply(methods[name]) for name in METHODS[1:]}
    made = type("Processor", (), {"__getattr__": lambda self, name: QUIET, **methods})()
    made.is_generation, made.logprob_result_processor = True, Counts(version)
    prompts = [one.origin_input_ids for one in requests]
    logits = Request(input_token_logprobs=torch.tensor([token for prompt in prompts for token in prompt]))
    logits.next_token_logprobs = logits.next_token_top_logprobs_val = logits.next_token_token_ids_logprobs_val = None
    result = Request(logits_output=logits, next_token_ids=torch.zeros(len(requests), dtype=torch.int64))
    result.extend_input_len_per_req = list(map(len, prompts)) if asks else None
    result.extend_logprob_start_len_per_req = [0] * 3 if asks else None
    result.copy_done = result.routed_experts_output = result.indexer_topk_output = None
    batch = Request(reqs=requests, return_logprob=asks, decoding_reqs=None)
    methods["process"](made, batch, result)
    assert of_pass.passed_over == ()
    return requests


def three(place, **what):
    return [request(list(ids), CHUNKS[i], **what if i == place else {}) for i, ids in enumerate(ASKED)]


@every_release(FIRST)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("what", ["retracted", "finished"])
def test_each_is_told_its_own(version, place, what):
    if (place, what) == (2, "finished"):
        return  # whose part is counted though it is not told
    found = [one.told for one in processed(version, three(place, **{what: True}), ours=True)]
    assert found == [[] if i == place else ids for i, ids in enumerate(ASKED)]
    stock = [one.told for one in processed(version, three(place, **{what: True}), ours=False)]
    assert (stock == found) == (place == 2)  # so the row is needed
    if place == 0:
        assert stock == [[], [5, 6, 7, 15], [16, 17]]


@every_release(FIRST)
def test_what_is_counted_though_it_ended_is_not_counted_twice(version):
    """A prompt that is read by parts, and ended meanwhile: those behind it have what it has been told."""
    requests = [request(list(ids), int(i == 0), finished=i == 0) for i, ids in enumerate(ASKED)]
    assert [one.told for one in processed(version, requests, ours=True)][1:] == list(ASKED[1:])


@every_release(FIRST)
def test_passes_without_one_are_sglangs(version):
    for ours in (True, False):
        assert [one.told for one in processed(version, three(None), ours=ours)] == list(ASKED)
    assert [one.told for one in processed(version, three(0, retracted=True), ours=True, asks=False)] == [[], [], []]


@every_release(FIRST)
def test_what_a_retracted_request_was_not_sent(version):
    """Up to 0.5.18 the streamer, which a pass's results end with, counts one log-probability as sent at least."""
    streamer = content(fetch(version), "sglang/srt/managers/scheduler_components/output_streamer.py")
    asks = "len(output_ids_) if req.is_retracted else max(len(output_ids_), 1)"
    assert "max(len(output_ids_), 1)" in streamer and (asks in streamer) == since(version, "0.5.19")
    assert "req.send_output_token_logprobs_offset = logprob_end" in streamer
    requests = three(1, retracted=True)
    for one in requests:
        one.send_output_token_logprobs_offset = 1  # as the streamer leaves it
    processed(version, requests, ours=True)
    assert [one.send_output_token_logprobs_offset for one in requests] == [1, 0, 1]


@every_release(FIRST)
@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    told = [[one.told for one in processed(version, three(0, retracted=True), ours=ours)] for ours in (False, True)]
    assert told[0] == told[1]
