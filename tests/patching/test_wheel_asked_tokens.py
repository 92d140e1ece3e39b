"""Requests with token_ids_logprob beside others: each release's own numbers of a step and of a prompt, by its sampler
and by EAGLE's verification, and its own reading of them on the CPU, with ours and without."""

from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.asked_tokens import replace_raw
from deepseek_v4_sm120.sglang_patches.rows.sampling import ASKED_TOKENS, RESULTS
from tests.patching.test_wheel_wo_a import QUIET, take
from tests.patching.wheels import every_release, fetch, since

MENDED, PROMPTS_MENDED, READ_APART = "0.5.21", "0.5.16", "0.5.14"
ASKED = (None, [3, 5], [0], None)  # by request; a row of logits each, and of EAGLE's blocks WIDTH
VOCABULARY, WIDTH = 8, 3
DECODE, PREFILL = "decode", "prefill"

pytestmark = pytest.mark.usefixtures("opened")


def module_of(version):
    return ASKED_TOKENS.targets[since(version, "0.5.16")].where.partition(":")[0]


def logprobs(rows):
    return torch.log_softmax(torch.arange(float(rows * VOCABULARY)).view(rows, -1).sin(), -1)


def names_of(version, *, ours):
    """A release's module, as far as these numbers go."""
    names = {"torch": torch, "LogprobStage": SimpleNamespace(DECODE=DECODE, PREFILL=PREFILL)}
    names |= {"envs": SimpleNamespace(SGLANG_RETURN_ORIGINAL_LOGPROB=SimpleNamespace(get=lambda: False))}
    names["is_pin_memory_available"] = lambda device=None: False
    raw = take(fetch(version), names, "get_token_ids_logprobs_raw", module_of(version))
    names["get_token_ids_logprobs_raw"] = replace_raw(raw) if ours else raw
    take(fetch(version), names, "get_token_ids_logprobs", module_of(version))
    return names


def of_step(version, *, ours):
    """As the sampler asks."""
    return names_of(version, ours=ours)["get_token_ids_logprobs"](logprobs(len(ASKED)), ASKED, no_copy_to_cpu=True)


def of_blocks(version, *, ours):
    """By EAGLE's verification, all of whose rows are taken."""
    names, rows = names_of(version, ours=ours), len(ASKED) * WIDTH
    name = "compute_spec_logprobs" if since(version, "0.5.18") else "compute_spec_v2_logprobs"
    compute = take(fetch(version), names, name, module_of(version))
    batch = SimpleNamespace(seq_lens=torch.ones(len(ASKED)), top_logprobs_nums=None, token_ids_logprobs=ASKED)
    batch.sampling_info = SimpleNamespace(is_all_greedy=True)
    places, output = torch.arange(rows).view(-1, WIDTH), SimpleNamespace(next_token_logits=logprobs(rows))
    more = {} if since(version, "0.5.18") else {"speculative_num_steps": WIDTH - 1}
    compute(batch, output, torch.zeros(rows, dtype=torch.int32), accept_index=places, **more)
    return output.next_token_token_ids_logprobs_val, output.next_token_token_ids_logprobs_idx


def of_prompts(version, *, ours):
    """Of each prompt's two tokens, as the logits processor asks."""
    raw, rows = names_of(version, ours=ours)["get_token_ids_logprobs_raw"], 2 * len(ASKED)
    return raw(logprobs(rows), ASKED, PREFILL, extend_logprob_pruned_lens_cpu=[2] * len(ASKED))


def read(version, values, name):
    """What the release makes of them on the host."""
    output = SimpleNamespace(next_token_logprobs=torch.zeros(1), input_token_logprobs=None)
    output.next_token_top_logprobs_val, output.next_token_token_ids_logprobs_val = None, values
    output.finalize_input_logprobs = lambda: None
    method = take(fetch(version), {"torch": torch}, f"SchedulerBatchResultProcessor.{name}", RESULTS.partition(":")[0])
    batch = SimpleNamespace(return_logprob=True, spec_algorithm=SimpleNamespace(is_none=lambda: True))
    more = {"result": QUIET, "next_token_ids": torch.zeros(1)} if name == "_normalize_decode_outputs" else {}
    method(QUIET, batch=batch, logits_output=output, **more)
    return output.next_token_token_ids_logprobs_val


def expected(width=1):
    """Of each row: nothing, or of its tokens."""
    rows = logprobs(len(ASKED) * width)
    return [rows[row, ASKED[row // width] or []].tolist() for row in range(len(rows))]


@every_release()
@pytest.mark.parametrize(("numbers", "width"), [(of_step, 1), (of_blocks, WIDTH)])
def test_who_asks_for_tokens_may_have_others_beside_him(version, numbers, width):
    values, tokens = numbers(version, ours=not since(version, MENDED))
    assert all(map(torch.is_tensor, values))
    told = [value.tolist() for value in values]
    assert told == expected(width) and tokens == [asked or [] for asked in ASKED for _ in range(width)]
    if since(version, READ_APART):
        for name in ("move_logprobs_to_cpu", "_normalize_decode_outputs"):
            assert read(version, values, name) == told


@every_release()
@pytest.mark.parametrize("numbers", [of_step, of_blocks])
def test_without_ours_it_ends_the_server(version, numbers):
    values, _ = numbers(version, ours=False)
    if since(version, MENDED):
        assert all(map(torch.is_tensor, values))
        return
    assert [torch.is_tensor(value) for value in values[:: len(values) // len(ASKED)]] == [False, True, True, False]
    if since(version, READ_APART):
        for name in ("move_logprobs_to_cpu", "_normalize_decode_outputs"):
            with pytest.raises(AttributeError, match="tolist"):
                read(version, values, name)


@every_release()
def test_prompts_beside_each_other(version):
    if since(version, MENDED):
        return
    rows, (values, tokens) = logprobs(2 * len(ASKED)), of_prompts(version, ours=True)
    for place, asked in enumerate(ASKED):
        if asked is not None:  # nobody looks at the others' (each release's logprob_result_processor)
            assert values[place] == rows[2 * place : 2 * place + 2, asked].tolist() and tokens[place] == [asked, asked]
    if not since(version, PROMPTS_MENDED):
        with pytest.raises((TypeError, RuntimeError)):
            of_prompts(version, ours=False)


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(model, card, opened):
    opened(model, card)
    assert [torch.is_tensor(value) for value in of_step("0.5.20", ours=True)[0]] == [False, True, True, False]
