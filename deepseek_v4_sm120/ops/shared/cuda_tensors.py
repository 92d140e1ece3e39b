"""What several operators need for a launch: its device, stream and multiprocessors."""

from __future__ import annotations

import contextlib
import functools

import torch

from deepseek_v4_sm120.ops.shared import extension

_HERE = contextlib.nullcontext()


@functools.cache
def num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


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
