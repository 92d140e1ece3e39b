"""A prompt's log-probabilities in pieces: each release's own logits processor over random passes on the CPU, with ours
in pieces and SGLang's own, beside its own of all rows at once."""

import dataclasses
import functools
import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.sglang_patches.fixes.logprob_pieces import replace_by_chunk, replace_init
from deepseek_v4_sm120.sglang_patches.rows.sampling import LOGITS
from tests.patching.test_wheel_wo_a import Quiet, take
from tests.patching.wheels import RELEASES, fetch, since

BROKEN = [version for version in RELEASES if not since(version, "0.5.16")]
MODULE, UTILITIES = LOGITS.partition(":")[0], "sglang.srt.layers.utils.logprob"
VOCABULARY, HIDDEN = 11, 4
WRONG = 9  # a pass that SGLang's own pieces tell wrongly
HEAD = torch.randint(-4, 5, (HIDDEN, VOCABULARY), generator=torch.Generator().manual_seed(0)).float()
FUNCTIONS = ("InputLogprobsResult", "get_top_logprobs_raw", "get_top_logprobs_prefill")
FUNCTIONS += ("get_top_logprobs_chunk",)
FUNCTIONS += ("get_token_ids_logprobs_raw", "get_token_ids_logprobs_prefill", "get_token_ids_logprobs_chunk")
HEADLESS = SimpleNamespace()
METHODS = ("forward", "_get_pruned_states", "process_input_logprobs", "process_input_logprobs_by_chunk")
METHODS += ("_expand_metadata_for_logprobs",)  # 0.5.12 and 0.5.13
EXTEND = SimpleNamespace(**{f"is_{name}": lambda: False for name in ("decode_or_idle", "target_verify", "dllm_extend")})
EXTEND.is_draft_extend_v2, EXTEND.is_extend = (lambda: False), (lambda: True)

pytestmark = [pytest.mark.usefixtures("opened"), pytest.mark.parametrize("version", BROKEN, scope="module")]


def a_pass(seed):
    """(hidden states, metadata) of some prompts, of which a part asks, for tokens, alternatives, or some of its own."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 7) for _ in range(draw.randint(1, 5))]
    starts = [draw.choice((0, length, draw.randint(0, length))) for length in lengths]
    starts[draw.randrange(len(starts))] = 0
    made = SimpleNamespace(forward_mode=EXTEND, extend_return_logprob=True, mm_input_embeds=None)
    made.extend_logprob_start_lens_cpu, made.is_prefill_only = starts, False
    made.extend_seq_lens_cpu, made.temp_scaled_logprobs, made.top_p_normalized_logprobs = lengths, False, False
    asked = made.extend_logprob_pruned_lens_cpu = [n - start for n, start in zip(lengths, starts, strict=True)]
    made.top_logprobs_nums = [draw.randint(0, 3) for _ in lengths]
    made.token_ids_logprobs = [draw.sample(range(VOCABULARY), draw.randint(0, 3)) for _ in lengths]
    made.extend_return_top_logprob, made.extend_token_ids_logprob = any(made.top_logprobs_nums), draw.random() < 0.7
    tokens = [draw.randrange(VOCABULARY) for _ in range(sum(asked))]
    made.extend_input_logprob_token_ids_gpu = torch.tensor(tokens, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (sum(lengths), HIDDEN), generator=generator).float(), made


class Torch:
    """torch, on a machine that pins no memory."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def tensor(self, *args, pin_memory=False, **kwargs):
        return torch.tensor(*args, **kwargs)


class Processor:
    """What a release's LogitsProcessor brings, but for the head, of which is noted how many rows it was given each
    time, and how many of its results were there at once."""

    def __init__(self):
        self.enable_logprobs_chunk, self.logprobs_chunk_size = False, 2048
        self.do_tensor_parallel_all_gather_dp_attn = self.enable_mis = False
        self.rows, self.alive, self.most = [], weakref.WeakSet(), 0

    def _get_hidden_states_to_store(self, *_):
        return None

    def _get_logits(self, states, head, metadata):
        logits = states @ HEAD
        self.alive.add(logits)
        self.rows, self.most = [*self.rows, len(states)], max(self.most, len(self.alive))
        return logits


@functools.cache
def of_release(version, ours):
    names = {"torch": Torch(), "dataclasses": dataclasses, "LogitsProcessorOutput": SimpleNamespace}
    names |= {"ForwardBatch": Quiet, "LogprobStage": SimpleNamespace(DECODE="decode", PREFILL="prefill")}
    names["compute_temp_top_p_normalized_logprobs"] = lambda logits, *_: torch.log_softmax(logits, -1)
    for name in FUNCTIONS:
        take(fetch(version), names, name, UTILITIES)
    methods = {name: take(fetch(version), names, f"LogitsProcessor.{name}", MODULE) for name in METHODS}
    if ours:
        methods["__init__"] = replace_init(Processor.__init__)
        methods["process_input_logprobs_by_chunk"] = replace_by_chunk(methods["process_input_logprobs_by_chunk"])
    return type("OfRelease", (Processor,), methods)


def processor(version, *, pieces=None, ours=False):
    """pieces: the rows of one; None: SGLang's default, which is all at once without ours."""
    made = of_release(version, ours)()
    made.enable_logprobs_chunk |= pieces is not None and not ours
    made.logprobs_chunk_size = pieces or made.logprobs_chunk_size
    return made


def told(made, seed, head=HEADLESS):
    states, metadata = a_pass(seed)
    found = vars(made.forward(None, states, head, metadata))
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in found.items()}


def test_pieces_tell_what_all_rows_at_once_do(version):
    whole, told_wrongly, several = processor(version), 0, 0
    for seed in range(14):
        expected, rows = told(whole, seed), whole.rows[-1]
        for pieces in (1, 3):
            ours = processor(version, pieces=pieces, ours=True)
            assert told(ours, seed) == expected, (seed, pieces)
            assert ours.rows == [pieces] * (rows // pieces) + [rows % pieces] * (rows % pieces > 0)
            assert ours.most == 1  # the logits of one piece are gone before those of the next are made
            several += len(ours.rows) > 1
        told_wrongly += told(processor(version, pieces=3), seed) != expected
    assert several > 14 and told_wrongly > 1  # so SGLang's own would not do


def test_what_is_told_is_the_tokens_own(version):
    states, metadata = a_pass(3)
    found, made = told(processor(version, pieces=2, ours=True), 3), torch.log_softmax(states @ HEAD, -1)
    tokens, expected, begin = iter(metadata.extend_input_logprob_token_ids_gpu.tolist()), [], 0
    for n, start in zip(metadata.extend_seq_lens_cpu, metadata.extend_logprob_start_lens_cpu, strict=True):
        expected += [made[begin + row, next(tokens)].item() for row in range(start, n)]
        begin += n
    assert expected and found["input_token_logprobs"] == pytest.approx(expected)
    last = [sum(metadata.extend_seq_lens_cpu[: i + 1]) - 1 for i in range(len(metadata.extend_seq_lens_cpu))]
    assert found["next_token_logits"] == (states @ HEAD)[last].tolist()


def test_in_one_piece_it_is_sglangs(version):
    ours = processor(version, ours=True)
    assert ours.enable_logprobs_chunk and told(ours, 5) == told(processor(version), 5) and len(ours.rows) == 1


def test_an_adapter_of_the_head_counts_sglangs_own_pieces(version):
    begun, head = [], SimpleNamespace(set_lm_head_pass=lambda i: begun.append(i), reset_lm_head_pass=lambda: None)
    told(processor(version, pieces=3, ours=True), 0, head)
    assert begun[:2] == [0, 1]


@pytest.mark.parametrize(("model", "card"), [("deepseek_v4", False), ("llama", True), (None, True)])
def test_elsewhere_it_stays_sglangs(version, model, card, opened):
    opened(model, card)
    ours = processor(version, pieces=3, ours=True)
    assert not ours.enable_logprobs_chunk
    told(ours, WRONG)
    assert len(ours.rows) == 1
    ours.enable_logprobs_chunk = True  # the user's own variable
    found = told(ours, WRONG)
    assert found == told(processor(version, pieces=3), WRONG) != told(processor(version), WRONG)
