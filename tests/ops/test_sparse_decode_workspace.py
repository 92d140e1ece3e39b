"""Bounds of the scratch that the extension asks for. Needs the compiled module, no GPU."""

from __future__ import annotations

import itertools

import pytest

from deepseek_v4_sm120.ops.shared import extension

MIB = 1 << 20
ROWS = (1, 2, 7, 16, 63, 64, 100, 256, 1000, 8192)
HEADS = (1, 5, 8, 16, 24, 32, 64, 128)
EXTRA_WIDTHS = (0, 64, 512, 1024, 4096, 8192)
NUM_SMS = (1, *range(16, 257, 4))


@pytest.fixture(scope="module")
def binary():
    if (problem := extension.explain()) is not None:
        pytest.skip(problem)
    return extension.load()


def test_scratch_is_bounded(binary):
    for rows, heads, extra, sms in itertools.product(ROWS, HEADS, EXTRA_WIDTHS, NUM_SMS):
        case = dict(rows=rows, heads=heads, indices_width=128, extra_indices_width=extra, num_sms=sms)
        partials_bytes, control_words = binary.sparse_decode_workspace(**case)
        assert 0 <= partials_bytes <= 64 * MIB, (case, partials_bytes)
        assert 0 <= control_words <= binary.sparse_decode_max_control_words, (case, control_words)


def test_pairs_take_rows_of_up_to_40_leaves_and_no_scratch(binary):
    """What the kernel for few rows has, and needs, where a row may be longer."""
    sizes = dict(rows=64, heads=64, indices_width=100, num_sms=188)
    for extra in (0, 512, 36 * 32):
        assert binary.sparse_decode_workspace(**sizes, extra_indices_width=extra, pairs=True) == (0, 0)
    few = binary.sparse_decode_workspace(**sizes, extra_indices_width=36 * 32 + 1)
    assert few == binary.sparse_decode_workspace(**sizes, extra_indices_width=36 * 32 + 1, pairs=True) != (0, 0)


def test_scratch_does_not_grow_with_the_width_of_a_captured_context(binary):
    for rows, heads in itertools.product((1, 16, 64, 256), (8, 64)):
        sizes = dict(rows=rows, heads=heads, indices_width=128, num_sms=188)
        at_256k, _ = binary.sparse_decode_workspace(**sizes, extra_indices_width=2048)
        at_4m, _ = binary.sparse_decode_workspace(**sizes, extra_indices_width=32_768)
        assert at_4m <= 2 * max(at_256k, MIB), (rows, heads, at_256k, at_4m)
