"""The drafts' logits -> `ops.bf16_linear_draft_head`: by a copy of the target's head in INT4, the best by the head.

A draft is a guess that verification judges with the model's own head, so a coarser head changes how many guesses are
accepted, never what is said; and what is greatest is computed by the head itself, so that guesses are its own. The copy
is made of the head that the draft computes with, where SGLang hands that over, before anything is captured; loading
weights again makes it again, in place.

    DeepseekV4ForCausalLM.set_embed_and_head      the MTP draft gets the target's head
    DeepseekV4ForCausalLMDSpark.attach_shared_modules   DSPARK's draft does, or keeps its own
    LogitsProcessor._compute_lm_head, DeepseekV4ForCausalLMDSpark._logits_from_x_post_hc   a draft's logits
    post_load_weights, _model_load_weights_direct, dynamic_import   weights were loaded

The copy hangs on what only the draft has, its logits processor or its model: the head itself is the target's, too. A
step's rows (MOST_ROWS) are ours; more, and heads that are not plain bf16, are the original's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepseek_v4_sm120.ops import bf16_linear_draft_head as op
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters import bf16_linear, direct_updates
from deepseek_v4_sm120.sglang_patches.adapters.fp8_linear import as_rows
from deepseek_v4_sm120.sglang_patches.adapters.kept_weights import KeptWeights
from deepseek_v4_sm120.specs import bounds

PATCH = "draft_head"
COPY = "_dsv4_sm120_draft_head"  # of a draft's logits processor, or of DSPARK's model
# shadow mode's second record: guesses that are others (of a card's share of the vocabulary). Of a call its relative L2
# is the root of their share, of a call of one row 0 or 1; no share is bad
GUESSES, EVERY_GUESS = "draft_head_guesses", 1.0

MOST_ROWS = (
    64  # eight of them at once; of more the bf16 head reads its weights once, where this one comes again and again
)

kept = KeptWeights(PATCH, "in INT4")


@dataclass(eq=False)
class DraftHead:
    """A head's bf16 weights, another's to write, and their copy in INT4."""

    source: torch.Tensor
    copy: torch.Tensor

    @classmethod
    def of(cls, source: torch.Tensor) -> DraftHead:
        with torch.inference_mode(False):  # else it could not be written outside of it
            head = cls(source, op.empty(source))
        head.fill()
        return head

    def fill(self) -> None:
        op.fill(self.source.detach(), self.copy)

    def logits(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return op.draft_head(as_rows(x), self.copy, self.source.detach(), out_dtype=dtype)


heads: list[DraftHead] = []


def keeps(weight) -> bool:
    """True for a head that can be copied: plain bf16 of our model, on a GPU that we serve."""
    return (
        models_served.announced() is not None
        and models_served.serves_this_process()
        and isinstance(weight, torch.Tensor)
        and op.takes_weight(weight)
        and device_gate.serves(weight.device)
    )


def keep(owner, weight) -> None:
    """A copy of this head for the draft whose `owner` it is; the one it has, if that is of the same weights."""
    found = getattr(owner, COPY, None)
    if found is not None and found.source is weight:
        found.fill()
    elif keeps(weight):
        head = DraftHead.of(weight)
        heads.append(head)
        setattr(owner, COPY, head)
        kept.add(head.copy.numel())


def takes(owner, weight, x) -> bool:
    """Whether the owner's copy is this head's, and x a step's rows."""
    head = getattr(owner, COPY, None)
    return (
        head is not None
        and head.source is weight
        and isinstance(x, torch.Tensor)
        and x.dtype == torch.bfloat16
        and x.dim() == 2
        and 0 < x.shape[0] <= MOST_ROWS
    )


def replace_set_embed_and_head(original: Callable) -> Callable:
    """For DeepseekV4ForCausalLM.set_embed_and_head, which is called of drafts."""

    @functools.wraps(original)
    def set_embed_and_head(self, embed, head):
        original(self, embed, head)
        keep(self.logits_processor, self.lm_head.weight)

    return set_embed_and_head


def replace_attach(original: Callable) -> Callable:
    """For DeepseekV4ForCausalLMDSpark.attach_shared_modules."""

    @functools.wraps(original)
    def attach_shared_modules(self, *, embed_tokens, lm_head):
        original(self, embed_tokens=embed_tokens, lm_head=lm_head)
        keep(self, getattr(self.lm_head, "weight", None))

    return attach_shared_modules


def replace_loading(original: Callable) -> Callable:
    """For what has written the weights of a model, its first argument: copies of its head are made again."""

    @functools.wraps(original)
    def load(*args, **kwargs):
        result = original(*args, **kwargs)
        weight = getattr(getattr(args[0], "lm_head", None), "weight", None)
        for head in heads:
            if head.source is weight:
                head.fill()
        return result

    return load


def replace_loading_custom(original: Callable) -> Callable:
    """For dynamic_import, where a --custom-weight-loader is looked up: it writes as `replace_loading`'s do."""
    return direct_updates.finding(original, lambda found, _: replace_loading(found))


def _beside(serve: Callable, original: Callable, weight_of: Callable) -> Callable:
    """`serve`, in shadow mode beside the original. weight_of: of a call's arguments, the head's."""

    def identity(*call, **_) -> int:
        return weight_of(*call).data_ptr()

    def shape(*call, **_) -> dict[str, int]:
        return {"rows": call[1].shape[0], "outputs": weight_of(*call).shape[0]}

    def tensors(ours, theirs, *call, **_):
        same = (ours.argmax(-1) == theirs.argmax(-1)).float()[:, None]
        given = {"identity": identity(*call), "shape": shape(*call), "relative_l2": EVERY_GUESS}
        shadow.record(GUESSES, [(same, torch.ones_like(same))], **given)
        return [(ours, theirs)]

    comparison = shadow.Comparison(tensors, identity, shape, bounds.DRAFT_HEAD.shadow)
    return shadow.shadowed(PATCH, serve, original, comparison)


def replace_lm_head(original: Callable) -> Callable:
    """For LogitsProcessor._compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, [*, out=None]); where it
    does not write into `out`, its caller copies."""

    def serve(self, hidden_states, lm_head, *_, **__):
        dtype = torch.float32 if bf16_linear.has_float32_head(self) else torch.bfloat16
        return getattr(self, COPY).logits(hidden_states, dtype)

    serve = _beside(serve, original, lambda self, hidden_states, lm_head, *_: lm_head.weight)

    @functools.wraps(original)
    def _compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, **kwargs):
        ours = (
            embedding_bias is None
            and takes(self, getattr(lm_head, "weight", None), hidden_states)
            and bf16_linear.is_plain_head(self, lm_head)
        )
        return (serve if ours else original)(self, hidden_states, lm_head, embedding_bias, **kwargs)

    return _compute_lm_head


def replace_dspark_logits(original: Callable) -> Callable:
    """For DeepseekV4ForCausalLMDSpark._logits_from_x_post_hc(self, x_post_hc): norm, head, and unless the Markov head
    wants the rank's own logits, all ranks' together."""
    module = original.__globals__

    def serve(self, x_post_hc):
        x = self.stages[-1].norm(x_post_hc)
        local = getattr(self, COPY).logits(x, torch.float32 if self._use_fp32_lm_head else torch.bfloat16)
        return local if self._opt_markov_w2_tp_shard else module["gather_and_crop_vocab"](local, self.lm_head)

    serve = _beside(serve, original, lambda self, x_post_hc: self.lm_head.weight)

    @functools.wraps(original)
    def _logits_from_x_post_hc(self, x_post_hc):
        ours = takes(self, getattr(self.lm_head, "weight", None), x_post_hc)
        return (serve if ours else original)(self, x_post_hc)

    return _logits_from_x_post_hc
