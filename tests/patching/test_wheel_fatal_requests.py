"""Values of one request's that end the server: what each release's own front takes, what its scheduler's own code does
with them on the CPU, and what ours answers."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches import models_served
from deepseek_v4_sm120.sglang_patches.fixes import fatal_requests
from deepseek_v4_sm120.sglang_patches.rows.http_server import TOKENIZER_MANAGER
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import content, every_release, fetch, members, since

SIZE, MODULE = 12, TOKENIZER_MANAGER.partition(":")[0]
PARAMS, INFO = "sglang.srt.sampling.sampling_params", "sglang.srt.sampling.sampling_batch_info"
GENERATE = {"return_logprob": True, "top_logprobs_num": 0, "logprob_start_len": -1, "token_ids_logprob": None}
GENERATE |= {"session_params": None}
PLAIN = dict(temperature=1.0, top_p=1.0, top_k=5, min_p=0.0, sampling_seed=None, logit_bias=None, stream_interval=None)
PLAIN |= dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0, max_new_tokens=5)
PLAIN |= dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "beam_width", "custom_params"))
FATAL = [{"top_k": 2**31}, {"top_k": 10**12}, {"logit_bias": {"3": "x"}}, {"logit_bias": {"3": None}}]
FATAL += [{"logit_bias": [3]}, {"max_new_tokens": 5.5}, {"stream_interval": "2"}]


pytestmark = pytest.mark.usefixtures("served_card")


def asks(version, params=None, *, ours, ids=(1, 2, 3), **asked):
    """The request's params behind the release's own front; it raises ValueError where it is refused."""
    names = {"isinstance": lambda one, kind: not (kind is QUIET or isinstance(kind, tuple)) and isinstance(one, kind)}
    method = take(fetch(version), names, "TokenizerManager._validate_one_request", MODULE)
    method = fatal_requests.replace_validate(method) if ours else method
    manager = SimpleNamespace(context_len=100, num_reserved_tokens=0, validate_total_tokens=False)
    manager.model_config = SimpleNamespace(vocab_size=SIZE)
    manager._validate_joint_schema_request = manager._validate_mm_limits = lambda *_: None
    params = {} if params is None else params
    method(manager, SimpleNamespace(sampling_params=params, **GENERATE | asked), ids)
    return params


def verified(version, params):
    """By the release's own SamplingParams.verify."""
    verify = take(fetch(version), {"math": math}, "SamplingParams.verify", PARAMS)
    verify(SimpleNamespace(**PLAIN | params), SIZE)


def batch_of(version, params):
    """The release's own SamplingBatchInfo of such a request."""
    names = {"torch": torch, "is_pin_memory_available": lambda *_: False, "TOP_K_ALL": 1 << 30}
    names["isinstance"] = lambda one, kind: kind is not QUIET and isinstance(one, kind)
    names["_rows_to_device_indices"] = lambda rows, *_: torch.tensor(rows)
    make = take(fetch(version), names, "SamplingBatchInfo.from_schedule_batch", INFO).__func__
    request = SimpleNamespace(sampling_params=SimpleNamespace(**PLAIN | params), custom_logit_processor=None)
    request.return_sampling_mask, request.sampling_logprobs_mode = False, "selected"
    kind = type("Info", (SimpleNamespace,), {"adjusted_from_schedule_batch": lambda *_: None})
    kind._make_sampling_mask_batch_indices = kind._make_sampling_support_logprobs_capture_indices = lambda *_: None
    return make(kind, SimpleNamespace(reqs=[request], device="cpu"), SIZE)


@every_release()
@pytest.mark.parametrize("params", FATAL[:5], ids=str)
def test_what_ends_the_scheduler_at_a_batch(version, params):
    asks(version, dict(params), ours=False)
    verified(version, params)
    with pytest.raises((RuntimeError, TypeError, ValueError, AttributeError)):  # so the row is needed
        batch_of(version, params)
    if "top_k" in params:
        batch_of(version, asks(version, dict(params), ours=True))
    else:
        with pytest.raises(ValueError, match="logit_bias has to be"):
            asks(version, dict(params), ours=True)


@every_release()
def test_what_ends_it_at_an_answer(version):
    """A length of 5.5 tokens, and the tokens up to it (test_wheel_ends.py); an interval that numbers are compared
    with."""
    for params in FATAL[5:]:
        asks(version, dict(params), ours=False)
        verified(version, params)  # so the row is needed
        with pytest.raises(ValueError, match="has to be a whole number"):
            asks(version, dict(params), ours=True)


@every_release()
def test_whole_numbers_with_a_point_are_whole_numbers_and_1_is_true(version):
    """Where the answer's tokens are asked for up to them, 5.0 ends it as 5.5 does."""
    given = {"max_new_tokens": 5.0, "top_k": 50.0, "min_new_tokens": 2, "stream_interval": None}
    taken = asks(version, dict(given), ours=True)
    assert taken == {"max_new_tokens": 5, "top_k": 50, "min_new_tokens": 2, "stream_interval": None}
    assert [type(taken[name]) for name in ("max_new_tokens", "top_k")] == [int, int]
    assert asks(version, {"top_k": 2.0**40}, ours=True) == {"top_k": -1}
    given = {"ignore_eos": 1, "skip_special_tokens": 0, "no_stop_trim": None}
    taken = asks(version, given, ours=True)
    assert (taken["ignore_eos"], taken["skip_special_tokens"], taken["no_stop_trim"]) == (True, False, None)
    assert type(taken["ignore_eos"]) is type(taken["skip_special_tokens"]) is bool
    for number in (math.inf, math.nan, 0.5):
        with pytest.raises(ValueError, match="top_k has to be a whole number"):
            asks(version, {"top_k": number}, ours=True)


@every_release()
def test_more_log_probabilities_than_tokens(version):
    new = since(version, "0.5.16")
    module = "sglang.srt.layers.logprob_processor" if new else "sglang.srt.layers.utils.logprob"
    names = {"LogprobStage": SimpleNamespace(DECODE=1, PREFILL=2)}
    top = take(fetch(version), names, "get_top_logprobs_raw", module)
    top(torch.zeros(1, SIZE), [SIZE], stage=1)
    with pytest.raises(RuntimeError, match="out of range"):  # so the row is needed
        top(torch.zeros(1, SIZE), [SIZE + 1], stage=1)
    for number in (None, 0, 5, SIZE):
        asks(version, ours=True, top_logprobs_num=number)
    asks(version, ours=False, top_logprobs_num=10**6)
    with pytest.raises(ValueError, match="13 log-probabilities for a token"):
        asks(version, ours=True, top_logprobs_num=SIZE + 1)


def dealt_out(version, start):
    """By the release's own code: a prompt of four tokens, all of which were computed, from `start` on."""
    module, kind = "scheduler_components.logprob_result_processor", "SchedulerLogprobResultProcessor"
    if not since(version, "0.5.13"):
        module, kind = "scheduler_output_processor_mixin", "SchedulerOutputProcessorMixin"
    methods = {
        name: take(fetch(version), {"isinstance": isinstance}, f"{kind}.{name}", f"sglang.srt.managers.{module}")
        for name in (
            *("add_input_logprob_return_values", "_calculate_relevant_tokens_len", "_process_input_token_logprobs"),
            *("_process_input_top_logprobs", "_process_input_token_ids_logprobs", "_is_multi_item_scoring"),
            *("_scoring_positions", "_uses_scoring_positions"),
        )
    }
    made = type(kind, (), {name: method for name, method in methods.items() if method})()
    made.model_config, made.server_args = SimpleNamespace(vocab_size=SIZE), QUIET
    request = Request(origin_input_ids=[1, 2, 3, 4], logprob_start_len=start, return_logprob=True)
    request.logprob = request  # where up to 0.5.13 all is
    request.top_logprobs_num, request.is_prefill_only, request.return_flat_raw_top_logprobs = 0, False, False
    output = SimpleNamespace(input_token_logprobs=(0.0, 1.0, 2.0, 3.0))
    made.add_input_logprob_return_values(0, request, output, 0, 4, last_prefill_chunk=True)
    return request.input_token_logprobs_val


class Request(SimpleNamespace):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


@every_release()
def test_places_in_front_of_the_prompt(version):
    assert dealt_out(version, 0) == [None, 0.0, 1.0, 2.0]
    with pytest.raises(AssertionError):  # so the row is needed: of two tokens there are four
        dealt_out(version, -2)
    for place in (None, -1, 0, 3):
        asks(version, ours=True, logprob_start_len=place)
    asks(version, ours=False, logprob_start_len=-2)
    with pytest.raises(ValueError, match="logprob_start_len is -2"):
        asks(version, ours=True, logprob_start_len=-2)


@every_release()
def test_tokens_whose_log_probabilities_are_asked_for(version):
    asks(version, ours=True, token_ids_logprob=[0, SIZE - 1])
    text = content(fetch(version), f"{MODULE.replace('.', '/')}.py")
    assert ("self._validate_token_ids_logprob(obj)" in text) == since(version, "0.5.14")
    with pytest.raises(ValueError, match="token_ids_logprob has token 12"):
        asks(version, ours=True, token_ids_logprob=[0, SIZE])


@every_release()
def test_what_is_in_order_stays_as_it_is(version):
    for params in (
        {},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"top_k": None, "max_new_tokens": None},
        {"stream_interval": 2},
    ):
        assert asks(version, dict(params), ours=True) == params
    bias = {"logit_bias": {"3": -100, 4: 1.5, "5": -math.inf}}
    assert asks(version, dict(bias), ours=True) == bias
    batch_of(version, bias)


@every_release()
def test_a_bias_that_no_logit_is_finite_with(version):
    params = {"logit_bias": {"3": math.inf, "4": -1.0}}
    asks(version, dict(params), ours=False)
    verified(version, params)
    logits = torch.zeros(1, SIZE) + batch_of(version, params).logit_bias
    names = {"torch": torch, "envs": SimpleNamespace(SGLANG_OPT_USE_GUMBEL_SAMPLE=SimpleNamespace(get=lambda: True))}
    draw = take(fetch(version), names, "sampling_from_probs_torch", "sglang.srt.layers.sampler")
    if since(version, "0.5.20"):
        assert draw(logits.softmax(-1)).tolist() == [0]  # whatever it stands for: nothing is drawn
    else:
        with pytest.raises(RuntimeError, match="probability tensor"):  # so the row is needed
            draw(logits.softmax(-1))
    for bias in (math.inf, 1e31):
        with pytest.raises(ValueError, match="logit_bias has to be numbers by tokens, up to 1e[+]30"):
            asks(version, {"logit_bias": {"3": bias}}, ours=True)
    asks(version, {"logit_bias": {"3": 1e30}}, ours=True)
    assert torch.tensor([1e30], dtype=torch.float32).div(1e-6).isfinite()  # by SGLang's least temperature


@every_release()
def test_the_request_is_made_of_what_was_looked_at(version):
    text = content(fetch(version), f"{MODULE.replace('.', '/')}.py")
    one = text.partition("async def _tokenize_one_request(")[2].partition("\n    def ")[0]
    assert 0 < one.index("self._validate_one_request(obj, input_ids)") < one.index("self._create_tokenized_object(")


@every_release()
def test_a_temperature_that_is_none(version):
    params = {"temperature": math.nan}
    if since(version, "0.5.14"):
        with pytest.raises(ValueError, match="temperature must be"):
            verified(version, params)
    else:
        verified(version, params)
        names = {"torch": torch}
        draw = take(fetch(version), names, "sampling_from_probs_torch", "sglang.srt.layers.sampler")
        with pytest.raises(RuntimeError, match="probability tensor"):  # so the row is needed
            draw((torch.zeros(1, SIZE) / batch_of(version, params).temperatures).softmax(-1))
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature has to be a finite number"):
            asks(version, {"temperature": number}, ours=True)
    for number in (0, 0.7, None):
        assert asks(version, {"temperature": number}, ours=True) == {"temperature": number}


def normalized(version, pattern, *, ours):
    """By the release's own SamplingParams.normalize, which parses patterns for their length."""
    longest = take(fetch(version), {"sre_parse": re._parser, "MAX_LEN": 1 << 30}, "_max_length_from_subpattern", PARAMS)
    names = {
        "get_max_seq_length": lambda given: longest(re._parser.parse(given)),
        "raise_if_tokenizer_required": lambda *_: None,
    }
    names |= {"MAX_STOP_COUNT": 9, "MAX_STOP_REGEX_COUNT": 9, "MAX_STOP_REGEX_LEN": 99}
    method = take(fetch(version), names, "SamplingParams.normalize", PARAMS)
    made = SimpleNamespace(stop=None, stop_regex=pattern, stop_strs=None, stop_regex_strs=pattern, min_new_tokens=0)
    (fatal_requests.replace_normalize(method) if ours else method)(made, None)
    return made


def searched(version, params):
    """By the scheduler's own code in an answer's end."""
    names = {"FINISHED_MATCHED_REGEX": dict, "FINISH_ABORT": lambda *_: "abort", "re": re}
    method = take(fetch(version), names, "Req._check_str_based_finish", "sglang.srt.managers.schedule_batch")
    made = SimpleNamespace(sampling_params=params, tail_str=lambda *_: "an answer", decoded_text="", rid="r")
    made.finished_reason, made._locate_str_stop_finished_len = None, lambda *_, **__: 3
    method(made)
    return made.finished_reason


@every_release()
def test_a_pattern_that_parses_and_does_not_compile(version):
    pattern = "(?<=a+)n"
    params = normalized(version, pattern, ours=False)
    if since(version, "0.5.17"):
        assert searched(version, params) == "abort"
        return
    with pytest.raises(re.error):  # so the row is needed
        searched(version, params)
    with pytest.raises(ValueError, match="stop_regex is no regular expression: look-behind requires"):
        normalized(version, ["n", pattern], ours=True)
    for fine in ("(?<=a)n", ["x", "ans"], None):
        stock, ours = (normalized(version, fine, ours=of) for of in (False, True))
        assert vars(ours) == vars(stock)


def test_elsewhere_a_pattern_stays_sglangs(elsewhere):
    assert normalized("0.5.16", "(?<=a+)n", ours=True).stop_regex_strs == ["(?<=a+)n"]


def test_elsewhere_it_stays_sglangs(monkeypatch):
    monkeypatch.setattr(models_served, "has_served_card", lambda: False)
    assert asks("0.5.23", {"top_k": 2**31}, ours=True, logprob_start_len=-2) == {"top_k": 2**31}


# ---- what is refused, and what is not

REFUSED = {
    "13 log-probabilities": {"top_logprobs_num": SIZE + 1},
    "-1 log-probabilities": {"top_logprobs_num": -1},
    "20 log-probabilities": {"top_logprobs_num": 20, "return_logprob": False},  # looked up with others' of the batch
    "logprob_start_len is -2": {"logprob_start_len": -2},
    "no tokens": {"ids": ()},
    "token_ids_logprob has token 12": {"token_ids_logprob": [3, SIZE]},
    "more than 64 bits": {"params": {"sampling_seed": 2**63}},
    "has more than 64 bits": {"params": {"sampling_seed": -(2**63) - 1}},
    "json_schema has to be a string": {"params": {"json_schema": {"type": "object"}}},
    "skip_special_tokens has to be true or false": {"params": {"skip_special_tokens": "no"}},
    "max_new_tokens has to be a whole number": {"params": {"max_new_tokens": 1.5}},
    "stream_interval has to be a whole number": {"params": {"stream_interval": "2"}},
    "custom_params has to be an object": {"params": {"custom_params": "x"}},
    "stop_token_ids have to be": {"params": {"stop_token_ids": [None]}},
    "logit_bias has to be": {"params": {"logit_bias": {"1": None}}},
    "logit_bias has to be numbers": {"params": {"logit_bias": {"1": math.nan}}},
}
FINE = (
    {"top_logprobs_num": SIZE},
    {"top_logprobs_num": None, "logprob_start_len": None, "return_logprob": False},
    {"logprob_start_len": 0, "token_ids_logprob": [0, SIZE - 1]},
    {"ids": None},  # embeddings in place of tokens
    {"ids": (), "session_params": {"id": "s"}},  # the session has them
    {"params": {"sampling_seed": -(2**63), "max_new_tokens": 5, "top_k": None, "skip_special_tokens": False}},
    {"params": {"sampling_seed": 2**63 - 1}},
    {"params": {"json_schema": "{}", "stop_token_ids": [3], "logit_bias": {"1": 2, "3": -0.5}, "custom_params": {}}},
)


@every_release()
def test_requests_that_fit_no_answer_are_refused(version):
    for words, request in REFUSED.items():
        assert asks(version, ours=False, **request) == request.get("params", {})  # so the row is needed
        with pytest.raises(ValueError, match=words):
            asks(version, ours=True, **request)
    for request in FINE:
        assert asks(version, ours=True, **request) == request.get("params", {})


OF_ONE_KIND = {
    "true or false": ("no", ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "ignore_eos")),
    "a whole number": ("2", ("max_new_tokens", "min_new_tokens", "top_k", "n", "stream_interval", "sampling_seed")),
    "a string": ({"type": "object"}, ("json_schema", "regex", "ebnf", "structural_tag")),
    "an object": ("x", ("custom_params", "logit_bias")),
}


@pytest.mark.parametrize("kind", OF_ONE_KIND)
def test_every_one_of_a_kind_is_looked_at(kind):
    wrong, names = OF_ONE_KIND[kind]
    for name in names:
        with pytest.raises(ValueError, match=f"^{name} has to be {kind}"):
            asks("0.5.23", {name: wrong}, ours=True)


def test_of_a_request_for_embeddings_its_prompt_alone_is_looked_at():
    asked = SimpleNamespace(sampling_params=None)
    fatal_requests.refuse(asked, [1, 2], SIZE)
    fatal_requests.refuse(asked, None, SIZE)
    with pytest.raises(ValueError, match="no tokens"):
        fatal_requests.refuse(asked, [], SIZE)


def test_other_models_and_cards_take_them(elsewhere):
    for request in REFUSED.values():
        assert asks("0.5.23", ours=True, **request) == request.get("params", {})


def first_there(version, *modules):
    """The one of the modules that the release has."""
    return next(m for m in modules if f"{m.replace('.', '/')}.py" in members(fetch(version)))


@every_release()
def test_what_they_would_do(version):
    """In the scheduler, and in what makes text of tokens: an error, which nobody there catches."""
    wheel, dsv = fetch(version), "sglang.srt"
    names = {"torch": torch, "LogprobStage": SimpleNamespace(DECODE=0)}
    module = first_there(version, f"{dsv}.layers.logprob_processor", f"{dsv}.layers.utils.logprob")
    alternatives = take(wheel, names, "get_top_logprobs_raw", module)
    assert len(alternatives(torch.zeros(1, SIZE), [SIZE], 0)[1][0]) == SIZE
    with pytest.raises(RuntimeError, match="out of range"):
        alternatives(torch.zeros(1, SIZE), [SIZE + 1], 0)

    found = take(wheel, {}, "BaseGrammarBackend.get_cached_or_future_value", f"{dsv}.constrained.base_grammar_backend")
    with pytest.raises(TypeError, match="unhashable"):
        found(SimpleNamespace(cache={}), ("json", {"type": "object"}), False)

    places = (
        f"{dsv}.managers.scheduler_components.logprob_result_processor",
        (f"{dsv}.managers.scheduler_components.batch_result_processor"),
    )
    module = first_there(version, *places, f"{dsv}.managers.scheduler_output_processor_mixin")
    texts = content(wheel, f"{module.replace('.', '/')}.py")
    owner = texts[: texts.index("def _process_input_token_logprobs")].rpartition("\nclass ")[2].partition(":")[0]
    told = take(wheel, {}, f"{owner.partition('(')[0]}._process_input_token_logprobs", module)
    for start, comes_out in ((0, True), (-2, False)):
        kept = SimpleNamespace()
        req = SimpleNamespace(logprob=kept, origin_input_ids=[1, 2, 3, 4], logprob_start_len=start)
        made = SimpleNamespace(model_config=SimpleNamespace(vocab_size=SIZE))
        made._uses_scoring_positions = made._is_multi_item_scoring = lambda _: False
        told(made, req, [0.1, 0.2, 0.3, 0.4])
        kept = kept if vars(kept) else req
        assert (len(kept.input_token_logprobs_val) == len(kept.input_token_logprobs_idx)) is comes_out
