"""SGLang's hyper-connection calls -> `ops.mhc`.

    replace_fused_post_pre   mhc_fused_post_pre of SGLang's mHC kernels: a whole boundary is one call of ours
    replace_fusion_enabled   the question whether a layer leaves its last post to the next layer's boundary: yes, but
                             where layers' weights lie on the host
    replace_hc_pre           DeepseekV4DecoderLayer.hc_pre: the first layer, the MTP block, split batches (two-batch
                             overlap), and every pre where SGLang has no fused boundary
    replace_hc_post          DeepseekV4DecoderLayer.hc_post: behind the last layer, and likewise
    replace_fused_head       fused_hc_head, the collapse before the model's last norm
    replace_hc_head          the MTP block's own hc_head
    replace_dspark_head      that of DSPARK's draft

What the boundary and the post are given may be a sum between the cards that is not finished (mhc_owed_sum.py), or on
one card a product without its last addition (mhc_owed_terms.py).

Each computes a call that it takes and otherwise returns what the original returns. In shadow mode each
output of a call (streams, post, comb, y) is compared and counted by itself, with the same bound.

SGLang's own switches (SGLANG_OPT_*MHC*) choose what runs where we take nothing. Results are ordinary allocations: with
--enable-symm-mem y is not in the symmetric pool, where SGLang puts it for experts that write in place (ours do not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from deepseek_v4_sm120.ops import mhc as op
from deepseek_v4_sm120.ops.shared import limits
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches import device_gate, models_served, shadow
from deepseek_v4_sm120.sglang_patches.adapters.handed_over import layers_lie_on_the_host
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_sum import OwedSum, finished
from deepseek_v4_sm120.sglang_patches.adapters.mhc_owed_terms import OwedTerm
from deepseek_v4_sm120.specs import bounds

PATCH = "mhc"
POST_SCALE = 2.0  # _MHC_POST_MULT_VALUE of SGLang's model, which hc_pre does not get as an argument


def _takes(streams: torch.Tensor, fn: torch.Tensor | None, scale, base, mixes: int) -> bool:
    """Shapes and types that ops.mhc takes; the rest is SGLang's."""
    if streams.ndim != 3 or streams.shape[0] == 0 or streams.dtype != torch.bfloat16:
        return False
    rows, num_streams, hidden = streams.shape
    return (
        limits.takes(PATCH, hidden=hidden, streams=num_streams)
        and streams.is_contiguous()
        and (
            fn is None
            or (
                fn.dtype == scale.dtype == base.dtype == torch.float32
                and tuple(fn.shape) == (mixes, op.STREAMS * hidden)
                and fn.is_contiguous()
            )
        )
        and device_gate.serves(streams.device)
    )


def _takes_output(f: torch.Tensor | OwedSum, streams: torch.Tensor) -> bool:
    return (
        isinstance(f, torch.Tensor | OwedSum)
        and f.dtype == torch.bfloat16
        and f.shape == (streams.shape[0], streams.shape[2])
        and f.is_contiguous()
    )


def _takes_norm(weight: torch.Tensor | None) -> bool:
    return weight is None or (weight.dtype == torch.bfloat16 and weight.is_contiguous())


def _record(names, ours, originals, identity) -> None:
    """One record for each output: their sizes differ too much for one error to stand for all. So do the streams'."""
    for name, one, other in zip(names, ours, originals, strict=True):
        shape = {"rows": one.shape[0], "output": name}
        other = other.view_as(one)
        if name == "streams":
            one, other = one.flatten(0, 1), other.flatten(0, 1)
        shadow.record(PATCH, [(one, other)], identity=identity, shape=shape, relative_l2=bounds.MHC.shadow)


def _shadowed(serve: Callable, original: Callable, names, outputs: Callable, identity: Callable) -> Callable:
    """`serve`, or in shadow mode both. outputs(result, *arguments) -> tensors in the order of `names`."""
    if not settings().shadow:
        return serve
    keep_ours = settings().shadow == "ours"

    def both(*args, **kwargs):
        ours = serve(*args, **kwargs)  # first: a reused allocation must not hold the right answer
        others = original(*args, **kwargs)
        _record(names, outputs(ours, *args, **kwargs), outputs(others, *args, **kwargs), identity(*args, **kwargs))
        return ours if keep_ours else others

    return both


# ---- a whole boundary


def _serve_boundary(
    x,
    residual,
    post_layer_mix,
    comb_res_mix,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    n_splits=1,
    tile_n=1,
    *,
    norm_weight=None,
    norm_eps=None,
):
    if isinstance(x, OwedTerm) and not op.takes_own_terms(x.like):
        x = x.run()
    f, sums = x.for_boundary() if isinstance(x, OwedSum) else (x, {})
    streams, post, comb, y = op.mhc(
        f,
        residual,
        post_layer_mix.contiguous(),
        comb_res_mix.contiguous(),
        fn,
        hc_scale,
        hc_base,
        norm_weight=norm_weight,
        norm_eps=rms_eps if norm_eps is None else norm_eps,
        rms_eps=rms_eps,
        hc_eps=hc_pre_eps,
        post_scale=hc_post_mult_value,
        sinkhorn_iters=sinkhorn_repeat,
        **sums,
    )
    return streams, post.unsqueeze(-1), comb, y


def replace_fused_post_pre(original: Callable) -> Callable:
    """For mhc_fused_post_pre(x, residual, post, comb, fn, scale, base, ...) -> (streams, post [..., 4, 1], comb, y)."""
    serve = _shadowed(
        _serve_boundary,
        original,
        ("streams", "post", "comb", "y"),
        lambda result, *_, **__: result,
        lambda x, residual, post, comb, fn, *_, **__: fn.data_ptr(),
    )

    @functools.wraps(original)
    def mhc_fused_post_pre(x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, *args, **kwargs):
        arguments = (x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, *args)
        taken = (
            _takes(residual, fn, hc_scale, hc_base, op.MIXES)
            and _takes_output(x, residual)
            and _takes_norm(kwargs.get("norm_weight"))
            and len(args) >= 5
            and args[1] == args[2]  # one epsilon for gates and Sinkhorn
        )
        return serve(*arguments, **kwargs) if taken else original(finished(x), *arguments[1:], **kwargs)

    return mhc_fused_post_pre


def replace_fusion_enabled(original: Callable) -> Callable:
    """For _is_fused_mhc_post_pre_enabled(): layers leave their last post to the boundary, which is one operator.

    Asked when the model is built and, from 0.5.19 on, at every boundary. SGLang's own answer depends on which of its
    TileLang kernels run on this GPU; ours needs none of them, and what we do not take is still theirs. So the answer
    is ours only for a model whose boundaries are: others have layers that ask too (GLM-5.3's). It is no with
    --cpu-offload-gb: a boundary reads norm weights that the layer keeps beside its parameters, on the host.
    """

    @functools.wraps(original)
    def _is_fused_mhc_post_pre_enabled():
        if not (_serves_the_model() and device_gate.serves_current_device()):
            return original()
        return not layers_lie_on_the_host()

    return _is_fused_mhc_post_pre_enabled


def _serves_the_model() -> bool:
    told = models_served.announced()
    return told is not None and all(told[name] in limit for name, limit in limits.LIMITS[PATCH].items() if name in told)


# ---- pre and post by themselves


def _serve_pre(layer, x, hc_fn, hc_scale, hc_base, norm=None, forward_batch=None):
    normed = norm is not None and _takes_norm(norm.weight.data)
    post, comb, y = op.mhc_pre(
        x,
        hc_fn,
        hc_scale,
        hc_base,
        norm_weight=norm.weight.data if normed else None,
        norm_eps=norm.variance_epsilon if normed else 0.0,
        rms_eps=layer.rms_norm_eps,
        hc_eps=layer.hc_eps,
        post_scale=POST_SCALE,
        sinkhorn_iters=layer.hc_sinkhorn_iters,
    )
    return y, post, comb, normed


def _pre_outputs(result, layer, x, hc_fn, hc_scale, hc_base, norm=None, forward_batch=None):
    """(post, comb, y), y normed by whoever has not done it."""
    y, post, comb, normed = result
    if norm is not None and not normed:
        y = norm(y)
    return post, comb, y


def replace_hc_pre(original: Callable) -> Callable:
    """For the decoder layer's hc_pre(x, hc_fn, hc_scale, hc_base, norm, forward_batch) -> (y, post, comb, normed)."""
    serve = _shadowed(
        _serve_pre, original, ("post", "comb", "y"), _pre_outputs, lambda layer, x, hc_fn, *_, **__: hc_fn.data_ptr()
    )

    @functools.wraps(original)
    def hc_pre(self, x, hc_fn, hc_scale, hc_base, *args, **kwargs):
        run = serve if _takes(x, hc_fn, hc_scale, hc_base, op.MIXES) else original
        return run(self, x, hc_fn, hc_scale, hc_base, *args, **kwargs)

    return hc_pre


def _serve_post(layer, x, residual, post, comb):
    return op.mhc_post(x, residual, post.contiguous(), comb.contiguous())


def replace_hc_post(original: Callable) -> Callable:
    """For the decoder layer's hc_post(x, residual, post, comb) -> streams; post [rows, 4] or [rows, 4, 1]."""
    serve = _shadowed(
        _serve_post, original, ("streams",), lambda result, *_, **__: (result,), lambda layer, *_, **__: "post"
    )

    @functools.wraps(original)
    def hc_post(self, x, residual, post, comb):
        taken = (
            _takes(residual, None, None, None, 0)
            and _takes_output(x, residual)
            and post.dtype == comb.dtype == torch.float32
        )
        return (serve if taken else original)(self, finished(x), residual, post, comb)

    return hc_post


# ---- the head


def _serve_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps):
    return op.mhc_head(x, hc_fn, hc_scale, hc_base, rms_eps=norm_eps, hc_eps=hc_eps)


def replace_fused_head(original: Callable) -> Callable:
    """For fused_hc_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps) -> y, which SGLang norms itself."""
    serve = _shadowed(
        _serve_head,
        original,
        ("head",),
        lambda result, *_, **__: (result,),
        lambda x, hc_fn, *_, **__: hc_fn.data_ptr(),
    )

    @functools.wraps(original)
    def fused_hc_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps):
        run = serve if _takes(x, hc_fn, hc_scale, hc_base, op.STREAMS) else original
        return run(x, hc_fn, hc_scale, hc_base, norm_eps=norm_eps, hc_eps=hc_eps)

    return fused_hc_head


def _serve_model_head(model, x, hc_fn, hc_scale, hc_base):
    return op.mhc_head(x, hc_fn, hc_scale, hc_base, rms_eps=model.rms_norm_eps, hc_eps=model.hc_eps)


def replace_hc_head(original: Callable) -> Callable:
    """For DeepseekV4ModelNextN.hc_head(x, hc_fn, hc_scale, hc_base) -> y: the MTP block's, in torch."""
    serve = _shadowed(
        _serve_model_head,
        original,
        ("head",),
        lambda result, *_, **__: (result,),
        lambda model, x, hc_fn, *_, **__: hc_fn.data_ptr(),
    )

    @functools.wraps(original)
    def hc_head(self, x, hc_fn, hc_scale, hc_base):
        run = serve if _takes(x, hc_fn, hc_scale, hc_base, op.STREAMS) else original
        return run(self, x, hc_fn, hc_scale, hc_base)

    return hc_head


def _serve_dspark_head(model, x):
    last = model.stages[-1]
    mixes = (last.hc_head_fn, last.hc_head_scale, last.hc_head_base)
    return op.mhc_head(x, *mixes, rms_eps=model.norm_eps, hc_eps=model.hc_eps)


def replace_dspark_head(original: Callable) -> Callable:
    """For DeepseekV4ForCausalLMDSpark.collapse_hc_head(x) -> y: DSPARK's draft's, in torch. Of DeepSeek-V4.1's x has no
    streams left."""
    serve = _shadowed(
        _serve_dspark_head,
        original,
        ("head",),
        lambda result, *_: (result,),
        lambda model, x: model.stages[-1].hc_head_fn.data_ptr(),
    )

    @functools.wraps(original)
    def collapse_hc_head(self, x):
        last = self.stages[-1]
        taken = _takes(x, last.hc_head_fn, last.hc_head_scale, last.hc_head_base, op.STREAMS)
        return (serve if taken else original)(self, x)

    return collapse_hc_head
