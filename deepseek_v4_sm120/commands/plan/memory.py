"""Bytes of one card: weights, SGLang's pools as its own pool configurator sizes them, scratch.

Weights: fp8 with one scale byte per 128 x 128 block, fp4 with one per 32, as in the checkpoint. Pools: as
pool_configurator.py of each release from 0.5.12 to 0.5.23 has them; tests/test_plan_pools.py runs every wheel's own
beside them. What is an estimate says so in `reserves`, and by how much it may be off.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deepseek_v4_sm120 import OPS
from deepseek_v4_sm120.commands.plan.models import FP4, Model

GIB = 1 << 30
PAGE_TOKENS = 256
KV_TOKEN_BYTES = 584  # csrc/kv_page_layout.h; here because a plan needs no compiled module (a test compares)
PAGE_ALIGN = 576  # bytes that a page of the KV pools is padded to
INDEX_KEY_BYTES = 132  # FP8, with its fp32 scale
SWA_RATIO = 0.1  # SGLang's for this model
EVICTION_INTERVAL = 128  # SGLANG_SWA_EVICTION_INTERVAL's default
CACHED_PREFIXES = 4  # that keep their window, for each request: --swa-prefix-tails' default
CACHED_CHUNK_TOKENS = 2 * PAGE_TOKENS  # window slots that stay of each chunk of a prompt in the prefix cache
DRAFTER_FIRST_SINCE = (0, 5, 14)  # the pools are sized when the drafter's weights are there; before, in front of them
REQUEST_STATES_SINCE = (0, 5, 15)  # the C128 states belong to the request slots; before, to the window's
PADDED_SINCE = (0, 5, 21)  # entries are priced with their page's padding, the window's slots by the requests
STATE_BYTES = 4  # fp32
MOST_FRACTION = 0.93  # above it ranks were lost hours after the start
# index_select's own bounds of a call, whatever the context (ops/index_select.py; a test compares)
INDEX_SELECT_PREFILL_BYTES, INDEX_SELECT_DECODE_BYTES = 256 << 20, 64 << 20
# --mem-fraction-static is a fraction of what is free when SGLang has set up its processes, in front of the weights.
# The driver keeps some of what it reports: of an RTX PRO 6000's 97,887 MiB CUDA has 94.97 GiB. And then CUDA's context,
# libraries and NCCL are there: 94.01 GiB were free on four of them (sglang #40558), 93.56 of 95.09 on eight H20, which
# have NVLink. More comes later
KEPT_BY_DRIVER, AT_START, AFTER_START = 640 << 20, 1.0 * GIB, 0.75 * GIB
LOGPROB_ROWS = 2048  # of a prompt whose log-probabilities are computed at a time (up to 0.5.15 by logprob_pieces)
# what may be short, as a share: estimates, which nobody has measured on SM120; weights by shape against published files
ESTIMATE_OFF_BY, WEIGHTS_OFF_BY = 0.5, 0.002
CHUNKS = (8192, 4096, 2048, 1024)
# Prefill graphs: what SGLang says that it captured (3.31 and 3.36 GiB on two H200, 0.5.17, five sizes up to 8,192 rows,
# context 32,768; 2.91 on four H100, 0.5.23), over what is reckoned without it; and how much each further size took
GRAPHS_OVER_ARITHMETIC, GRAPHS_OF_A_SIZE = 1.4, 20 << 20
# Decode graphs: the libraries' workspaces, whatever the rows, and the most requests that SGLang captures by itself. On
# eight H20, with steps of 320 rows, SGLang's log had 1.9 GiB; this comes to 2.1
GRAPHS_OF_LIBRARIES, MOST_CAPTURED_REQUESTS = GIB // 2, 512
ROTARY_DIM = 64
ROTARY_CACHE_SINCE = (0, 5, 13)  # a layer has SGLang's own rotation beside its angles, which nothing reads on CUDA

Version = tuple[int, ...]


# ---- weights


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + math.ceil(rows / 128) * math.ceil(columns / 128)


def _fp4(rows: int, columns: int) -> int:
    return rows * columns // 2 + rows * columns // 32


def expert_bytes(m: Model) -> int:
    one = _fp4 if m.expert_format == FP4 else _fp8
    return 3 * one(m.expert_width, m.hidden)


def square_bytes(m: Model) -> int:
    """Of a projection into the drafter."""
    return _fp8(m.hidden, m.hidden)


def expanded_wo_a_bytes(m: Model) -> int:
    return 2 * m.o_groups * m.o_lora * (m.heads * m.head_dim // m.o_groups)


def layer_weights(m: Model, ratio: int, wo_a_bf16: bool) -> dict[str, tuple[int, bool]]:
    """{part: (bytes, divided by TP)} of a layer; `routed` is one expert."""
    inputs = m.heads * m.head_dim // m.o_groups
    wo_a = expanded_wo_a_bytes(m) if wo_a_bf16 else m.o_groups * _fp8(m.o_lora, inputs)
    mix = (2 + m.streams) * m.streams
    found = {
        "qkv_a": (_fp8(m.q_lora + m.head_dim, m.hidden), False),
        "q_b": (_fp8(m.heads * m.head_dim, m.q_lora), True),
        "wo_a": (wo_a, True),
        "wo_b": (_fp8(m.hidden, m.o_groups * m.o_lora), True),
        "router": (2 * m.experts * m.hidden, False),
        "shared": (3 * _fp8(m.expert_width, m.hidden), True),
        "routed": (expert_bytes(m), True),
        "mhc": (2 * mix * m.streams * m.hidden * 4, False),
        "norms": (2 * (2 * m.hidden + m.q_lora + m.head_dim) + 4 * m.heads, False),
    }
    if ratio == 4:
        rows = 4 * m.head_dim + 4 * m.index_dim
        indexer = _fp8(m.index_heads * m.index_dim, m.q_lora) + 2 * m.index_heads * m.hidden
        found["compressor"] = (2 * rows * m.hidden + 4 * 2 * (m.head_dim + m.index_dim) * 4 + indexer, False)
    if ratio == 128:
        found["compressor"] = (2 * 2 * m.head_dim * m.hidden + 128 * m.head_dim * 4, False)
    return found


def weight_bytes(m: Model, tp: int, *, drafts: bool, wo_a_bf16: bool) -> float:
    """One rank's weights, with the checkpoint's drafter where it `drafts`. SGLang expands wo_a to bf16 on SM120; where
    the operator is ours it stays FP8. The Markov and confidence heads of DSPARK's drafter are within the error."""
    divided = whole = 0.0
    for ratio, layers in (*m.kinds(), (0, m.draft_layers * drafts)):
        for part, (size, is_divided) in layer_weights(m, ratio, wo_a_bf16).items():
            total = layers * size * (m.experts if part == "routed" else 1)
            divided, whole = (divided + total, whole) if is_divided else (divided, whole + total)
    inputs = 2 if m.dspark_block is None else m.dspark_stages  # projections into the drafter, [hidden, hidden] each
    whole += inputs * square_bytes(m) * drafts + 4 * m.vocab * m.experts_per_token * m.hash_layers
    return divided / tp + head_and_embedding_bytes(m, tp) + whole


def angle_tables_bytes(m: Model, version: Version, drafts: bool) -> int:
    """RoPE's tables, which are made with the model, in front of the pools, for all positions of its config, whatever
    --context-length: complex angles, and from ROTARY_CACHE_SINCE on float32 cosines and sines. Layers without
    compression, the drafter's among them, share one kind, all others the other."""
    kinds = bool(m.layers_plain or drafts) + bool(m.layers_c4 or m.layers_c128)
    return kinds * m.max_context * ROTARY_DIM * 4 * (2 if version >= ROTARY_CACHE_SINCE else 1)


def head_and_embedding_bytes(m: Model, tp: int) -> float:
    """Of one rank; an MTP block has its own, too, until it is given the model's, when the pools have their size."""
    return m.tables * 2 * m.vocab * m.hidden / tp


def shadow_bytes(m: Model, tp: int, *, drafts: bool, replaced: Collection[str]) -> float:
    """What one rank holds a second time in shadow mode: SGLang's own experts, and its wo_a in bf16."""
    has_experts = "mxfp4_moe" in replaced and m.expert_format == FP4
    layer = m.experts * expert_bytes(m) * has_experts + expanded_wo_a_bytes(m) * ("wo_a" in replaced)
    return (m.layers + m.draft_layers * drafts) * layer / tp


# ---- pools


@dataclass(frozen=True)
class Pools:
    """How one release sizes its pools for `requests` request slots and chunks of `chunk` tokens, as its
    pool_configurator.py does. Up to 0.5.20 the sliding-window pool is a tenth of the tokens. From 0.5.21 on, with
    --max-running-requests set as our plans set it, it has as many slots as the scheduler can hold live at once plus
    those of cached prefixes; and entries are priced with their page's padding.

    states            bytes of the compressor states held per request slot, used or not
    window_tokens     slots of the sliding-window pool; None: SWA_RATIO of the tokens
    window_bytes      the bytes of that pool where its slots are fixed, else 0
    token_bytes       bytes per token of capacity
    prefix_tails      windows of cached prefixes among those slots; None: no such number
    """

    states: int
    window_tokens: int | None
    window_bytes: float
    token_bytes: float
    prefix_tails: int | None = None

    @property
    def fixed_bytes(self) -> float:
        """Held whatever the number of tokens."""
        return self.states + self.window_bytes

    def tokens(self, room: float) -> int:
        """The capacity in `room` bytes, in whole pages."""
        left = max(0.0, room - self.fixed_bytes)
        return int(left / self.token_bytes) // PAGE_TOKENS * PAGE_TOKENS

    def window(self, tokens: int) -> int:
        """Sliding-window slots beside that many tokens."""
        if self.window_tokens is not None:
            return self.window_tokens
        return int(tokens * SWA_RATIO) // PAGE_TOKENS * PAGE_TOKENS


def pools(
    m: Model,
    version: Version,
    *,
    requests: int,
    chunk: int,
    drafts: int,
    prefix_tails: int | None = None,
    overlaps: bool = True,
) -> Pools:
    """`drafts` are SGLang's draft tokens, the verified one among them; 0 without speculation. `prefix_tails` of
    --swa-prefix-tails; None: not said. overlaps: whether a step is planned while the one before runs, which it is not
    in a pipeline."""
    speculative = drafts > 0
    padded = version >= PADDED_SINCE
    window_page = PAGE_TOKENS if padded else m.window
    slot = m.layers * _entry_bytes(1, padded) + (16 if speculative else 8) / window_page * _c4_state_bytes(m)
    states = 0
    if has_request_states(version):
        states = c128_state_bytes(m, requests, speculative)
    else:
        slot += (256 if speculative else 128) / window_page * 2 * m.head_dim * STATE_BYTES * m.layers_c128
    compressed = m.layers_c4 * (_entry_bytes(4, padded) + INDEX_KEY_BYTES) / 4
    compressed += m.layers_c128 * _entry_bytes(128, padded) / 128
    draft_layer = (m.layers + 1) / m.layers if speculative else 1.0
    if version < PADDED_SINCE:
        return Pools(states, None, 0.0, (compressed + SWA_RATIO * slot) * draft_layer)
    tails = CACHED_PREFIXES * requests if prefix_tails is None else prefix_tails
    slots = _window_slots(m, requests, (1 + overlaps) * chunk, drafts, tails)
    return Pools(states, slots, slots * slot * draft_layer, compressed * draft_layer, tails)


def kept_prefix_tokens(m: Model, prefix_tails: int, chunk: int) -> int:
    """Of how many tokens of prompts the prefix cache keeps the windows, read in chunks of `chunk`. A prefix whose
    window is gone is read anew, although its entries may be there; a prompt that is longer drops all others'."""
    return prefix_tails * (m.window + PAGE_TOKENS) // CACHED_CHUNK_TOKENS * chunk


def prefix_tails_for(m: Model, tokens: int, chunk: int) -> int:
    """So many that the windows of prompts of so many tokens are kept."""
    return math.ceil(math.ceil(tokens / chunk) * CACHED_CHUNK_TOKENS / (m.window + PAGE_TOKENS))


def prefix_tails_of_stages(m: Model, requests: int, chunk: int, stages: int) -> int:
    """So many that beside SGLang's own number the slots of a chunk in each stage are there: its pool has those of one,
    since it takes a server that overlaps no steps for one that has one chunk in flight (PADDED_SINCE)."""
    return CACHED_PREFIXES * requests + math.ceil((stages - 1) * chunk / (m.window + PAGE_TOKENS))


def wanted_prefix_tails(m: Model, sized: Pools, *, chunk: int, room: float, tokens: int) -> int | None:
    """So many that the windows of all that the KV cache holds are kept, as far as `tokens` of capacity remain in `room`
    bytes. None: `sized`, by SGLang's own number, has no fewer, or the release has no such number."""
    if sized.prefix_tails is None or sized.window_tokens is None:
        return None
    tail = m.window + PAGE_TOKENS
    slot = sized.window_bytes / sized.window_tokens
    live = sized.window_bytes - sized.prefix_tails * tail * slot
    free = room - sized.states - live
    balanced = free / (sized.token_bytes + CACHED_CHUNK_TOKENS / chunk * slot)
    capacity = math.ceil(max(balanced, tokens) / PAGE_TOKENS) * PAGE_TOKENS
    pages = (free - capacity * sized.token_bytes) // (PAGE_TOKENS * slot) - 1  # one, to which slots are rounded up
    tails = int(pages * PAGE_TOKENS // tail)
    return tails if tails > sized.prefix_tails else None


def has_request_states(version: Version) -> bool:
    """Whether a request slot costs memory, used or not."""
    return version >= REQUEST_STATES_SINCE


def _entry_bytes(ratio: int, padded: bool) -> float:
    """Of one entry of a cache that holds one for `ratio` tokens: a page of it is padded to PAGE_ALIGN bytes."""
    if not padded:
        return KV_TOKEN_BYTES
    entries = PAGE_TOKENS // ratio
    return math.ceil(entries * KV_TOKEN_BYTES / PAGE_ALIGN) * PAGE_ALIGN / entries


def _window_slots(m: Model, requests: int, in_flight: int, drafts: int, prefix_tails: int) -> int:
    """What the scheduler can hold live (window, eviction interval, page, one step's tokens a request; the tokens of
    chunks in flight), and the windows of `prefix_tails` prefixes."""
    step = 2 * drafts if drafts else PAGE_TOKENS
    live = requests * (m.window + EVICTION_INTERVAL * max(1, drafts) + PAGE_TOKENS + step) + in_flight + PAGE_TOKENS
    cached = prefix_tails * (m.window + PAGE_TOKENS)
    return math.ceil((live + cached) / PAGE_TOKENS) * PAGE_TOKENS


def cached_bytes(m: Model, tokens: int, window_tokens: int, speculative: bool) -> float:
    """Of one card's pools, as they are and not as they are priced: the entries of so many tokens, the sliding windows
    (a drafter's layer with them) and what of the C4 compressors' states belongs to those."""
    entries = (
        m.layers_c4 * (_entry_bytes(4, True) + INDEX_KEY_BYTES) / 4 + m.layers_c128 * _entry_bytes(128, True) / 128
    )
    states = (16 if speculative else 8) / PAGE_TOKENS * _c4_state_bytes(m)
    return tokens * entries + window_tokens * ((m.layers + speculative) * _entry_bytes(1, True) + states)


def c128_state_bytes(m: Model, requests: int, speculative: bool) -> int:
    """Compressor state of the C128 layers, held for every request slot, used or not (REQUEST_STATES_SINCE)."""
    ring = 256 if speculative else 128
    rows = math.ceil(((requests + 1) * ring + ring + 1) / 128) * 128
    return rows * 2 * m.head_dim * STATE_BYTES * m.layers_c128


def _c4_state_bytes(m: Model) -> int:
    return 2 * 2 * (m.head_dim + m.index_dim) * STATE_BYTES * m.layers_c4


# ---- scratch: what is outside of SGLang's static fraction


def free_at_start(card_bytes: float) -> float:
    """Of a card with so many bytes by the driver what --mem-fraction-static is a fraction of."""
    return max(0.0, card_bytes - KEPT_BY_DRIVER - AT_START)


def static_off_by(weights: float, fraction: float) -> float:
    """Bytes by which the pools may turn out smaller than what is planned."""
    return weights * WEIGHTS_OFF_BY + fraction * AT_START * ESTIMATE_OFF_BY


@dataclass(frozen=True)
class Reserve:
    """off_by: how many bytes more it may turn out to be; 0 where a bound is enforced or the arithmetic exact."""

    what: str
    bytes: float
    basis: str
    off_by: float = 0.0


def index_logits_bytes(rows: int, context: int) -> int:
    """The stock indexer's [rows, C4 entries] fp32, allocated at the captured or chunk's worst case."""
    return rows * math.ceil(context / PAGE_TOKENS) * 64 * 4


def chunk_for(context: int, budget: int) -> int:
    """The largest usual prefill chunk whose index logits fit in `budget` bytes."""
    return next((chunk for chunk in CHUNKS if index_logits_bytes(chunk, context) <= budget), CHUNKS[-1])


@functools.cache  # a plan asks a hundred times, and the answer is read from the build's files
def has_our_module() -> bool:
    from deepseek_v4_sm120.ops.shared import extension

    return extension.problem() is None


def attention_workspace(rows: int, heads: int, context: int, num_sms: int = 188) -> Reserve:
    """Split results of one attention call of ours at the captured width: the compiled module's own bound."""
    from deepseek_v4_sm120.ops.shared import extension

    width = math.ceil(context / 128 / 64) * 64
    if has_our_module():
        partials, words = extension.load().sparse_decode_workspace(
            rows=rows, heads=heads, indices_width=128, extra_indices_width=width, num_sms=num_sms
        )
        return Reserve("attention workspace", partials + 4 * words, "sparse_decode's own bound")
    size = rows * heads * (2 + width // 64) * 512 * 2
    basis = "estimate: FlashInfer's scratch; our module does not load here"
    return Reserve("attention workspace", size, basis, size * ESTIMATE_OFF_BY)


def sums_between_cards(m: Model, tp: int) -> Reserve:
    """The places in which the cards find each other's terms."""
    from deepseek_v4_sm120.ops import all_reduce_sizes

    what = "sums between the cards"
    if has_our_module():
        return Reserve(what, all_reduce_sizes.places_bytes(tp, "peer", m.hidden), "all_reduce's own")
    return Reserve(what, (48 << 20) * m.hidden / 4096, "at most, as with 8 cards; our module does not load here")


DRAFT_HEAD_VALUE = 17 / 32  # bytes of one: INT4, and a bf16 scale for 64
DRAFT_HEAD_ROWS = 64  # that it takes at most


def draft_head_bytes(m: Model, tp: int, rows: int) -> float:
    """The head's copy in INT4, and the float32 scores of so many rows, by halves of the inputs."""
    return m.vocab / tp * (DRAFT_HEAD_VALUE * m.hidden + 8 * min(rows, DRAFT_HEAD_ROWS))


def experts_bytes(m: Model, tp: int, rows: int, is_ours: bool) -> int:
    """What the experts hold besides input and output. mxfp4_moe: h and y of every pair of row and expert, and its
    sorted list; stock: gate and up beside each other, then y."""
    inter = m.expert_width // tp
    pair = 2 * (inter + m.hidden) + 64 if is_ours else 2 * (2 * inter + m.hidden)
    return rows * m.experts_per_token * pair


def activation_bytes(m: Model, tp: int, rows: int) -> int:
    """Of a pass: the streams, three at a time, and the attention's queries and outputs."""
    return rows * 2 * (3 * m.streams * m.hidden + 2 * (m.heads // tp) * m.head_dim)


def c128_list_bytes(rows: int, context: int) -> int:
    return rows * math.ceil(context / 128 / 64) * 64 * 4


def row_tables_bytes(rows: int, context: int) -> int:
    """Page table and C128 lists of a pass, which have a line for each of its rows, as wide as the longest request. A
    pass that goes in halves has the halves' beside its own (adapters/prompts_in_halves.py)."""
    return rows * math.ceil(context / PAGE_TOKENS) * 4 + c128_list_bytes(rows, context)


def between_stages_bytes(m: Model, rows: int, stages: int) -> int:
    """Of a pass's streams, which go from stage to stage: those that came, and the ones before them or those that are
    on their way; a stage that has others on both sides has both."""
    return (2 if stages == 2 else 4) * rows * 2 * m.streams * m.hidden


def slot_tables_bytes(requests: int, context: int, tokens: int) -> int:
    """Where each request's tokens are, an int32 for each token that it may have, used or not, and a slot for rows that
    pad; and of each token that the KV cache holds its place in the sliding windows and in the prefix cache, int64."""
    return (requests + 1) * context * 4 + 2 * tokens * 8


def logits_bytes(m: Model, rows: int) -> int:
    """Of a prompt whose log-probabilities are asked for: float32 logits, and their rows once more."""
    return 2 * min(rows, LOGPROB_ROWS) * m.vocab * 4


def prefill_graphs_bytes(
    m: Model, tp: int, sizes: Sequence[int], context: int, has_experts: bool, halved_from: int = 0
) -> float:
    """What SGLang's prefill graphs hold, of passes of so many rows each: one pool, as large as the largest needs, and
    for each size page table and C128 lists as wide as the context. They are captured when the pools have their size,
    and those of this model are not sized again: so it is taken from what --mem-fraction-static leaves (0.5.17 on).
    halved_from: rows of a pass from which on it goes in halves; 0: none does."""
    rows = max(sizes)
    arithmetic = activation_bytes(m, tp, rows) + 2 * rows * m.streams * m.hidden  # and what a pass hands out
    arithmetic += experts_bytes(m, tp, rows, has_experts) + expanded_wo_a_bytes(m) / tp + INDEX_SELECT_PREFILL_BYTES
    halved = sum(size for size in sizes if halved_from and size >= halved_from)
    tables = row_tables_bytes(sum(sizes) + halved, context)
    return GRAPHS_OVER_ARITHMETIC * arithmetic + len(sizes) * GRAPHS_OF_A_SIZE + tables


def decode_sizes(requests: int, speculates: bool) -> list[int]:
    """Of how many requests SGLang captures a step, the same in every release (a test asks them)."""
    most = min(requests, MOST_CAPTURED_REQUESTS)
    if speculates:
        steps = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, most + 1, 16)]
    else:
        steps = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    found = [size for size in steps if size <= most]
    return found if most in found else [*found, most]


def decode_graphs_bytes(m: Model, tp: int, rows: int, requests: int, context: int, has_experts: bool) -> float:
    """What the graphs of decode and verify steps hold: one pool for all sizes, captured from the largest down, so as
    large as that one needs, its logits among it; and for each size page table and C128 lists, twice the rest with
    speculation, whose drafts have graphs of their own."""
    speculates, captured = rows > requests, min(requests, MOST_CAPTURED_REQUESTS)
    sizes, of_each = decode_sizes(requests, speculates), rows // requests
    most = captured * of_each
    arithmetic = activation_bytes(m, tp, most) + experts_bytes(m, tp, most, has_experts) + 2 * 4 * most * m.vocab
    held = GRAPHS_OF_LIBRARIES + GRAPHS_OVER_ARITHMETIC * arithmetic
    return held + len(sizes) * GRAPHS_OF_A_SIZE * (1 + speculates) + row_tables_bytes(of_each * sum(sizes), context)


def reserves(
    m: Model,
    *,
    tp: int,
    context: int,
    chunk: int,
    rows: int,
    replaced: Collection[str] = OPS,
    drafts: bool = False,
    captured: Sequence[int] = (),
    halved: tuple[int, int] = (0, 0),
    shadow: bool = False,
    drafter_behind: float = 0.0,
    requests: int = 1,
    tokens: int = 0,
    stages: int = 1,
) -> list[Reserve]:
    """What must stay free beside weights and pools. rows: of the largest captured decode or verify batch; replaced:
    the operators that are ours; drafts: whether a draft's head is kept in INT4; captured: rows of the passes of prompts
    that are captured; halved: rows from which on a pass goes in halves, without graphs and in them, 0: none; shadow:
    whether SGLang's own run beside ours; drafter_behind: bytes of a drafter that is loaded when the pools have their
    size, which brings an embedding and a head of its own until it shares the model's; requests: slots; tokens: of
    capacity, at most; stages: of a pipeline, of whose batches each has its share of the requests."""
    heads = m.heads // tp
    has_experts = "mxfp4_moe" in replaced and m.expert_format == FP4
    graphs = decode_graphs_bytes(m, tp, rows, math.ceil(requests / stages), context, has_experts)
    of_prompts = prefill_graphs_bytes(m, tp, captured, context, has_experts, halved[1]) if captured else 0.0
    behind, selection = [], []
    if drafter_behind:
        loaded = drafter_behind + head_and_embedding_bytes(m, tp)
        behind = [Reserve("drafter, loaded behind the pools", loaded, "its weights; SGLang sizes the pools first")]
    if "index_select" in replaced:
        own = INDEX_SELECT_PREFILL_BYTES + INDEX_SELECT_DECODE_BYTES
        basis = "index_select's own bounds, at any context"
        selection.append(Reserve("index selection, chunk and graphs", own, basis))
    if shadow or "index_select" not in replaced:
        logits = index_logits_bytes(chunk, context) + index_logits_bytes(rows, context)
        basis = "[rows, context / 4] fp32 of the stock indexer"
        selection.append(Reserve("index logits, chunk and graphs", logits, basis))
    of_a_pass = [*_pass_reserves(m, tp, context, chunk, replaced, 0 < halved[0] <= chunk), *selection]
    beyond = logits_bytes(m, chunk) - sum(r.bytes for r in of_a_pass)
    slots = slot_tables_bytes(requests, context, tokens)
    return [
        Reserve("kernels and NCCL, loaded later", AFTER_START, "estimate", AFTER_START * ESTIMATE_OFF_BY),
        Reserve("tables of the request slots", slots, "[slots, context] int32, and 16 bytes a token of capacity"),
        *behind,
        Reserve("decode graphs", graphs, "estimate, by eight H20", graphs * ESTIMATE_OFF_BY),
        *(
            [Reserve("prefill graphs", of_prompts, "estimate, by two H200 and four H100", of_prompts * ESTIMATE_OFF_BY)]
            if captured
            else []
        ),
        *of_a_pass,
        *(
            [Reserve("streams between stages", between_stages_bytes(m, chunk, stages), f"arithmetic, chunk of {chunk}")]
            if stages > 1
            else []
        ),
        *(
            [Reserve("a prompt's log-probabilities", beyond, "[rows, vocabulary] fp32 twice, beyond a pass's scratch")]
            if beyond > 0
            else []
        ),
        attention_workspace(rows, heads, context),
        *([sums_between_cards(m, tp)] if tp > 1 and "all_reduce" in replaced else []),
        *([Reserve("drafts' head in INT4", draft_head_bytes(m, tp, rows), "draft_head's own")] if drafts else []),
    ]


def _pass_reserves(
    m: Model, tp: int, context: int, chunk: int, replaced: Collection[str], in_halves: bool
) -> list[Reserve]:
    """Of a pass of a prompt's chunk, index selection apart."""
    has_experts = "mxfp4_moe" in replaced and m.expert_format == FP4
    experts = experts_bytes(m, tp, chunk, has_experts)
    tables, of_tables = row_tables_bytes(chunk, context), "[chunk, context / 256] and [chunk, context / 128] int32"
    return [
        Reserve("prefill activations", activation_bytes(m, tp, chunk), f"arithmetic, chunk of {chunk}"),
        *(
            [Reserve("wo_a of a prompt, in bf16", expanded_wo_a_bytes(m) / tp, "wo_a's own")]
            if "wo_a" in replaced
            else []
        ),
        Reserve("experts of a prefill chunk", experts, "mxfp4_moe's scratch" if has_experts else "arithmetic"),
        Reserve(
            "page table and C128 lists of a prefill chunk",
            2 * tables if in_halves else tables,
            of_tables + (", its own and its halves'" if in_halves else ""),
        ),
    ]
