"""What several operators need for a launch: its device, stream and multiprocessors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from deepseek_v4_sm120.ops.shared import extension

_HERE = contextlib.nullcontext()
_held = 0  # see held


@functools.cache
def _all_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_sms(index: int) -> int:
    """Multiprocessors of a device that a kernel may count on."""
    return max(1, _all_sms(index) - _held)


@contextlib.contextmanager
def held(sms: int) -> Iterator[None]:
    """For the duration: kernels count on so many multiprocessors fewer, which another stream's kernels hold. One whose
    blocks share out all of its work, or wait for each other, would run as long as those if it counted on them."""
    global _held
    _held += sms
    try:
        yield
    finally:
        _held -= sms


def stream_sms(index: int, stream: int) -> int:
    """Multiprocessors that a kernel on this raw stream can have: fewer than the device's in a green context."""
    return extension.load().stream_sms(stream, num_sms(index))


def current_stream(index: int) -> int:
    """The current stream of a device, as kernels take it."""
    return torch._C._cuda_getCurrentRawStream(index)


def on_device_of(tensor):
    """A `with` of this makes the tensor's device the current one; where it is, nothing happens."""
    device = tensor.device
    return _HERE if device.index == torch._C._cuda_getDevice() else torch.cuda.device(device)
