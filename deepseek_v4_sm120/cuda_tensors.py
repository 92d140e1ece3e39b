"""What several operators ask of a device or of their tensors."""

from __future__ import annotations

import functools

import torch

from deepseek_v4_sm120 import extension


@functools.cache
def num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def stream_sms(index: int, stream: int) -> int:
    """Multiprocessors that a kernel on this raw stream can have: fewer than the device's in a green context."""
    return extension.load().stream_sms(stream, num_sms(index))


def overlap(a, b) -> bool:
    """Whether the address ranges of two tensors meet; neither is empty, no stride is negative."""

    def span(tensor):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (a_begin, a_end), (b_begin, b_end) = span(a), span(b)
    return a_begin < b_end and b_begin < a_end
