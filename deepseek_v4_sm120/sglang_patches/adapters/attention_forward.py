"""SGLang's MQALayer.forward, in which the head norm of the queries (sparse_decode_head_norm.py) and the rotation of the
attention's output (wo_a.py) may wait. Both patches put this one function there; what waits, their other targets say."""

import functools
import weakref
from collections.abc import Callable

from deepseek_v4_sm120.sglang_patches.adapters.waiting import Scope

FORWARD = Scope()
_ours: weakref.WeakSet = weakref.WeakSet()


def replace_forward(original: Callable) -> Callable:
    """For MQALayer.forward; one that is ours already serves both patches."""
    if original in _ours:
        return original

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        with FORWARD.enter(self, module=original.__module__, args=args, kwargs=kwargs):
            return original(self, *args, **kwargs)

    _ours.add(forward)
    return forward
