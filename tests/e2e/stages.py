"""The stages of run_stage.py: their engines, and which answers are compared.

A stage is a list of cases; a case is one start of the engine with its own patch, environment and options.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import accepted_stage  # noqa: E402
import cards_stage  # noqa: E402
import chain_stage  # noqa: E402
import drawn_stage  # noqa: E402
import experts_stage  # noqa: E402
import features_stage  # noqa: E402
import halves_stage  # noqa: E402
import products_stage  # noqa: E402
import prompts_stage  # noqa: E402
import returns_stage  # noqa: E402
import streams_stage  # noqa: E402

from deepseek_v4_sm120 import OPS as OPERATORS  # noqa: E402

# every extend row goes through the paged kernel as a decode row does, so that our call replaces it in `ops` mode:
# by default SGLang's Hopper path gathers an extend's history and calls flash_mla_sparse_fwd, which is not our seam
PAGED_EXTEND = {"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0"}
OPS = {"DSV4_SM120_FORCE": "ops"}
# a prefill chunk of 8,192 rows would gather its keys and call DeepGEMM's other logits function, which is not our seam
PAGED_INDEX = {"SGLANG_OPT_DSV4_NONPAGED_INDEXER": "0"}
# SGLang's own SM120 branches; FlashInfer's attention has no code for other chips, Triton's runs everywhere. Experts are
# Marlin's (the harness's default); dense GEMMs stay on the backend that SGLang picks for the machine
SEAMS = {"DSV4_SM120_FORCE": "seams", "SGLANG_SM120_FLASHMLA_BACKEND": "triton"}
SHADOW = {"DSV4_SM120_SHADOW": "1"}
BY_CHOICE = ("router_topk",)  # operators that are off by default
ROUTER_TOPK = "router_topk=on"

ANSWER = ["--phases", "answer", "--batches", "8", "32", "--graph-bs", "1", "8", "32", "--batch-prompts", ""]
SIX_LAYERS = ["--variant", "flash6h", "--prompts", "5,130,700,2100,8200", "--repeat", "2", "--new", "48"]
LONG_PROMPT = ["--variant", "flash6h", "--prompts", "32000", "--repeat", "2", "--new", "32"]
# three engines side by side, one with the experts twice: what the others hold must not count as a reserve
LONG = ["--variant", "flash6h", "--prompts", "2100,4100,8200", "--repeat", "2", "--new", "48", "--mem", "0.95"]
# TileLang compiles for every batch size, ten seconds each: few of them
LONG_SEAMS = ["--variant", "flash6h", "--prompts", "2100,8200", "--repeat", "1", "--new", "32", "--phases", "answer"]
LONG_SEAMS += ["--batches", "8", "--graph-bs", "1", "8", "--batch-prompts", ""]
ALL_LAYERS = ["--variant", "flash43e64"]
ALL_LAYERS_ANSWER = [*ALL_LAYERS, "--prompts", "5,700,8200", "--repeat", "1", "--new", "32"]
AT_1K = [*ALL_LAYERS, "--in-len", "1024", "--max-total-tokens", "2000000"]
TIMED = [*AT_1K, "--phases", "bench", "--bs", "1", "8", "32", "--out-len", "64", "--reps", "2"]
PROFILED = [*AT_1K, "--phases", "profile", "--bs", "1", "8"]
# two engines side by side on one GPU, one at a time when it comes to timing
SIDE_BY_SIDE = [*ALL_LAYERS, "--in-len", "1024", "--max-total-tokens", "400000", "--bs", "1", "8", "--out-len", "64"]
SIDE_BY_SIDE += ["--reps", "3"]
WHOLE = [*SIDE_BY_SIDE, "--phases", "bench", "profile", "prefill"]
# Six engines side by side. At batch 1 six experts are read, however many there are; 16 of them are all that is loaded
ONE_ROW = [*ALL_LAYERS, "--set", 'json_model_override_args="{\\"n_routed_experts\\": 16}"', "--in-len", "1024"]
ONE_ROW += ["--max-total-tokens", "20000", "--mem", "0.95", "--bs", "1", "--out-len", "64"]
ONE_ROW += ["--phases", "bench", "profile", "--reps", "4", "--rounds", "4"]
EVERY_CALL = OPS | PAGED_EXTEND | PAGED_INDEX


def sets(**arguments):
    """Arguments of the engine as options of the harness."""
    return [word for name, value in arguments.items() for word in ("--set", f"{name}={json.dumps(value)}")]


# Cards as most users have them: NCCL alone between them. Neither NVLink multicast nor a fused all-reduce
NCCL = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
TWO_CARDS, FOUR_CARDS = sets(tp_size=2, **NCCL), sets(tp_size=4, **NCCL)
CARDS_ANSWER = ["--variant", "flash6h", "--prompts", "5,700,2100,8200", "--repeat", "2", "--new", "32"]
CARDS_ANSWER += ["--phases", "answer", "--batches", "8", "--graph-bs", "1", "8", "--batch-prompts", ""]
# many engines side by side, so of 64 experts, and what the others hold must not count as a reserve
FEW_EXPERTS = {"n_routed_experts": 64}
SMALL_MODEL = [*sets(json_model_override_args=json.dumps(FEW_EXPERTS)), "--max-total-tokens", "200000", "--mem", "0.97"]
ALL_LAYERS_SMALL = [*SMALL_MODEL, *ALL_LAYERS, *sets(json_model_override_args='{"n_routed_experts": 16}')]
SUMS_ANSWER = [*CARDS_ANSWER, *SMALL_MODEL]
SUMS_ANSWER += ["--batches", "8", "32", "--graph-bs", "1", "8", "32"]
TWO_CARDS_TIMED = [*SIDE_BY_SIDE, "--phases", "bench", *TWO_CARDS]
FOUR_CARDS_TIMED = [*SIDE_BY_SIDE, "--variant", "flash43", "--phases", "bench", *FOUR_CARDS]  # all 256 experts fit
# Speculation. Random weights: hardly a draft is accepted, so a step is a token. DSPARK's drafter is made of what a
# checkpoint with one says; its weights are random as all are
DSPARK_CONFIG = {
    **{"dspark_block_size": 3, "dspark_markov_rank": 256, "dspark_noise_token_id": 2},
    **{"dspark_target_layer_ids": [1, 3, 5], "compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0]},
}


def eagle(steps):
    names = {"speculative_num_steps": steps, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1}
    return sets(speculative_algorithm="EAGLE", **names)


def dspark(**model):
    names = sets(speculative_algorithm="DSPARK", speculative_dspark_block_size=3)
    return names + sets(json_model_override_args=json.dumps(DSPARK_CONFIG | model))


DSPARK = dspark()
# behind all layers, of which the drafter's stages are more
STAGES43 = {"dspark_target_layer_ids": [40, 41, 42], "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0]}
DSPARK43 = dspark(**STAGES43)
# several engines side by side: what the others hold must not count as a reserve
TEXT = ["--variant", "flash6h", "--prompts", "5,130,700,1500", "--new", "96", "--phases", "text"]
TEXT += ["--batches", "8", "32", "--graph-bs", "1", "8", "32", "--max-total-tokens", "40000", "--mem", "0.9"]
TEXT += accepted_stage.TOKENIZER
DRAFT_HEAD = {"DSV4_SM120_SET": "draft_head=on"}
OWN_GLUE = {"DSV4_SM120_SET": "draft_head=on,greedy_argmax=off,step_tables=off"}  # what lies between is SGLang's own
SPECULATION_TIMED = [*SIDE_BY_SIDE, "--phases", "bench", "profile"]
DRAWN = ["--variant", "flash6h", "--new", "600", "--graph-bs", "1", "8", "32", "64", "--max-running", "64"]
LENGTHS_TIMED = ["--max-total-tokens", "20000", "--mem", "0.95", "--bs", "1", "--phases", "bench", "--rounds", "8"]


def sums(cards, *options):
    """With a communicator, which is asked for ours; what ours does not take is SGLang's own, by NVLink where it is."""
    return [*options, *sets(tp_size=cards, enforce_disable_flashinfer_allreduce_fusion=True)]


# SM120's choice of logits: no schedule of DeepGEMM's, so a prompt's rows are dealt. 32,000 tokens are 8,000 entries
NO_SCHEDULE = {"SGLANG_OPT_USE_TILELANG_INDEXER": "1", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
NOT_DEALT = EVERY_CALL | NO_SCHEDULE
DEALT = NOT_DEALT | {"DSV4_SM120_SET": "dealt_index=on"}
DEALT_PROMPTS = ["--variant", "flash6h", "--prompts", "20001,32000", "--repeat", "2", "--new", "32"]
DEALT_PROMPTS += ["--phases", "answer", "--batches", "--graph-bs", "1", "--batch-prompts", "", *TWO_CARDS]
DEALT_PROMPTS += ["--max-total-tokens", "400000", "--mem", "0.95"]  # two fit, and chunks their windows
DEALT_TIMED = [*SIDE_BY_SIDE, "--bs", "1", "--phases", "bench", "prefill", *TWO_CARDS]
# one order of sums, whatever the batch, the chunks and the prefix cache; SGLang's own tests retract by a variable
REPRODUCIBLE = {"DSV4_SM120_SET": "reproducible=on"}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
SAME = ["--variant", "flash6h", "--prompts", "5,130,700,2100,8200", "--new", "32", "--phases", "same"]
SAME += ["--batches", "1", "8", "32", "--graph-bs", "1", "8", "32", "--mem", "0.95"]
BY_ROUTER = ["--variant", "flash6"]  # whose routers choose: another bit may be another expert
BY_FLAG = sets(enable_deterministic_inference=True)


def chunks(rows, *more, radix=True):
    return [*SAME, "--chunk", str(rows), *(["--radix"] if radix else []), *more]


TIMED_IN_TURN = [*SIDE_BY_SIDE, "--phases", "bench"]
COST = [*SIDE_BY_SIDE, "--phases", "bench", "prefill"]
NO_PEERS = {"NCCL_P2P_DISABLE": "1"}  # NCCL over host memory: a machine whose peers do not work
HOST_SUMS = {"DSV4_SM120_SET": "all_reduce=host"}  # ours over host memory, whatever the probe would find


@dataclass(frozen=True)
class Case:
    name: str
    options: list[str]
    patched: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    takes_turns: bool = False
    limit_s: float | None = None  # its own, within the stage's

    @property
    def is_timed(self) -> bool:
        return bool({"bench", "profile", "prompts", returns_stage.PHASE} & set(self.options))


def of_cards(*model):
    """What is asked of several cards: chunks, and the text of a server that speculates."""
    return {
        **{"8192": chunks(8192, *model, radix=False), "512": chunks(512, *model)},
        **{"plain": [*TEXT, *model], "eagle314": [*TEXT, *model, *eagle(3)]},
    }


STAGES = {
    # six layers, all hash-routed: the variant whose answers can be compared
    "ops": [
        Case("stock", SIX_LAYERS + ANSWER, patched=False),
        Case("ops", SIX_LAYERS + ANSWER, environment=OPS),
        Case("ops_shadow", SIX_LAYERS + ANSWER, environment=OPS | PAGED_EXTEND | SHADOW),
        Case("ops_paged", SIX_LAYERS + ANSWER, environment=OPS | PAGED_EXTEND),
    ],
    # one prompt of 32,000 tokens: chunks of 8,192 rows, so the kernel for many rows
    "prompt32k": [
        Case("stock32k", LONG_PROMPT + ANSWER, patched=False, environment=PAGED_EXTEND),
        Case("ops32k_shadow", LONG_PROMPT + ANSWER, environment=OPS | PAGED_EXTEND | SHADOW),
        Case("ops32k", LONG_PROMPT + ANSWER, environment=OPS | PAGED_EXTEND),
    ],
    "seams": [
        Case("seams_shadow", SIX_LAYERS + ANSWER, environment=SEAMS | SHADOW),
        Case("seams", SIX_LAYERS + ANSWER, environment=SEAMS),
    ],
    # all 43 layers, 64 of the 256 experts: every layer's call, and the speed
    "shadow43": [
        Case("ops43_shadow", ALL_LAYERS_ANSWER + ANSWER, environment=OPS | PAGED_EXTEND | SHADOW),
        Case("seams43_shadow", ALL_LAYERS_ANSWER + ANSWER, environment=SEAMS | SHADOW),
    ],
    # the indexer: every selected set against stock's; and whether long prompts repeat to the last bit when all is ours
    "index": [
        Case("index_shadow", LONG + ANSWER, environment=EVERY_CALL | SHADOW),
        Case("index_a", LONG + ANSWER, environment=EVERY_CALL),
        Case("index_b", LONG + ANSWER, environment=EVERY_CALL),
    ],
    "index_seams": [Case("index_seams_shadow", LONG_SEAMS, environment=SEAMS | SHADOW)],
    "ops43": [Case("stock43", TIMED, patched=False), Case("ops43", TIMED, environment=OPS)],
    "seams43": [Case("seams43", TIMED, environment=SEAMS)],
    # everything of ours on: step times, launches, and the kernels of a prefill of 32,000 tokens, both in one run
    "whole43": [
        Case("stock43_whole", WHOLE, patched=False, takes_turns=True),
        Case("ops43_whole", WHOLE, environment=EVERY_CALL, takes_turns=True),
    ],
    # what each operator contributes to a step at batch 1: all but one on, or one by choice as well. Six engines fit the
    # GPU: --only, in two calls
    "without43": [
        Case("stock43_alone", ONE_ROW, patched=False, takes_turns=True),
        Case("ops43_alone", ONE_ROW, environment=OPS, takes_turns=True),
        *(
            Case(f"ops43_{kind}_{name}", ONE_ROW, environment=OPS | {"DSV4_SM120_SET": setting}, takes_turns=True)
            for name in OPERATORS
            for kind, setting in [("with", f"{name}=on") if name in BY_CHOICE else ("without", f"{name}=off")]
        ),
    ],
    # tensor parallelism over two cards: 32 heads a card, so prompts take the attention's stacked rows
    "tp2": [
        Case("ops_tp2_shadow", CARDS_ANSWER + TWO_CARDS, environment=EVERY_CALL | SHADOW),
        Case("ops_tp2", CARDS_ANSWER + TWO_CARDS, environment=EVERY_CALL),
    ],
    "tp2_43": [
        Case("stock43_tp2", TWO_CARDS_TIMED, patched=False, takes_turns=True),
        Case("ops43_tp2", TWO_CARDS_TIMED, environment=EVERY_CALL, takes_turns=True),
    ],
    # over four cards: 16 heads and a quarter of the experts' width a card
    "tp4": [
        Case("ops_tp4_shadow", CARDS_ANSWER + FOUR_CARDS, environment=EVERY_CALL | SHADOW),
        Case("ops_tp4", CARDS_ANSWER + FOUR_CARDS, environment=EVERY_CALL),
    ],
    "tp4_43": [
        Case("stock43_tp4", FOUR_CARDS_TIMED, patched=False, takes_turns=True),
        Case("ops43_tp4", FOUR_CARDS_TIMED, environment=EVERY_CALL, takes_turns=True),
    ],
    # the text of a server that speculates is that of one that does not; every call of a verification against stock's
    "speculation": [
        Case("plain", TEXT, environment=EVERY_CALL),
        Case("eagle112", TEXT + eagle(1), environment=EVERY_CALL),
        Case("eagle314", TEXT + eagle(3), environment=EVERY_CALL),
        Case("dspark3", TEXT + DSPARK, environment=EVERY_CALL),
        Case("eagle314_shadow", TEXT + eagle(3), environment=EVERY_CALL | SHADOW | DRAFT_HEAD),
        Case("dspark3_shadow", TEXT + DSPARK, environment=EVERY_CALL | SHADOW | DRAFT_HEAD),
        Case("stock_plain", TEXT, patched=False, environment=PAGED_EXTEND | PAGED_INDEX),
        Case("stock_eagle314", TEXT + eagle(3), patched=False, environment=PAGED_EXTEND | PAGED_INDEX),
    ],
    # the same, with drafts that are accepted: none, half of them, all
    "accepted": accepted_stage.cases(
        Case,
        [*TEXT, *sets(json_model_override_args=json.dumps(FEW_EXPERTS)), "--mem", "0.97"],
        EVERY_CALL | REPRODUCIBLE,
        {"eagle314": eagle(3), "dspark3": dspark(**FEW_EXPERTS), "eagle516": eagle(5)},
    ),
    # the same step by DSPARK, beside stock's
    "dspark43": [
        Case("stock43_dspark3", SPECULATION_TIMED + DSPARK43, patched=False, takes_turns=True),
        Case("ops43_dspark3", SPECULATION_TIMED + DSPARK43, environment=EVERY_CALL, takes_turns=True),
    ],
    # and with and without the lengths that its draft is told, for which the host waited
    "dspark_lengths43": [
        Case(
            f"lengths_{name}_dspark3",
            [*SPECULATION_TIMED, *dspark(**STAGES43, n_routed_experts=16), *LENGTHS_TIMED],
            environment=EVERY_CALL | more,
            takes_turns=True,
        )
        for name, more in (("told", {}), ("asked", {"DSV4_SM120_SET": "dspark_lengths=off"}))
    ],
    "speculation43": [
        Case("stock43_eagle314", SPECULATION_TIMED + eagle(3), patched=False, takes_turns=True),
        Case("ops43_eagle314", SPECULATION_TIMED + eagle(3), environment=EVERY_CALL, takes_turns=True),
        Case("ops43_draft_head", SPECULATION_TIMED + eagle(3), environment=EVERY_CALL | DRAFT_HEAD, takes_turns=True),
        Case(
            "ops43_glue_draft_head", SPECULATION_TIMED + eagle(3), environment=EVERY_CALL | OWN_GLUE, takes_turns=True
        ),
        Case(
            "ops43_router_draft_head",
            SPECULATION_TIMED + eagle(3),
            environment=EVERY_CALL | {"DSV4_SM120_SET": f"{DRAFT_HEAD['DSV4_SM120_SET']},{ROUTER_TOPK}"},
            takes_turns=True,
        ),
    ],
    # the sums between the cards: every one beside SGLang's own; two engines, and one prompt sent twice, to the bit;
    # then what they are worth in a step, against NCCL; both without peers; and all of SGLang's own. Three fit at once
    **{
        f"sums{n}": [
            Case(f"sums{n}_{name}", sums(n, *SUMS_ANSWER), environment=EVERY_CALL | more, takes_turns=True)
            for name, more in (("shadow", SHADOW), ("a", {}), ("b", {}))
        ]
        for n in cards_stage.WORDS
    },
    **{
        f"sums{n}_43": [
            *(
                Case(f"{name}43_sums{n}{where}", options, environment=EVERY_CALL | more, takes_turns=True)
                for name, where, options, more in (
                    ("nccl", "", timed + sets(tp_size=n, **NCCL), {}),
                    ("nccl", "_no_peers", timed + sets(tp_size=n, **NCCL), NO_PEERS),
                    ("ops", "", sums(n, *timed), {}),
                    ("ops", "_host", sums(n, *timed), NO_PEERS | HOST_SUMS),
                )
            ),
            Case(f"stock43_sums{n}", sums(n, *timed), patched=False, takes_turns=True),
        ]
        for n, timed in ((2, TIMED_IN_TURN), (4, [*TIMED_IN_TURN, "--variant", "flash43"]))
    },
    # what the ranks draw, and go on with
    "drawn2": drawn_stage.cases(Case, sums(2, *SMALL_MODEL, *DRAWN, *sets(sampling_backend="flashinfer")), EVERY_CALL),
    # a prompt's index rows dealt to two cards: beside the whole lists and stock's, then against an engine that deals
    # none, to the last bit; then the time of a prompt of 32,000 tokens with and without, over NVLink and host memory
    "index2": [
        Case("index2_shadow", DEALT_PROMPTS, environment=DEALT | SHADOW),
        Case("index2_dealt", DEALT_PROMPTS, environment=DEALT),
        Case("index2_undealt", DEALT_PROMPTS, environment=NOT_DEALT),
    ],
    "index2_43": [
        Case("index2_43_dealt", DEALT_TIMED, environment=DEALT, takes_turns=True),
        Case("index2_43_undealt", DEALT_TIMED, environment=NOT_DEALT, takes_turns=True),
        Case("index2_43_dealt_no_peers", DEALT_TIMED, environment=DEALT | NO_PEERS, takes_turns=True),
        Case("index2_43_undealt_no_peers", DEALT_TIMED, environment=NOT_DEALT | NO_PEERS, takes_turns=True),
    ],
    # to the last bit: one prompt at a time, in batches, by chunks, half from the prefix cache, retracted and resumed
    "reproducible": [
        Case("same_8192", chunks(8192, radix=False), environment=EVERY_CALL | REPRODUCIBLE),
        Case("same_2048", chunks(2048, radix=False), environment=EVERY_CALL | REPRODUCIBLE),
        Case("same_512", chunks(512), environment=EVERY_CALL | REPRODUCIBLE),
        Case("same_8192_radix", chunks(8192), environment=EVERY_CALL | REPRODUCIBLE),
        Case("same_retracted", chunks(2048), environment=EVERY_CALL | REPRODUCIBLE | RETRACTING),
        Case("same_router_8192", chunks(8192, *BY_ROUTER, radix=False), environment=EVERY_CALL | REPRODUCIBLE),
        Case("same_router_512", chunks(512, *BY_ROUTER), environment=EVERY_CALL | REPRODUCIBLE),
        Case(
            "same_router_topk",
            chunks(8192, *BY_ROUTER, radix=False),
            environment=EVERY_CALL | {"DSV4_SM120_SET": f"{REPRODUCIBLE['DSV4_SM120_SET']},{ROUTER_TOPK}"},
        ),
        # SGLang's flag beside it: other kernels, so it is compared with itself
        Case("same_flag", chunks(512, *BY_FLAG), environment=EVERY_CALL | REPRODUCIBLE),
        Case("unlike_8192", chunks(8192, radix=False), environment=EVERY_CALL),
        Case("unlike_512", chunks(512), environment=EVERY_CALL),
    ],
    # the same through SGLang's SM120 branches: TileLang compiles for every batch size
    "reproducible_seams": [
        Case("same_seams_8192", chunks(8192, radix=False), environment=SEAMS | REPRODUCIBLE),
        Case("same_seams_512", chunks(512), environment=SEAMS | REPRODUCIBLE),
    ],
    # all layers, whose routers choose; and the text of a server that speculates
    "reproducible43": [
        Case("same43_8192", chunks(8192, *ALL_LAYERS_SMALL, radix=False), environment=EVERY_CALL | REPRODUCIBLE),
        Case("same43_512", chunks(512, *ALL_LAYERS_SMALL), environment=EVERY_CALL | REPRODUCIBLE),
        Case("text43_plain", TEXT + ALL_LAYERS_SMALL, environment=EVERY_CALL | REPRODUCIBLE),
        Case("text43_eagle314", TEXT + ALL_LAYERS_SMALL + eagle(3), environment=EVERY_CALL | REPRODUCIBLE),
        Case(
            "text43_eagle314_graphs",
            TEXT + ALL_LAYERS_SMALL + eagle(3),
            environment=EVERY_CALL | {"DSV4_SM120_SET": f"{REPRODUCIBLE['DSV4_SM120_SET']},{prompts_stage.PLANNED}"},
        ),
    ],
    **cards_stage.stages(
        Case, sums, {"": of_cards(*SMALL_MODEL), "43": of_cards(*ALL_LAYERS_SMALL)}, EVERY_CALL | REPRODUCIBLE
    ),
    # what one order of sums costs
    "reproducible43_cost": [
        Case("cost43_without", COST, environment=EVERY_CALL, takes_turns=True),
        Case("cost43_reproducible", COST, environment=EVERY_CALL | REPRODUCIBLE, takes_turns=True),
    ],
    # what users combine, an engine each, small and many side by side: the same bits as without, and what became of it
    "features": features_stage.cases(
        Case, lambda is_stock: {**PAGED_EXTEND, **PAGED_INDEX, **({} if is_stock else OPS)}
    ),
    "launches43": [
        Case("stock43_launches", PROFILED, patched=False),
        Case("ops43_launches", PROFILED, environment=OPS),
        Case("seams43_launches", PROFILED, environment=SEAMS),
    ],
    # prompts' experts as on SM120, with MXFP8 activations too
    **experts_stage.stages(
        Case,
        sets(json_model_override_args=json.dumps({"n_routed_experts": experts_stage.EXPERTS})),
        ours=EVERY_CALL,
        stock=PAGED_EXTEND | PAGED_INDEX,
        shadow=SHADOW,
        seams=SEAMS,
    ),
    # the router's choice, which is ours by choice
    "router": [
        Case(
            "router_shadow",
            [*BY_ROUTER, *experts_stage.PROMPTS, "--mem", "0.95", "--phases", "answer"],
            environment=EVERY_CALL | SHADOW | {"DSV4_SM120_SET": ROUTER_TOPK},
        ),
    ],
    **chain_stage.stages(
        Case,
        TIMED_IN_TURN,
        sums,
        EVERY_CALL,
        NO_PEERS,
        graphs=prompts_stage.graph_options(sets),
        drafts=(eagle(3), DRAFT_HEAD),
    ),
    # prompts in halves that take turns, and whole: to the last bit beside our sums of few rows; timed by NCCL alone
    **halves_stage.stages(
        Case,
        [*SIDE_BY_SIDE, *TWO_CARDS],
        sums(2, *SAME, *SMALL_MODEL),
        sums(4, *SAME, *SMALL_MODEL),
        sets,
        EVERY_CALL,
        NO_PEERS,
    ),
    # where every sum has one order: behind the prefix cache, of many prompts, and the text with EAGLE
    "halves2_combined": halves_stage.combined(
        Case,
        sums(2, *SAME, *SMALL_MODEL),
        sums(2, *TEXT, *SMALL_MODEL),
        sets,
        eagle(3),
        EVERY_CALL | NO_PEERS,
        REPRODUCIBLE["DSV4_SM120_SET"],
    ),
    # a prompt's streams, dealt to the cards and whole, likewise
    **streams_stage.stages(Case, [*SIDE_BY_SIDE, *TWO_CARDS], sums(2, *SAME, *SMALL_MODEL), sets, EVERY_CALL, NO_PEERS),
    # the compressors' products dealt to the cards, and whole, with our sums
    **products_stage.stages(
        Case,
        lambda n: sums(n, *SIDE_BY_SIDE),
        lambda n: sums(n, *SAME, *SMALL_MODEL),
        lambda n: sums(n, *TEXT, *SMALL_MODEL, *eagle(3)),
        sets,
        EVERY_CALL,
        NO_PEERS,
    ),
    **prompts_stage.stages(
        Case,
        SIDE_BY_SIDE,
        chunks(8192, radix=False),
        sets,
        sums,
        eagle(3),
        EVERY_CALL,
        REPRODUCIBLE,
        NO_PEERS | HOST_SUMS,
    ),
}
# With dummy weights a patched engine fills wo_a as E4M3 and scales, an unpatched one as bf16: what is compared with an
# unpatched run needs a harness that fills the same numbers, or DSV4_SM120_SET=wo_a=off; shadow mode needs neither.
# (what, this run, against that run); the same kernel twice is the yardstick of what rounding does to the answers
DIFFERENCES = [
    ("all ours, two processes: 0 if every kernel is reproducible", "index_b", "index_a"),
    ("all ours against stock, long prompts", "index_a", "index_shadow"),
    ("ours against stock, SGLang's default extend", "ops", "stock"),
    ("ours against stock, paged extend", "ops_paged", "ops_shadow"),
    ("yardstick: stock's paged extend against stock's sparse_fwd extend", "ops_shadow", "stock"),
    ("ours against stock, 32,000 tokens, paged extend", "ops32k", "stock32k"),
    ("yardstick: the same stock kernels twice, 32,000 tokens", "ops32k_shadow", "stock32k"),
    ("ours against stock, two cards", "ops_tp2", "ops_tp2_shadow"),
    ("index rows dealt to two cards, against none dealt: 0", "index2_dealt", "index2_undealt"),
    *((f"our sums, {cards}, two processes: 0", f"sums{n}_b", f"sums{n}_a") for n, cards in cards_stage.WORDS.items()),
    *(
        (f"our sums against SGLang's, {cards}", f"sums{n}_a", f"sums{n}_shadow")
        for n, cards in cards_stage.WORDS.items()
    ),
    ("ours against stock, four cards", "ops_tp4", "ops_tp4_shadow"),
    ("ours against stock Triton, SM120 branches", "seams", "seams_shadow"),
    ("yardstick: stock's SM120 branches against stock's Hopper path", "seams_shadow", "stock"),
    *experts_stage.DIFFERENCES,
]
# (what, the run that speculates, the one that does not): greedy text
TEXTS = [
    *accepted_stage.TEXTS,
    ("EAGLE, 1 draft", "eagle112", "plain"),
    ("EAGLE, 3 drafts", "eagle314", "plain"),
    ("DSPARK, a block of 3", "dspark3", "plain"),
    ("EAGLE, 3 drafts, 43 layers", "text43_eagle314", "text43_plain"),
    ("EAGLE, 3 drafts, 43 layers, prefill graphs", "text43_eagle314_graphs", "text43_plain"),
    *cards_stage.TEXTS,
    *halves_stage.TEXTS,
    *products_stage.TEXTS,
    ("yardstick: stock, EAGLE, 3 drafts", "stock_eagle314", "stock_plain"),
]


# (what, the run, the one that it is compared with): every log-probability to the last bit. A run that is compared with
# itself: repeated prompts, and groups of 8 and 32 with one at a time
WITHIN = "in batches, behind its first half, and once more"
SAMES = [
    ("chunks of 2,048", "same_2048", "same_8192"),
    ("chunks of 512, prefix cache", "same_512", "same_8192"),
    ("prefix cache", "same_8192_radix", "same_8192"),
    ("retracted, chunks of 2,048, prefix cache", "same_retracted", "same_8192"),
    ("routers that choose, chunks of 512, prefix cache", "same_router_512", "same_router_8192"),
    ("the router's choice, ours and SGLang's", "same_router_topk", "same_router_8192"),
    (f"SGLang's flag, {WITHIN}", "same_flag", "same_flag"),
    ("SM120 branches, chunks of 512, prefix cache", "same_seams_512", "same_seams_8192"),
    ("43 layers, chunks of 512, prefix cache", "same43_512", "same43_8192"),
    *cards_stage.SAMES,
    *experts_stage.SAMES,
    *halves_stage.SAMES,
    *streams_stage.SAMES,
    *products_stage.SAMES,
    *prompts_stage.SAMES,
    *(
        (WITHIN, name, name)
        for name in (
            "same_8192",
            "same_router_8192",
            "same43_8192",
            "same_seams_8192",
            *cards_stage.WITHIN,
        )
    ),
    ("yardstick, without the setting: chunks of 512, prefix cache", "unlike_512", "unlike_8192"),
    (f"yardstick, without the setting: {WITHIN}", "unlike_8192", "unlike_8192"),
]


# several engines over the same cards, started at once, do not find them equally full
SIDE_BY_SIDE_ENVIRONMENT = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
