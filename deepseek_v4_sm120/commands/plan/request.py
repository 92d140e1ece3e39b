"""What was asked for, and the plan that comes of it: data, and what hangs on sizes and releases alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands.plan import memory, roofline
from deepseek_v4_sm120.commands.plan.cards import NETWORK, PCIE, PRO, Card, Link
from deepseek_v4_sm120.commands.plan.models import Model
from deepseek_v4_sm120.commands.speculation import EAGLE, TEXT, Advice, Speculation, advise
from deepseek_v4_sm120.ops import all_reduce_sizes
from deepseek_v4_sm120.settings import asks_for
from deepseek_v4_sm120.sglang_patches.adapters import prefill_graphs
from deepseek_v4_sm120.sglang_patches.defaults import CAPTURED_ROWS, DEALT_STREAMS, HALF_ROWS

DRAFT_HEAD, DRAFT_HEAD_SINCE = "draft_head", (0, 5, 14)
PREFILL_GRAPHS, PREFILL_GRAPHS_SINCE, WITH_MTP_SINCE = prefill_graphs.DEFAULT, (0, 5, 17), (0, 5, 23)
SHADOWED_SINCE = (0, 5, 21)  # below, rows that graphs pad may hold anything, and shadow mode compares them
HALVES, HALVES_SINCE, IN_GRAPHS_SINCE = "prompts_in_halves", (0, 5, 14), (0, 5, 23)  # from then on tried out by itself
DRAFT_CHAIN = "draft_chain"  # the fix of EAGLE's later drafts, of all releases
IMAGE = "lmsysorg/sglang:v{version}"
NOTICEABLE = 0.02  # of a step: less is not worth its copy's memory


@dataclass(frozen=True)
class Request:
    model: Model
    gpus: int
    memory_mib: int
    context: int
    concurrency: int
    speculation: Speculation | None
    sglang: str
    replaced: tuple[str, ...] = OPS  # the operators that nothing leaves out
    profile: str | None = None  # the file that says so
    profile_told: tuple[str, ...] = ()  # why a server makes nothing of the file that was given, or what else it tells
    switched_off: tuple[str, ...] = ()  # operators, by DSV4_SM120_SET
    draft_head: bool | None = None  # drafts guess with a copy of the head in INT4, likewise; None: where it pays
    also_set: Mapping[str, str] = field(default_factory=dict)  # what else it says, which no size here hangs on
    prefill_graphs: int | None = None  # rows of a pass in graphs, at most, likewise; None: where there is room
    sums_us: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # by provider: rows -> us, by the profile
    load: str = TEXT  # what is written: speculation.TEXT or STRUCTURE
    insist: bool = False  # take a speculation that is known to answer wrongly
    off: bool = False  # DSV4_SM120=off: nothing is replaced
    shadow: str | None = None  # DSV4_SM120_SHADOW: SGLang's own run beside ours, and hold their weights
    cards: Mapping[str, str] = field(default_factory=dict)  # the variables by which CUDA takes these and no others
    card: Card = PRO
    nodes: int = 1  # hosts, of which each has as many of the cards
    address: str | None = None  # of the first one, and the port by which they find each other
    interface: str | None = None  # of the network between them, by its name
    given: str = ""  # what Docker was told of cards for the container that this runs in, where those are not all
    in_use_mib: int = 0  # of one of this machine's cards, at most, when it was asked
    stages: int = 1  # of a pipeline, of which each has so many of the layers; the cards of one are of tensors
    host_cache_gb: float | None = None  # of a host's memory, for cached prompts that the cards have no room for
    host_available: int | None = None  # bytes of this machine's memory, where the plan is of its cards

    @property
    def version(self) -> memory.Version:
        return tuple(map(int, re.match(r"(\d+)\.(\d+)\.(\d+)", self.sglang).groups()))

    @property
    def gpus_of_host(self) -> int:
        return self.gpus // self.nodes

    @property
    def ranks(self) -> int:
        """Cards of tensor parallelism: all of them, or those of a stage."""
        return self.gpus // self.stages

    @property
    def is_parted(self) -> bool:
        """Whether a pass goes through several hosts or stages."""
        return self.nodes > 1 or self.stages > 1

    @property
    def step_requests(self) -> int:
        """Of one decode step at most: a pipeline has as many batches as stages."""
        return math.ceil(self.concurrency / self.stages)

    @property
    def link(self) -> Link:
        """Between the cards."""
        return PCIE if self.nodes == 1 else NETWORK

    @property
    def sums_are_ours(self) -> bool:
        return self.nodes == 1 and "all_reduce" in self.replaced

    @property
    def image(self) -> str | None:
        """SGLang's image of exactly this version; None of a build that is no release."""
        return None if re.search(r"dev|\+", self.sglang) else IMAGE.format(version=self.sglang)

    @property
    def wo_a_bf16(self) -> bool:
        return "wo_a" not in self.replaced

    @property
    def rows(self) -> int:
        """Rows of a request that a step verifies; 0 without speculation."""
        return 0 if self.speculation is None else self.speculation.rows

    @property
    def most_rows(self) -> int:
        """Rows of a decode or verify step, at most."""
        return self.step_requests * max(1, self.rows)

    @property
    def is_reproducible(self) -> bool:
        return self.also_set.get("reproducible") == "on"

    @property
    def could_have_draft_head(self) -> bool:
        return "bf16_linear" in self.replaced and self.rows > 0 and self.version >= DRAFT_HEAD_SINCE

    @property
    def has_draft_head(self) -> bool:
        """Whether drafts guess with a copy of the head in INT4: as the user says; else the model's own drafts, where a
        step reads noticeably less."""
        if not self.could_have_draft_head:
            return False
        if self.draft_head is not None or self.speculation.algorithm != EAGLE:
            return bool(self.draft_head)
        with_it, without = (self.drafted_step_seconds(self.speculation.rows - 1, one) for one in (True, False))
        return with_it <= (1 - NOTICEABLE) * without

    def drafted_step_seconds(self, drafts: int, draft_head: bool) -> float:
        """The least time of a step of EAGLE with so many drafts."""
        context = min(self.context, roofline.CONTEXT)
        head_bytes = memory.DRAFT_HEAD_VALUE if draft_head else 2.0
        sizes = self.model, self.ranks, self.concurrency, context, drafts
        speeds = {"card": self.card, "link": self.link}
        return roofline.speculating_seconds(*sizes, wo_a_bf16=self.wo_a_bf16, head_bytes=head_bytes, **speeds)

    def advised(self, algorithm: str) -> Advice:
        """The block of a drafter that suits these cards, streams, load and release."""

        def seconds(drafts: int) -> float:
            drafting = replace(self, speculation=Speculation(EAGLE, drafts + 1))
            return drafting.drafted_step_seconds(drafts, drafting.has_draft_head)

        is_chained = not self.off and self.also_set.get(DRAFT_CHAIN) != "off"
        return advise(self.version, algorithm, self.concurrency, self.load, seconds if is_chained else None)

    @property
    def may_keep_prefixes(self) -> bool:
        """Whether more sliding windows may be held for cached prefixes: not where SGLang's own attention holds a copy
        of that pool."""
        return "sparse_decode" in self.replaced and self.shadow is None

    @property
    def may_capture(self) -> tuple[int, ...]:
        """Rows of a prompt's pass in graphs at most, the wish first; 0: none. Of speculation beside the model's own
        drafts alone, which are in no graph then."""
        since = PREFILL_GRAPHS_SINCE if self.speculation is None else WITH_MTP_SINCE
        has_others = self.speculation is not None and self.speculation.algorithm != EAGLE
        if self.version < since or has_others or self.is_parted or "index_select" not in self.replaced:
            return (0,)
        if self.prefill_graphs is not None:
            return (self.prefill_graphs,)
        if self.shadow is not None and self.version < SHADOWED_SINCE:
            return (0,)
        return (*dict.fromkeys((prefill_graphs.worth_capturing(self.gpus), CAPTURED_ROWS)), 0)

    @property
    def are_whole(self) -> bool:
        """Whether something keeps all passes of a prompt's rows whole."""
        has_one_order = self.is_reproducible and self.gpus > all_reduce_sizes.ONE_ORDER_RANKS
        compares = self.off or self.shadow is not None
        return self.gpus == 1 or self.is_parted or compares or has_one_order or asks_for(self.also_set, DEALT_STREAMS)

    @property
    def may_halve(self) -> bool:
        """Whether passes of a prompt's rows in graphs may go in halves: not where the user has said how they go, or
        something that keeps all of them whole."""
        is_said = HALVES in self.also_set or self.prefill_graphs is not None
        return not (is_said or self.are_whole) and self.version >= IN_GRAPHS_SINCE and self.may_capture[0] > 0

    def halved(self, captured: int) -> tuple[int, int]:
        """Rows from which on a pass of a prompt's rows may go in halves, without graphs and in those of `captured` rows
        at most; 0: none does. By a number each does, else a server tries it out, and in graphs none."""
        said = self.also_set.get(HALVES)
        is_asked = self.version >= IN_GRAPHS_SINCE if said is None else asks_for(self.also_set, HALVES)
        if self.are_whole or not is_asked or self.version < HALVES_SINCE:
            return 0, 0
        is_number = said is not None and said.isdigit()
        rows = 2 * (int(said) if is_number else HALF_ROWS)
        in_graphs = (is_number or self.may_halve) and self.version >= IN_GRAPHS_SINCE and captured >= rows
        return rows, rows if in_graphs else 0


@dataclass(frozen=True)
class Flag:
    name: str
    value: str
    reason: str


@dataclass
class Plan:
    request: Request
    chunk: int
    fraction: float
    weights: float
    reserves: list[memory.Reserve]
    pools: memory.Pools
    tokens: int
    captured: int = 0  # rows of a prompt's pass in graphs, at most
    prefix_tails: int | None = None  # windows of cached prefixes; None: SGLang's own number
    given_back: float = 0.0  # bytes that the weights take while the pools are sized, and not behind that
    flags: list[Flag] = field(default_factory=list)
    environment: list[Flag] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interval: int = 0

    @property
    def halves(self) -> bool:
        """Whether its greatest passes in graphs go in halves."""
        return self.captured >= 2 * HALF_ROWS and self.request.may_halve

    @property
    def kept_prefixes(self) -> int | None:
        """Of how many tokens of prompts the windows are kept; None: those of a share of the KV cache."""
        tails = self.pools.prefix_tails
        return None if tails is None else memory.kept_prefix_tokens(self.request.model, tails, self.chunk)

    @property
    def static_bytes(self) -> float:
        """What --mem-fraction-static gives to weights and pools."""
        return self.fraction * self.free_bytes

    @property
    def pool_bytes(self) -> float:
        """What SGLang finds for its pools: 0 or less where the weights leave none."""
        return self.static_bytes - self.weights - self.given_back

    @property
    def free_bytes(self) -> float:
        """What is free when SGLang takes its fraction, in front of the weights."""
        return self.request.card.free_at_start(self.card_bytes)

    @property
    def card_bytes(self) -> int:
        return self.request.memory_mib * (1 << 20)

    @property
    def window_needed(self) -> int:
        """Sliding-window slots that must be there at once: two chunks in flight, or one in each stage, the window and
        two pages a request."""
        r = self.request
        return max(2, r.stages) * self.chunk + r.concurrency * (r.model.window + 2 * memory.PAGE_TOKENS)

    @property
    def has_window(self) -> bool:
        """Where a release sizes that pool by the requests, it gives them what its scheduler needs."""
        return self.pools.window_tokens is not None or self.pools.window(self.tokens) >= self.window_needed

    @property
    def fits(self) -> bool:
        return self.tokens >= self.request.context and self.has_window

    @property
    def left_free(self) -> float:
        """Bytes outside of weights and pools that no reserve claims."""
        return self.free_bytes - self.static_bytes + self.given_back - sum(r.bytes for r in self.reserves)

    @property
    def off_by(self) -> float:
        """Bytes by which the estimates of what is outside of the static part may be short."""
        return sum(r.off_by for r in self.reserves)

    @property
    def spare(self) -> float:
        """Bytes of capacity beyond one request of full length."""
        return (self.tokens - self.request.context) * self.pools.token_bytes

    @property
    def is_tight(self) -> bool:
        """It fits only if the estimates hold: less is left, outside or inside of the static part, than they may be
        short by."""
        inside = memory.static_off_by(self.weights, self.fraction)
        return self.fits and (self.left_free < self.off_by or self.spare < inside)
