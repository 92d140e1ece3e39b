"""Weights that SGLang hands over, or moves about, as its own layers have made them: there its own layers stay.

wo_a as E4M3 and the experts in the checkpoint's layout are other than what SGLang has once a checkpoint is loaded. Some
of its ways carry that state from one process to another, by name, shape and type, and run nothing of a layer behind it:
experts whose scales SGLang has interleaved in place look like those of the checkpoint. Others put plain tensors in the
place of parameters for the time of a forward. In both `are_sglangs` says no to layers of ours, with one warning:

    load_model of what was saved      --load-format sharded_state, presharded, remote
    load_model of another instance's  --load-format remote_instance
    check_ipc_quant_support           a process that holds the weights of others (--weight-cache-mode)
    SGLang's offloader                --cpu-offload-gb, --offload-group-size: a layer's weights lie on the host

Asked when a layer is made and when its weights are there, before anything of it is changed. A server that loads a
checkpoint itself has ours, and what others copy of it then is of that layout (docs/operating.md). From 0.5.23 on a
layer can say that it is not to be saved or sent, and ours do (`keep_here`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from deepseek_v4_sm120.patching import report
from deepseek_v4_sm120.settings import settings
from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope, way_out
from deepseek_v4_sm120.sglang_patches.scope import is_ours

OFFLOADER = "sglang.srt.utils.offloader"
NO_OFFLOADER, OF_LAYERS = "NoopOffloader", "OffloaderV1"  # the second: --cpu-offload-gb, whole layers
NOT_EXPORTED = "_weight_export_error"  # of a layer: why its weights are for this process alone (0.5.23 and later)
# loaders of what SGLang has saved or sends, which reorder the C4 compressors' `ape` of that once more; as SGLang alone
TWICE_REORDERED = ("ShardedStateLoader", "RemoteModelLoader", "RemoteInstanceModelLoader")
WRONG_ANSWERS = (
    "answers will be wrong, with SGLang alone, too: this load format reorders the C4 compressors' position biases "
    "(ape), which were saved reordered, once more. Load the checkpoint itself"
)
HOLDER = "daemon"  # what check_ipc_quant_support is told by who loads for others

_loading = Scope()  # load_model of a loader whose weights are SGLang's own; its layer is that loader


class Process:
    """Whether this process loads weights for others."""

    holds_for_others = False


process = Process()


def replace_load_model(original: Callable) -> Callable:
    """For load_model(self, *, model_config, device_config) of the loaders of what SGLang's layers have made."""

    @functools.wraps(original)
    def load_model(self, **given):
        if type(self).__name__ in TWICE_REORDERED and is_ours():
            report.warn_once(f"{type(self).__name__}: {WRONG_ANSWERS}")
        with _loading.enter(self):
            return original(self, **given)

    return load_model


def replace_quant_support(original: Callable) -> Callable:
    """For check_ipc_quant_support(quant_method, quant_config, *, where), which who holds weights for others asks before
    it loads them."""

    @functools.wraps(original)
    def check_ipc_quant_support(quant_method, quant_config, *, where):
        process.holds_for_others |= where == HOLDER
        return original(quant_method, quant_config, where=where)

    return check_ipc_quant_support


def _offloader() -> str:
    """The class of SGLang's offloader."""
    offloader = sys.modules.get(OFFLOADER)
    return NO_OFFLOADER if offloader is None else type(offloader.get_offloader()).__name__


def layers_lie_on_the_host() -> bool:
    """Whether a layer's weights are on the card for the time of its forward only, under their names as parameters: what
    was kept of one beside (the norms' weights for the fused boundary of mHC) stays on the host."""
    return _offloader() == OF_LAYERS


def why() -> str | None:
    """What SGLang does with the weights that are loaded now, in words; None: it reads a checkpoint, and they stay."""
    if _loading.layer is not None:
        return f"{type(_loading.layer).__name__} loads weights as SGLang's own layers have made them"
    if process.holds_for_others:
        return "this process holds the weights for others (--weight-cache-mode)"
    if _offloader() != NO_OFFLOADER:
        return "layers' weights lie on the host (--cpu-offload-gb, --offload-group-size)"
    return None


def are_sglangs(operator: str) -> bool:
    """Whether a layer that the operator would take has to stay SGLang's; said once."""
    reason = why()
    if reason is None:
        return False
    tell(operator, reason)
    return True


def tell(operator: str, reason: str) -> None:
    """Once: layers that the operator would take are SGLang's."""
    text = f"{operator}: SGLang's own, as {reason}"
    text += ". NOT REPRODUCIBLE: its sums' order depends on the rows" if settings().reproducible else ""
    report.warn_once(text)
    report.add_note(f"{operator}_handed_over", lambda: text)


def keep_here(layer, operator: str) -> None:
    """For a layer that is ours."""
    setattr(layer, NOT_EXPORTED, way_out(operator, "its weights' layout is none that SGLang's own layers would load"))


def let_go(layer) -> None:
    """For a layer that was ours."""
    delattr(layer, NOT_EXPORTED)
