"""What docs/operating.md says of speculation's ends, counts and seeds: each release's own code on the CPU."""

import asyncio
import copy
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import thought_counts
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch, members, since

BATCH = "sglang.srt.managers.schedule_batch"
END, METHODS = 7, ("_check_token_based_finish", "_check_vocab_boundary_finish", "_cap_finished_len_at_max_new_tokens")


def ended(version, answer, *, accepted, max_tokens):
    """(how many tokens of the answer are told, the kind of its reason), by the release's own Req."""
    name = "update_finish_state" if since(version, "0.5.13") else "check_finished"
    kinds = {kind: type(kind, (SimpleNamespace,), {}) for kind in ("FINISH_LENGTH", "FINISH_MATCHED_TOKEN")}
    taken = {m: take(fetch(version), dict(kinds), f"Req.{m}", BATCH) for m in (name, *METHODS)}
    found = type("Req", (), {m: method for m, method in taken.items() if method is not None})()
    found.finished, found.to_finish, found.grammar, found.vocab_size = (lambda: False), None, None, 100
    found._check_str_based_finish = lambda *_: False
    found.sampling_params = SimpleNamespace(max_new_tokens=max_tokens, ignore_eos=False, stop_token_ids=None)
    found.output_ids, found.eos_token_ids, found.tokenizer = answer, {END}, None
    found.finished_len = found.finished_reason = None
    getattr(found, name)(accepted)
    return found.finished_len, type(found.finished_reason).__name__


@every_release()
def test_an_end_in_the_step_that_reaches_max_tokens(version):
    """Of 3, 4, the end and 5 all in one step, 5 is behind the end."""
    of_the_end, of_the_length = (3, "FINISH_MATCHED_TOKEN"), (4, "FINISH_LENGTH")
    found = ended(version, [3, 4, END, 5], accepted=4, max_tokens=4)
    assert found == (of_the_end if since(version, "0.5.18") else of_the_length)
    assert ended(version, [3, 4, END, 5], accepted=4, max_tokens=9) == of_the_end
    assert ended(version, [3, 4, 5, 6, END], accepted=5, max_tokens=4) == of_the_length


@every_release()
def test_a_length_that_is_no_whole_number(version):
    """Is the answer's, whose tokens are then asked for up to it: fatal_requests refuses it."""
    length, _ = ended(version, [3] * 6, accepted=1, max_tokens=5.5)
    text = content(fetch(version), f"{BATCH.replace('.', '/')}.py")
    assert length == 5.5 and "return self.output_ids[: self.finished_len]" in text
    with pytest.raises(TypeError):
        [3][:length]


@every_release()
def test_the_next_turn_of_a_session_has_what_is_behind_the_end(version):
    """Of 3, the end and 5 in one step, 5 is told to nobody."""
    answer, module = [3, END, 5], "sglang.srt.session.session_controller"
    length, _ = ended(version, answer, accepted=3, max_tokens=9)
    if not since(version, "0.5.14"):
        text = content(fetch(version), f"{module.replace('.', '/')}.py")
        assert "+ last_req.output_ids[: last_req.sampling_params.max_new_tokens]" in text
        return
    last = SimpleNamespace(origin_input_ids=[1, 2], origin_input_ids_unpadded=[1, 2], output_ids=answer)
    last.sampling_params, last.finished_len = SimpleNamespace(max_new_tokens=9), length
    asked = SimpleNamespace(drop_previous_output=False, offset=None)
    join = take(fetch(version), {}, "Session._concat_token_arrays", module).__func__
    assert join(last, SimpleNamespace(input_ids=[8]), asked)[0] == [1, 2, *answer, 8] and length == 2


class Ends:
    """What of a sequence of one token was met."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def advance(self, matched, token):
        return int(token == self.ids[0])


@every_release()
def test_no_more_thoughts_than_tokens(version, monkeypatch):
    """A step of four tokens, all thoughts, of which max_tokens leaves two."""
    monkeypatch.setattr(models_served, "has_served_card", lambda: True)
    count = take(
        fetch(version), {"TokenSequenceMatcher": Ends, "isinstance": isinstance}, "Req.update_reasoning_tokens", BATCH
    )
    request = SimpleNamespace(reasoning_tokens=0, _is_reasoning_over=False, _think_end_matcher=None)
    request._think_end_match_len = 0
    count(request, [1, 2, 3, 4], 9 if not since(version, "0.5.17") else [9])
    answered, _ = ended(version, [1, 2, 3, 4], accepted=4, max_tokens=2)
    assert (answered, request.reasoning_tokens) == (2, 4)  # so the row is needed

    async def hand_on(manager, batch):
        return batch.reasoning_tokens

    batch = SimpleNamespace(reasoning_tokens=[request.reasoning_tokens, 3], completion_tokens=[answered, 8])
    assert asyncio.run(thought_counts.replace_handle(hand_on)(None, batch)) == [2, 3]


def test_what_has_no_thoughts_is_handed_on(monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: True)

    async def hand_on(manager, batch):
        return batch

    for batch in (SimpleNamespace(embeddings=[1]), SimpleNamespace(reasoning_tokens=[], completion_tokens=[])):
        before = copy.deepcopy(batch)
        assert asyncio.run(thought_counts.replace_handle(hand_on)(None, batch)) == before


@pytest.mark.parametrize("folder", ["speculative/dspark", "kernels/ops/speculative/dspark"])
@every_release("0.5.16")
def test_dspark_knows_no_seeds(version, folder):
    wheel = fetch(version)
    files = [m for m in members(wheel) if folder in m and m.endswith(".py")]
    assert files or not since(version, "0.5.17")
    assert not [m for m in files if "sampling_seed" in content(wheel, m)]


@every_release("0.5.14")
def test_since_when_eagle_knows_them(version):
    text = content(fetch(version), "sglang/srt/speculative/eagle_utils.py")
    assert ("_seeded_verify_coins(" in text) == since(version, "0.5.17")
