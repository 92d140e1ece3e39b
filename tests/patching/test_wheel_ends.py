"""What docs/mended.md says of speculation's ends, counts and seeds: each release's own code on the CPU, without
first_stops and with it."""

import asyncio
import copy
import random
import re
from array import array
from http import HTTPStatus
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import first_stops, thought_counts
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


TEXTS = ("a", "b", ",", " c", "\n", "d.", "\n\n", "", ":", " Q", "e", "x,y")  # by token, END's is empty
OF_STOPS = ("_check_str_based_finish", "_locate_str_stop_finished_len", "_stop_match_tail_len", "tail_str")
STRINGS = ([], ["\n", ".", ","], [",", "."], ["Q", "\n"], ["\n\n", "\n"], [":"], ["d", "a"])
PATTERNS = ([], [], ["b+$"], ["[,.]"])
KINDS = ("FINISH_LENGTH", "FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISHED_MATCHED_REGEX", "FINISH_ABORT")


class Tokenizer:
    eos_token_id, additional_stop_token_ids = END, None

    def decode(self, ids):
        return "".join(TEXTS[i] for i in ids if i < len(TEXTS))


class Answers:
    """What is told of an answer, by a release's own Req."""

    def __init__(self, version):
        self.name = "update_finish_state" if since(version, "0.5.13") else "check_finished"
        names = {kind: type(kind, (SimpleNamespace,), {}) for kind in KINDS} | {"re": re, "HTTPStatus": HTTPStatus}
        taken = {m: take(fetch(version), names, f"Req.{m}", BATCH) for m in (self.name, *METHODS, *OF_STOPS)}
        self.kind = type("Req", (), {m: method for m, method in taken.items() if method is not None})
        self.stock = getattr(self.kind, self.name)
        is_older = not since(version, "0.5.14")
        self.ours = (first_stops.replace_older_update if is_older else first_stops.replace_update)(self.stock)

    def request(self, *, strings=(), patterns=(), ids=None, max_tokens=40, **given):
        made = self.kind()
        lengths = {"stop_str_max_len": max(map(len, strings), default=0), "stop_regex_max_len": 9 if patterns else 0}
        made.sampling_params = SimpleNamespace(
            **lengths, max_new_tokens=max_tokens, ignore_eos=False, stop_token_ids=ids,
            stop_strs=list(strings), stop_regex_strs=list(patterns),
        )  # fmt: skip
        made.finished = lambda: made.finished_reason is not None
        made.finished_reason = made.finished_len = made.to_finish = made.grammar = None
        made.tokenizer, made.eos_token_ids, made.vocab_size = Tokenizer(), {END}, len(TEXTS)
        made.output_ids, made.decoded_text, made.rid = array("q"), "", "a request"
        vars(made).update(given)
        return made

    def told(self, tokens, steps, update, **asked):
        """(kind, what ended it, how many tokens are told, their text), the request."""
        request, rest = self.request(**asked), list(tokens)
        for length in steps:
            step, rest = rest[:length], rest[length:]
            request.output_ids.extend(step)
            update(request, len(step))
            assert request.finished() or request.finished_len is None, "all of what goes on is told"
            if not rest or request.finished():
                break
        ids = request.output_ids[: request.finished_len]
        reason = request.finished_reason
        return (type(reason).__name__, getattr(reason, "matched", None), len(ids), Tokenizer().decode(ids)), request


def asked_of(draw):
    return {
        "strings": draw.choice(STRINGS),
        "patterns": draw.choice(PATTERNS),
        "ids": draw.choice([None, None, [5]]),
        "max_tokens": draw.choice([5, 7, 12, 30]),
    }


@pytest.mark.usefixtures("opened")
@every_release()
def test_a_step_ends_where_its_tokens_one_by_one_would(version):
    """Whatever is asked for, and however many tokens a step brings: random ones, with an unknown one at times."""
    answers, draw, wrong = Answers(version), random.Random(5), []
    for _ in range(150):
        tokens = [draw.randrange(len(TEXTS) + (draw.random() < 0.1)) for _ in range(30)]
        steps, asked = [1, *(draw.randint(1, 5) for _ in tokens)], asked_of(draw)
        alone, _ = answers.told(tokens, [1] * len(tokens), answers.stock, **asked)
        assert alone == answers.told(tokens, steps, answers.ours, **asked)[0]
        stock, _ = answers.told(tokens, steps, answers.stock, **asked)
        wrong.append(alone != stock)
    assert sum(wrong) > 10  # so the row is needed


PARIS = [1, 2, 3, 5, 4]  # b, "," " c" "d." "\n"


@pytest.mark.usefixtures("opened")
@every_release()
def test_a_stop_in_front_of_another(version):
    answers, asked = Answers(version), {"strings": ["\n", ".", ","]}
    stock, _ = answers.told(PARIS, [1, 3, 1], answers.stock, **asked)
    (*told, text), request = answers.told(PARIS, [1, 3, 1], answers.ours, **asked)
    assert told == ["FINISH_MATCHED_STR", ",", 2] and text == "b,"
    assert stock[1] == "." and stock[3].startswith("b, cd.")
    assert request.output_ids == array("q", PARIS[:4])  # all that the step brought: its log-probabilities are counted


@pytest.mark.usefixtures("opened")
@every_release()
def test_a_pattern_that_holds_in_the_midst_of_a_step(version):
    """And no longer behind its last token; no string is asked for."""
    answers, tokens = Answers(version), [3, 1, 3, 8]
    told, _ = answers.told(tokens, [3, 1], answers.ours, patterns=["b+$"])
    assert told[0] == "FINISHED_MATCHED_REGEX" and told[2:] == (2, " cb")
    stock, _ = answers.told(tokens, [3, 1], answers.stock, patterns=["b+$"])
    assert stock[2] == (2 if since(version, "0.5.23") else 4)  # so the row is needed


@pytest.mark.usefixtures("opened")
@every_release()
def test_an_end_and_a_stop_in_one_step(version):
    """SGLang looks for the stop first from 0.5.14 on, before for the end."""
    answers, end_first, stop_first = Answers(version), [1, END, 10, 8], [1, 8, 10, END]

    def told(tokens, update):
        return answers.told(tokens, [1, 3], update, strings=[":"])[0]

    assert told(end_first, answers.ours) == ("FINISH_MATCHED_TOKEN", END, 2, "b")
    assert told(stop_first, answers.ours) == ("FINISH_MATCHED_STR", ":", 2, "b:")
    if since(version, "0.5.14"):
        assert told(end_first, answers.stock) == ("FINISH_MATCHED_STR", ":", 4, "be:")
    else:
        assert told(stop_first, answers.stock) == ("FINISH_MATCHED_TOKEN", END, 4, "b:e")


@pytest.mark.usefixtures("opened")
@every_release("0.5.14")
def test_a_grammar_has_taken_the_whole_step(version):
    """It ends with the step's last token, to which SGLang has cut the step."""
    answers, complete = Answers(version), SimpleNamespace(is_terminated=lambda: True)
    told, _ = answers.told([1, 3, 10], [3], answers.ours, grammar=complete, strings=[":"])
    assert told == ("FINISH_MATCHED_TOKEN", 10, 3, "b ce")
    told, request = answers.told([1, 8, 10], [3], answers.ours, grammar=complete, strings=[":"])
    assert told == ("FINISH_MATCHED_STR", ":", 2, "b:") and request.grammar is complete


@pytest.mark.usefixtures("opened")
@every_release()
def test_a_stop_in_the_text_that_is_decoded_already(version):
    """Of which SGLang says no length: the answer has the token that was looked at."""
    told, request = Answers(version).told([1, 3, 10], [3], Answers(version).ours, strings=[":"], decoded_text="b:")
    assert told[:3] == ("FINISH_MATCHED_STR", ":", 1) and len(request.output_ids) == 3


@pytest.mark.usefixtures("opened")
@every_release()
def test_one_token_and_what_is_aborted_are_sglangs(version):
    answers, seen = Answers(version), []
    ours = first_stops.replace_update(lambda request, *given: seen.append(given) or answers.stock(request, *given))
    request = answers.request(strings=[":"])
    request.output_ids.extend([1])
    ours(request)
    assert seen.pop() == (1,) and not seen
    request.output_ids.extend([1, 1])
    ours(request, 2)
    assert seen.pop() == (2,) and not seen, "a step that does not end is asked once"
    request.output_ids.extend([8, 1])
    request.to_finish = "aborted"
    ours(request, 2)
    assert seen.pop() == (2,) and not seen and request.finished_reason == "aborted"
    ours(request, 2)
    assert seen.pop() == (2,) and not seen


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_steps_end_as_sglangs(model, card, opened):
    opened(model, card)
    answers = Answers("0.5.23")
    updates, asked = (answers.ours, answers.stock), {"strings": ["\n", ".", ","]}
    ours, stock = (answers.told(PARIS, [1, 3, 1], update, **asked)[0] for update in updates)
    assert ours == stock and ours[1] == "."


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
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    of_others = SimpleNamespace(reasoning_tokens=[5], completion_tokens=[3])
    assert asyncio.run(thought_counts.replace_handle(hand_on)(None, copy.deepcopy(of_others))) == of_others


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
