"""Speculation with this model: what is known to go wrong, by release, and which block suits which load.

`rows` are SGLang's draft tokens: what is verified of a request at once, its last token and the drafts behind it. A
block is the drafts alone. Read in SGLang's code, and read again in every wheel by
tests/patching/test_wheel_speculation.py: in which releases each hazard is, and the rows that are kept. What threads
tell is cited; none of it was seen on an SM120 card by us.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepseek_v4_sm120.commands.console import CommandError
from deepseek_v4_sm120.ops.shared.limits import STEP_ROWS

EAGLE, DSPARK = "EAGLE", "DSPARK"  # the checkpoint's MTP block; the drafter of Flash-0731 and its kind
STATIC, COMPACT = "static", "compact"
MODE_VARIABLE, PLAN_VARIABLE = "SGLANG_RAGGED_VERIFY_MODE", "SGLANG_PREP_IN_CUDA_GRAPH"
STAGES_VARIABLE, STAGES_SINCE = "SGLANG_ENABLE_PP_SPEC", (0, 5, 21)  # EAGLE beside pipeline parallelism
NO, YES = ("0", "false", "no", "n", "f"), ("1", "true", "yes", "y", "t")  # values of SGLang's switches
EAGLE_STEPS, DSPARK_BLOCK = 3, 7  # SGLang's own, where nothing is said
DSPARK_SINCE, DSPARK_SYNCED_SINCE = (0, 5, 16), (0, 5, 19)
# the rows of which the compressors' state survives whatever is accepted: a constant, then what C4's ring of 16 holds
KEPT_ROWS, KEPT_BY_THE_RING, RING_SINCE = 4, 10, (0, 5, 18)
PLANNED_SINCE = (0, 5, 14)  # `compressor` writes the state of all rows
UNTOUCHED_DRAFT_BLOCK = 5  # of the 0731 checkpoint: what a server takes that is not told a block, and was trained with

TEXT, STRUCTURE = "text", "structure"
WRONG, STOPS, DOUBT = "answers are wrong", "the server stops", "in doubt"
REFUSED = "hardly a draft is accepted"

Version = tuple[int, ...]


@dataclass(frozen=True)
class Speculation:
    """What a server speculates with. mode: of SGLANG_RAGGED_VERIFY_MODE, None where nobody tells; host_plan:
    SGLANG_PREP_IN_CUDA_GRAPH is off; symmetric: --enable-symm-mem; cards: of tensor parallelism; stages: of pipeline
    parallelism; may_have_stages: SGLANG_ENABLE_PP_SPEC is on, or the server makes prompts for others; trained: the
    block of the checkpoint's drafter; topk: of EAGLE, None where nothing is said."""

    algorithm: str
    rows: int
    mode: str | None = STATIC
    host_plan: bool = False
    symmetric: bool = False
    cards: int = 1
    stages: int = 1
    may_have_stages: bool = False
    trained: int = UNTOUCHED_DRAFT_BLOCK
    topk: int | None = 1

    @property
    def block(self) -> int:
        return self.rows - 1

    @property
    def drafts(self) -> str:
        return f"{self.algorithm} with {self.block} draft{'' if self.block == 1 else 's'} a step"


@dataclass(frozen=True)
class Hazard:
    """What goes wrong, in the releases [since, before), for a speculation that it `applies` to, unless the operator
    that takes the place of SGLang's code is ours."""

    kind: str
    what: str
    does: str
    fix: str
    source: str
    since: Version
    before: Version | None
    applies: Callable[[Speculation], bool]
    unless: str | None = None


HAZARDS = (
    *(
        Hazard(
            WRONG,
            "more than 4 rows a request",
            "the compressors' state is rewritten for 4 rows at most, so that after a longer block of which not all was "
            "accepted a later window reads stale rows, and nothing says so",
            f"--speculative-num-steps 3 or fewer (EAGLE), --speculative-dspark-block-size 3 or fewer, {otherwise}or "
            "SGLang 0.5.18 and later",
            "c_plan.cuh; sglang #34189, which mended it, #32038",
            since=since,
            before=before,
            applies=lambda s, algorithms=algorithms: s.algorithm in algorithms and s.rows > KEPT_ROWS,
            unless=unless,
        )
        for since, before, algorithms, unless, otherwise in (
            ((0, 5, 12), PLANNED_SINCE, (EAGLE,), None, ""),
            # on 0.5.17 EAGLE 5/1/6 says what plain decode says, whether none, half or all drafts are right
            (PLANNED_SINCE, RING_SINCE, (EAGLE,), "compressor", "leave compressor in place, which writes them all, "),
            ((0, 5, 12), RING_SINCE, (DSPARK,), None, ""),  # of 4 rows was seen
        )
    ),
    Hazard(
        WRONG,
        "more than 10 rows a request",
        "the ring of C4's state keeps no more",
        "9 drafts or fewer",
        "pool_configurator.py",
        since=PLANNED_SINCE,
        before=RING_SINCE,
        applies=lambda s: s.rows > KEPT_BY_THE_RING,
    ),
    Hazard(
        STOPS,
        "more than 10 rows a request",
        "an assertion of SGLang's: the ring of C4's state keeps no more",
        "9 drafts or fewer",
        "pool_configurator.py",
        since=RING_SINCE,
        before=None,
        applies=lambda s: s.rows > KEPT_BY_THE_RING,
    ),
    Hazard(
        WRONG,
        f"{PLAN_VARIABLE}=0",
        "the plan made on the host rewrites nothing in front of the last boundary: C128 states are lost at 2 rows",
        f"unset {PLAN_VARIABLE}, or SGLang 0.5.18 and later",
        "c_plan.cuh; sglang #34189",
        since=(0, 5, 12),
        before=RING_SINCE,
        applies=lambda s: s.host_plan,
    ),
    Hazard(
        STOPS,
        "another word than EAGLE and DSPARK",
        "an assertion of SGLang's, which comes before it makes EAGLE of NEXTN, and capitals of small letters",
        f"--speculative-algorithm {EAGLE}, the model's own MTP block, which is what NEXTN means",
        "deepseek_v4_hook.py",
        since=(0, 5, 12),
        before=None,
        applies=lambda s: s.algorithm not in (EAGLE, DSPARK),
    ),
    Hazard(
        STOPS,
        "another --speculative-eagle-topk than 1",
        "an assertion of SGLang's, also where nothing is said of it",
        "--speculative-eagle-topk 1",
        "deepseek_v4_hook.py",
        since=(0, 5, 12),
        before=None,
        applies=lambda s: s.algorithm == EAGLE and s.topk != 1,
    ),
    Hazard(
        STOPS,
        "DSPARK",
        "this release has EAGLE alone for this model",
        "SGLang 0.5.16 or newer, or no speculation, or a checkpoint with an MTP block",
        "deepseek_v4_hook.py",
        since=(0, 5, 12),
        before=DSPARK_SINCE,
        applies=lambda s: s.algorithm == DSPARK,
    ),
    *(
        Hazard(
            STOPS,
            "--pp-size above 1",
            "an assertion of SGLang's: no pipeline parallelism beside speculation",
            f"{otherwise}no speculation (--spec none), or no --pp-size",
            "the validation of server arguments",
            since=since,
            before=before,
            applies=lambda s, is_final=before is not None: s.stages > 1 and (is_final or not s.may_have_stages),
        )
        for since, before, otherwise in (
            ((0, 5, 12), STAGES_SINCE, ""),
            (STAGES_SINCE, None, f"{STAGES_VARIABLE}=1 for EAGLE (never run with us), or "),
        )
    ),
    Hazard(
        STOPS,
        "DSPARK on SGLang's attention",
        "the FlashInfer that this release pins has no SM120 kernel for the draft's width of 192",
        "leave sparse_decode in place, or SGLang 0.5.19 and later",
        "sglang #33985, #33134; flashinfer #4380 is in 0.6.18",
        since=DSPARK_SINCE,
        before=(0, 5, 19),
        applies=lambda s: s.algorithm == DSPARK,
        unless="sparse_decode",
    ),
    Hazard(
        DOUBT,
        "requests that sample, on several cards",
        "each card draws for itself what it accepts, from probabilities that FlashInfer renormalises with other last "
        "bits from call to call, and no decision is sent round: sooner or later two cards part, and wait for each "
        "other for ever",
        "SGLang 0.5.19 or newer (SGLANG_SPEC_TP_SYNC=all, its default), or EAGLE, or greedy requests alone",
        "dflash_utils.py; sglang #33289, #38565; #33614 mended it",
        since=DSPARK_SINCE,
        before=DSPARK_SYNCED_SINCE,
        applies=lambda s: s.algorithm == DSPARK and s.cards > 1,
    ),
    Hazard(
        WRONG,
        f"{MODE_VARIABLE}={COMPACT}",
        "a race in the plan kernel takes blocks of several lengths for equal ones: rows that are none are compressed, "
        "or the capture ends in an illegal memory access, on SM120 as well",
        f"{MODE_VARIABLE}={STATIC}, SGLang's default",
        "c_plan.cuh; sglang #32470, #33412; #32467 mended it",
        since=DSPARK_SINCE,
        before=RING_SINCE,
        applies=lambda s: s.algorithm == DSPARK and s.mode == COMPACT,
    ),
    Hazard(
        STOPS,
        f"{MODE_VARIABLE}={COMPACT}",
        "graphs are captured for other numbers of requests than they are replayed with: an illegal memory access at "
        "the first batch that fills a middle size",
        f"{MODE_VARIABLE}={STATIC}, SGLang's default",
        "decode_cuda_graph_runner.py; sglang #34384, open; #34636, closed without a merge",
        since=RING_SINCE,
        before=None,
        applies=lambda s: s.algorithm == DSPARK and s.mode == COMPACT,
    ),
    Hazard(
        WRONG,
        "--enable-symm-mem",
        "mHC's combine leaves its intermediates in the pool of the sums between the cards, where they meet a sum that "
        "still runs: 22 to 39 of 1,000 answers were corrupted with a block of 5 on four RTX PRO 6000",
        "leave mhc in place, or no --enable-symm-mem, or SGLang 0.5.20 and later, where it is one kernel",
        "deepseek_v4.py; sglang #33800 and #34021, both open",
        since=DSPARK_SINCE,
        before=(0, 5, 20),
        applies=lambda s: s.symmetric,
        unless="mhc",
    ),
    Hazard(
        DOUBT,
        "a block of 5",
        "it corrupted answers on SM120 where 3, 4, 6 and 7 did not, in 0.5.16 with the rewrite mended; the cause that "
        "was found (symmetric memory, SGLang's mHC) is not there without --enable-symm-mem, but the thread is open",
        "--speculative-dspark-block-size 3 or 4",
        "sglang #33800",
        since=RING_SINCE,
        before=None,
        applies=lambda s: s.algorithm == DSPARK and s.block == UNTOUCHED_DRAFT_BLOCK,
    ),
    Hazard(
        REFUSED,
        "a block longer than its drafter was trained with",
        "each row of a block sees all of it, so that the first drafts are other ones, too: of 0731's, trained with 5, "
        "4.4% were accepted of 7 drafts where of 5 34.7% were, and 13.6 for 23.8% with another user",
        f"--speculative-dspark-block-size {UNTOUCHED_DRAFT_BLOCK - 1} or fewer",
        "vllm #41834; DeepSpec's paper",
        since=DSPARK_SINCE,
        before=None,
        applies=lambda s: s.algorithm == DSPARK and s.block > s.trained,
    ),
)


def hazards(version: Version, speculation: Speculation, ours: Collection[str] | None) -> Iterator[tuple[str, Hazard]]:
    """(kind, hazard) of each that is met. ours: the operators in place; None: nobody knows, and what hangs on one is in
    doubt."""
    for hazard in HAZARDS:
        is_known = version[:3] >= hazard.since and (hazard.before is None or version[:3] < hazard.before)
        if is_known and hazard.applies(speculation) and (hazard.unless is None or hazard.unless not in (ours or ())):
            yield (DOUBT if hazard.unless is not None and ours is None else hazard.kind), hazard


def refuse_if_unsafe(
    version: Version, speculation: Speculation | None, ours: Collection[str], insist: bool, release: str
) -> list[str]:
    """What is known of it and tolerated, in sentences; CommandError where answers would be wrong and nobody insists,
    and where the server would not start."""
    tolerated = []
    for kind, hazard in hazards(version, speculation, ours) if speculation is not None else ():
        text = f"SGLang {release}, {speculation.drafts}: {kind}, because of {hazard.what}: {hazard.does} "
        text += f"({hazard.source}). Instead: {hazard.fix}"
        if kind == STOPS or (kind == WRONG and not insist):
            raise CommandError(text if kind == STOPS else f"{text}; or --insist")
        tolerated.append(text)
    return tolerated


# ---- which block for which load


@dataclass(frozen=True)
class Advice:
    block: int
    reason: str


# What a step of EAGLE brings with so many drafts and none: accept len as vLLM measured it with the weights of V4-Pro,
# whose MTP block is made as Flash's (code, with thoughts and without: InferenceX's golden_al_distribution, dsv4_mtp).
# A fourth draft brings 0.05 and 0.03 more.
ACCEPTED = {TEXT: (1.0, 1.79, 2.27, 2.49), STRUCTURE: (1.0, 1.92, 2.61, 2.97)}
MOST_DRAFTS = len(ACCEPTED[TEXT]) - 1  # of EAGLE that are reckoned
WITHOUT_A_CHAIN = Advice(
    1, "1 draft beat 2 and 3 on two cards (sglang #25696), whose later drafts have their fault where draft_chain is off"
)
ADVICE = {  # DSPARK's by the load, of one stream
    TEXT: Advice(3, "each row reads 1.6 GB more a card on two cards; 5 is in doubt on SM120 (sglang #33800)"),
    STRUCTURE: Advice(
        4,
        "longer than the 5 that its drafter was trained with costs the first drafts, too (vllm #41834), though one "
        "user's tool calls run with 6 (sglang #40877); 5 is in doubt on SM120 (sglang #33800)",
    ),
}
ADVICE_OF_MANY = Advice(
    3, "the best of a sweep with many agents on four cards, 10% ahead of 7 (vllm-project/recipes #967)"
)


def _eagle(streams: int, load: str, seconds: Callable[[int], float]) -> Advice:
    """The block that brings most tokens by its least time of a step, of those whose steps decode's kernels take."""
    accepted = ACCEPTED[load]
    blocks = [n for n in range(1, MOST_DRAFTS + 1) if n == 1 or streams * (n + 1) <= STEP_ROWS]
    lengths = ", ".join(f"{length:.2f}" for length in accepted[1:])
    reason = f"the most by bytes of 1 to {blocks[-1]}, at V4-Pro's accept len on code ({lengths}: InferenceX)"
    if len(blocks) < MOST_DRAFTS:
        reason += f"; with {blocks[-1] + 1} a step has more than the {STEP_ROWS} rows of decode's kernels"
    return Advice(max(blocks, key=lambda n: accepted[n] / seconds(n)), reason)


def advise(version: Version, algorithm: str, streams: int, load: str, seconds: Callable[[int], float] | None) -> Advice:
    """The block for a load that this release can take. seconds: of EAGLE, block -> the least time of a step; None: its
    later drafts are SGLang's own."""
    if algorithm == EAGLE:
        found = WITHOUT_A_CHAIN if seconds is None else _eagle(streams, load, seconds)
    else:
        found = ADVICE[load] if streams == 1 else ADVICE_OF_MANY
    most = (KEPT_ROWS if version[:3] < RING_SINCE else KEPT_BY_THE_RING) - 1
    if found.block <= most:
        return found
    return Advice(most, f"more lose the compressors' state before 0.5.18 (sglang #34189); else {found.block}")


# ---- what a command line says


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise CommandError(f"the server's arguments: {message}")


# cards of tensors and stages of a pipeline, by all names that SGLang has for them
SIZES = (("--tp-size", "--tensor-parallel-size", "--tp"), ("--pp-size", "--pipeline-parallel-size"))


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """tp_size and pp_size, 1 where they are not said."""
    for names in SIZES:
        parser.add_argument(*names, type=int, default=1)


def of_command(words: Sequence[str], environ: Mapping[str, str], checkpoint_block: int | None) -> Speculation | None:
    """What sglang.launch_server would make of its arguments and variables, as argparse and SGLang resolve them (topk
    must be 1, so EAGLE's rows are its steps and one); None without speculation."""
    parser = Parser(add_help=False)
    parser.add_argument("--speculative-algorithm")
    for name in ("num-steps", "eagle-topk", "num-draft-tokens", "dspark-block-size"):
        parser.add_argument(f"--speculative-{name}", type=int)
    parser.add_argument("--enable-symm-mem", action="store_true")
    add_sizes(parser)
    parser.add_argument("--disaggregation-mode")
    found, _ = parser.parse_known_args(words)
    if found.speculative_algorithm is None:
        return None
    algorithm = found.speculative_algorithm
    steps, rows = found.speculative_num_steps, found.speculative_num_draft_tokens
    if algorithm == DSPARK:
        block = found.speculative_dspark_block_size or (rows - 1 if rows else None) or checkpoint_block or DSPARK_BLOCK
    else:
        block = EAGLE_STEPS if steps is None else steps
    given = {"symmetric": found.enable_symm_mem, "cards": found.tp_size, "stages": found.pp_size}
    given |= {"trained": checkpoint_block or UNTOUCHED_DRAFT_BLOCK}
    given |= {"topk": found.speculative_eagle_topk} if algorithm == EAGLE else {}
    may_have_stages = found.disaggregation_mode == "prefill" or environ.get(STAGES_VARIABLE, "").lower() in YES
    return Speculation(algorithm, block + 1, **given, may_have_stages=may_have_stages, **of_variables(environ))


def of_variables(environ: Mapping[str, str]) -> dict:
    """What SGLang's variables add to a speculation."""
    return {
        "mode": environ.get(MODE_VARIABLE) or STATIC,
        "host_plan": environ.get(PLAN_VARIABLE, "").lower() in NO,
    }
