"""What the MTP draft's block begins with -> `ops.fp8_linear_draft_input`: the embedding's norm and projection, those of
the hidden states, and their sum, which SGLang makes one behind the other in DeepseekV4ModelNextN.forward.

That forward names no part of it, so ours makes the sum before and hands it in as the embeddings: as ones of no tokens,
of which it makes the block's input by `embeddings.unsqueeze(1).repeat(1, hc_mult, 1)` and by nothing else (`Streams`).
All releases from 0.5.12 to 0.5.23 have this beginning; tests/patching/test_wheel_draft_input.py runs each one's.

A step's rows are ours (dense_rows.py, by those of all streams), where both projections are fp8_linear's. Where a card
has all of the vocabulary its rows are read by their ids; else the embedding is SGLang's, with its sum between cards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import fp8_linear_draft_input as op
from deepseek_v4_sm120.sglang_patches import shadow
from deepseek_v4_sm120.sglang_patches.adapters import dense_rows
from deepseek_v4_sm120.sglang_patches.adapters import fp8_linear as products
from deepseek_v4_sm120.specs import bounds

PATCH = "draft_input"
EMBEDDING, METHOD = "VocabParallelEmbedding", "UnquantizedEmbeddingMethod"
PROJECTION = "ReplicatedLinear"


class Streams:
    """The block's input where SGLang has embeddings of no tokens, which it repeats for each stream."""

    shape = (0,)

    def __init__(self, made: torch.Tensor):
        self._made = made

    def unsqueeze(self, _dim: int) -> Streams:
        return self

    def repeat(self, *_times: int) -> torch.Tensor:
        return self._made


def _half(norm, projection) -> op.Half:
    return op.Half(norm.weight.data, norm.variance_epsilon, projection.weight, projection.weight_scale_inv)


def halves(model) -> tuple[op.Half, op.Half]:
    """Those of the hidden states and of the embedding."""
    return _half(model.hnorm, model.h_proj), _half(model.enorm, model.e_proj)


def _hidden(model, ids, forward_batch) -> torch.Tensor | None:
    """[tokens, streams, inputs]; None: what there is has another form."""
    hidden = getattr(forward_batch.spec_info, "hidden_states", None)
    if not isinstance(hidden, torch.Tensor) or not hidden.is_contiguous():
        return None
    shape = (ids.shape[0], model.hc_mult, model.h_proj.weight.shape[1])
    return hidden.view(shape) if hidden.numel() == shape[0] * shape[1] * shape[2] else None


def _is_plain(norm, projection) -> bool:
    return (
        type(projection).__name__ == PROJECTION
        and projection.bias is None
        and products.keeps(projection.quant_method, projection)
        and products.is_plain(norm)
    )


def takes(model, ids, forward_batch) -> bool:
    """Whether this is a step of a draft that ours computes."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or not dense_rows.are_ours(ids.shape[0] * model.hc_mult):
        return False
    if torch.compiler.is_compiling() or not _is_plain(model.hnorm, model.h_proj):
        return False
    hidden = _hidden(model, ids, forward_batch) if _is_plain(model.enorm, model.e_proj) else None
    return hidden is not None and hidden.device == ids.device and op.takes(hidden, *halves(model))


def has_whole(embedding, hidden: torch.Tensor) -> bool:
    """Whether a token's row of the vocabulary lies on this card, and is its embedding as it lies."""
    weight = getattr(embedding, "weight", None)
    return (
        type(embedding).__name__ == EMBEDDING
        and type(getattr(embedding, "quant_method", None)).__name__ == METHOD
        and embedding.tp_size == 1
        and getattr(embedding, "output_dtype", None) in (None, torch.bfloat16)
        and isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.device == hidden.device
        and weight.shape[1:] == hidden.shape[2:]
        and weight.is_contiguous()
    )


def _serve(model, ids, forward_batch) -> torch.Tensor:
    hidden, table = _hidden(model, ids, forward_batch), model.embed_tokens
    if has_whole(table, hidden):
        return op.draft_input(hidden, table.weight.data, *halves(model), ids=ids.contiguous())
    return op.draft_input(hidden, table(ids), *halves(model))


def _by_sglang(model, ids, forward_batch) -> torch.Tensor:
    """The same by SGLang's layers, as its forward calls them."""
    hidden = forward_batch.spec_info.hidden_states.view(-1, model.h_proj.weight.shape[1])
    of_hidden, _ = model.h_proj(model.hnorm(hidden))
    of_embedding, _ = model.e_proj(model.enorm(model.embed_tokens(ids)))
    return of_embedding[:, None, :] + of_hidden.view(ids.shape[0], model.hc_mult, -1)


def _shape(model, ids, _batch) -> dict[str, int]:
    return {"rows": ids.shape[0], "streams": model.hc_mult}


def replace_forward(original: Callable) -> Callable:
    """For DeepseekV4ModelNextN.forward(self, input_ids, positions, forward_batch, input_embeds=None)."""
    comparison = shadow.Comparison(
        tensors=lambda ours, theirs, *_: [(ours.flatten(0, 1), theirs.flatten(0, 1))],
        identity=lambda model, *_: model.h_proj.weight.data_ptr(),
        shape=_shape,
        relative_l2=bounds.DRAFT_INPUT.shadow,
    )
    serve = shadow.shadowed(PATCH, _serve, _by_sglang, comparison)

    @functools.wraps(original)
    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        if input_embeds is None and takes(self, input_ids, forward_batch):
            input_embeds = Streams(serve(self, input_ids, forward_batch))
        return original(self, input_ids, positions, forward_batch, input_embeds)

    return forward
