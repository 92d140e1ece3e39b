"""A prompt's residual streams, dealt to the cards: each keeps the streams of its share of the rows.

Under tensor parallelism all cards have all rows' streams and make the same boundaries. Here the sum in front of a
boundary is a reduce-scatter by rows, the boundary runs on a card's share, and what it reads for the next sublayer is
gathered: together the bytes of the sum, with mHC's work and the streams' memory divided by the cards.

    replace_model_forward       the target model's forward: whether this pass is dealt, and its hidden states whole
    replace_embedding_forward   VocabParallelEmbedding.forward: of the pass's embedding, this rank's share
    replace_fused_post_pre      a boundary; these three wrap what mhc.py has there, or SGLang's own
    replace_hc_pre              the first layer's
    replace_hc_post             behind the last layer; the head's collapse and norm run on shares, too

Sums are the tensor-parallel group's `all_reduce`, which in a dealt pass gives a `SumOfShares` for [rows, hidden].
Whoever is no boundary gets the whole sum from it, and a boundary that is given a whole sum takes its share of that: so
how a sum is asked for decides about bytes, not about numbers. A row's streams and y have the whole boundary's bits,
given its sum; that NCCL adds in the same order is certain for two ranks alone.

Shares are of consecutive rows, as many for each rank, zeros behind the last row. All ranks must decide alike: by rows,
mode, settings, groups, and who would sum (`_why_not`); `status` says how many passes were dealt, and why others were
not. Collectives are torch's, on the group's own NCCL communicator and on the current stream, in one order: a rank that
stays away ends the others by SGLang's and NCCL's watchdogs, as in a whole sum. A sum that nobody takes until the pass
ends is an error (waiting.py).
"""

from __future__ import annotations

import collections
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.sglang_patches.adapters import prompt_passes
from deepseek_v4_sm120.sglang_patches.adapters.all_reduce import PARALLEL_STATE
from deepseek_v4_sm120.sglang_patches.adapters.index_select_dealt import see_the_same_cards
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import PATCH as BOUNDARY
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, way_out
from deepseek_v4_sm120.sglang_patches.defaults import DEALT_STREAMS as PATCH

# Of each rank's share at least. A boundary of 2,048 rows that becomes one of 1,024 is reckoned to take 50 us less on
# SM120, 36 on an H200 (measured: 78 and 43), and a second collective's launch and latency cost about 20
ROWS = 1024
_pass = Scope()  # its layer: the pass's Shares; known: `embedding`, the model's
_seen: collections.Counter = collections.Counter()  # "passes" dealt, "rows" of them
_left: collections.Counter = collections.Counter()  # why -> passes of as many rows that were not


@dataclass(frozen=True)
class Shares:
    """The rows of a pass, dealt to the ranks of `coordinator`: rank r has the rows from r * each on."""

    coordinator: object
    rows: int
    hidden: int

    @property
    def each(self) -> int:
        return -(-self.rows // self.coordinator.world_size)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's [each, ...] of [rows, ...]: a view, where it has as many."""
        first = self.each * self.coordinator.rank_in_group
        return _padded(x[first : first + self.each], self.each)

    def summed(self, term: torch.Tensor) -> torch.Tensor:
        """This rank's [each, hidden] of the sum of all ranks' terms [rows, hidden], which stay as they are."""
        term = _padded(term, self.each * self.coordinator.world_size).contiguous()
        out = term.new_empty(self.each, *term.shape[1:])
        torch.distributed.reduce_scatter_tensor(out, term, group=self.coordinator.device_group)
        return out

    def gathered(self, share: torch.Tensor) -> torch.Tensor:
        """[rows, ...], contiguous, of all ranks' [each, ...]."""
        whole = share.new_empty(self.each * self.coordinator.world_size, *share.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, share.contiguous(), group=self.coordinator.device_group)
        return whole[: self.rows]

    def own_of(self, f) -> torch.Tensor:
        """What a boundary adds: this rank's share of a sum, whoever makes it."""
        return f.own_rows() if isinstance(f, SumOfShares) else self.own(f)

    def takes(self, x) -> bool:
        return isinstance(x, torch.Tensor) and x.shape == (self.rows, self.hidden) and x.dtype == torch.bfloat16


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - len(x)
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


class SumOfShares(OwedSum):
    """Terms whose sum the boundary behind it makes of its share alone. They are let go with that: SGLang's model holds
    what it was given until its next layer ends."""

    operator = PATCH
    untaken = "the sum of a sublayer's output was put off, and nobody asked for it"

    def __init__(self, term: torch.Tensor, shares: Shares, original: Callable):
        self._term, self._shares, self._original = term, shares, original
        self._form = torch.empty_like(term, device="meta")
        self._own: torch.Tensor | None = None
        _pass.put_off(self)

    def is_of(self, terms) -> bool:
        return self is terms

    def own_rows(self) -> torch.Tensor:
        """[each, hidden]: this rank's share of the sum."""
        if self._own is None:
            _pass.take(SumOfShares, self)
            self._own = self._shares.summed(self._term) if self._sum is None else self._shares.own(self._sum)
            self._term = None
        return self._own

    def finish(self) -> torch.Tensor:
        _pass.take(SumOfShares, self)
        return self._original(self._term) if self._own is None else self._shares.gathered(self._own)

    def unfinished(self) -> tuple[torch.Tensor, dict]:
        return self.run(), {}

    def alike(self, name: str):
        is_of_place = name in ("device", "is_cuda", "is_cpu")
        return getattr((self._term if self._own is None else self._own) if is_of_place else self._form, name)


# ---- a pass


def replace_model_forward(original: Callable) -> Callable:
    """For DeepseekV4Model.forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None) ->
    (hidden states, streams in front of the head), the second of which only a batch that captures them reads."""

    @functools.wraps(original)
    def forward(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors=None):
        arguments = (self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if torch.compiler.is_compiling() or not forward_batch.forward_mode.is_extend_without_speculative():
            return original(*arguments)
        shares = _shares(self, input_ids, forward_batch, input_embeds, pp_proxy_tensors)
        if shares is None:
            return original(*arguments)
        _deal_sums_of(shares.coordinator)
        with _pass.enter(shares, embedding=self.embed_tokens):
            hidden_states, streams = original(*arguments)
        return _whole(shares, hidden_states), _whole(shares, streams) if _captures(forward_batch) else None

    return forward


def _whole(shares: Shares, x: torch.Tensor) -> torch.Tensor:
    if len(x) not in (shares.each, shares.rows):
        raise RuntimeError(way_out(PATCH, f"of {shares.rows} rows, {shares.each} a rank, {len(x)} came out"))
    return x if len(x) == shares.rows else shares.gathered(x)


def _captures(forward_batch) -> bool:
    """Whether somebody reads the streams in front of the head: EAGLE's draft, return_hidden_states."""
    mode = forward_batch.capture_hidden_mode
    return mode is not None and mode.need_capture()


def _shares(model, input_ids: torch.Tensor, forward_batch, *others) -> Shares | None:
    """How this pass of a prompt is dealt; None: not at all. others: what the model is given in place of tokens."""
    state = importlib.import_module(PARALLEL_STATE)
    tp, rows = state._TP, len(input_ids)
    if rows < ROWS * tp.world_size:
        return None
    why = _why_not_here(state, tp, model) or _why_not(tp, model, input_ids, forward_batch, others)
    _count(why, tp, rows)
    return Shares(tp, rows, model.hidden_size) if why is None else None


def _why_not_here(state, tp, model) -> str | None:
    """What keeps all of a server's passes whole."""
    return prompt_passes.first(
        prompt_passes.of_sums(tp)
        | prompt_passes.of_server(state, tp, model.pp_group, "boundaries")
        | {
            "DSPARK's draft reads streams of layers": getattr(model, "dspark_layers_to_capture", None) is not None,
            "a hidden size that mhc is not made for": not limits.takes(BOUNDARY, hidden=model.hidden_size),
        }
    ) or (None if see_the_same_cards(tp.world_size) else prompt_passes.OTHER_CARDS)


def _why_not(tp, model, input_ids, forward_batch, others: tuple) -> str | None:
    """What keeps this pass whole."""
    if torch.cuda.is_current_stream_capturing():
        return "under capture"
    one = torch.empty(len(input_ids), model.hidden_size, dtype=torch.bfloat16, device=input_ids.device)
    return prompt_passes.first(
        {
            "given embeddings": any(other is not None for other in others),
            "batches that take turns": bool(forward_batch.tbo_children),
            "others than NCCL sum": not prompt_passes.is_for_nccl(tp, one),
        }
    )


def _deal_sums_of(coordinator) -> None:
    prompt_passes.wrap_sums_of(coordinator, "deals", _dealt_sum)


def _dealt_sum(original: Callable, input_):
    shares = _pass.layer
    is_dealt = shares is not None and shares.takes(input_)
    return SumOfShares(input_, shares, original) if is_dealt else original(input_)


def _count(why: str | None, tp, rows: int) -> None:
    ranks = tp.world_size

    def found() -> dict:
        return {"ranks": ranks, **_seen, "not_dealt": dict(_left)}

    prompt_passes.count(
        PATCH, why, rows, seen=_seen, left=_left, describe=functools.partial(_describe, ranks), found=found
    )


def _describe(ranks: int) -> str:
    text = f"{PATCH}: {_seen['passes']} passes of {ROWS * ranks} rows and more dealt to {ranks} cards"
    return "; ".join([text, *(f"{count} not: {why}" for why, count in _left.items())])


# ---- what has shares of its rows


def _of_this_pass(streams) -> Shares | None:
    """The shares that `streams` are one of; None: they are whole, or no pass is dealt."""
    shares = None if torch.compiler.is_compiling() else _pass.layer
    return shares if shares is not None and len(streams) == shares.each else None


def replace_embedding_forward(original: Callable) -> Callable:
    """For VocabParallelEmbedding.forward(self, input_) -> [rows, hidden], of the pass's model [each, hidden]."""

    @functools.wraps(original)
    def forward(self, input_):
        found = original(self, input_)
        if torch.compiler.is_compiling() or _pass.layer is None or self is not _pass.known["embedding"]:
            return found
        return _pass.layer.own_of(found)

    return forward


def replace_fused_post_pre(original: Callable) -> Callable:
    """For mhc_fused_post_pre(x, residual, ...) -> (streams, post, comb, y): y is whole, the others are shares."""

    @functools.wraps(original)
    def mhc_fused_post_pre(x, residual, *args, **kwargs):
        shares = _of_this_pass(residual)
        if shares is None:
            return original(x, residual, *args, **kwargs)
        streams, post, comb, y = original(shares.own_of(x), residual, *args, **kwargs)
        return streams, post, comb, shares.gathered(y)

    return mhc_fused_post_pre


def replace_hc_pre(original: Callable) -> Callable:
    """For the decoder layer's hc_pre(x, ...) -> (y, post, comb, normed): y is whole, the others are shares."""

    @functools.wraps(original)
    def hc_pre(self, x, *args, **kwargs):
        shares = _of_this_pass(x)
        y, *rest = original(self, x, *args, **kwargs)
        return (y if shares is None else shares.gathered(y), *rest)

    return hc_pre


def replace_hc_post(original: Callable) -> Callable:
    """For the decoder layer's hc_post(x, residual, post, comb) -> streams, of shares a share."""

    @functools.wraps(original)
    def hc_post(self, x, residual, post, comb):
        shares = _of_this_pass(residual)
        return original(self, x if shares is None else shares.own_of(x), residual, post, comb)

    return hc_post
