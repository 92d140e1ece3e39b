"""What the compiled module says of a call with wrong arguments (csrc/arguments.h). No call gets as far as a GPU."""

import pytest

from deepseek_v4_sm120.ops.shared import extension

FUNCTIONS = (
    *("sparse_decode", "index_select", "mqa_logits", "topk_select", "dealt_slots"),
    *("mxfp4_moe", "mxfp4_moe_shared", "mxfp4_moe_sorted", "mxfp4_moe_scaled"),
    *("bf16_linear", "router_topk", "mhc", "fp8_linear", "wo_a_expand", "compressor"),
    *("all_reduce", "all_reduce_ping", "all_reduce_places_bytes", "all_reduce_slot_vectors"),
    *("card_chain", "card_exchange", "card_busy", "card_sleep", "card_products"),
)
ROWS = (1 << 20) + 1  # too many, which is found out behind all that is asked here
LINEAR = {name: 1 << 40 for name in ("x", "weight", "out")}
LINEAR |= {f"{name}_stride": 512 for name in LINEAR}
LINEAR |= dict(bf16_out=True, rows=ROWS, inputs=512, outputs=512, num_sms=132, pdl=True, stream=0)
FP8_LINEAR = {name: 1 << 40 for name in ("x", "weight", "scale", "out", "partial")}
FP8_LINEAR |= {name: 512 for name in ("x_stride", "x_stride_group", "weight_stride", "out_stride", "out_stride_group")}
FP8_LINEAR |= dict(scale_bytes=4, scale_stride_output=4, scale_stride_input=1, partial_bytes=0, rows=1, groups=1)
FP8_LINEAR |= dict(inputs=512, outputs=512, num_sms=132, pdl=True, stream=0)


def call(name: str, **arguments: object) -> None:
    getattr(extension.load(), name)(**arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_missing_argument_is_named(name):
    with pytest.raises(TypeError, match=rf"^{name}: argument \w+ is missing$"):
        call(name)


def test_arguments_that_fit_reach_the_operator():
    for _ in range(2):  # the second call finds the names of the first
        with pytest.raises(RuntimeError, match="^bf16_linear: takes 1 to 1048576 rows"):
            call("bf16_linear", **LINEAR)


@pytest.mark.parametrize("name", LINEAR)
def test_each_argument_is_needed(name):
    with pytest.raises(TypeError, match=f"^bf16_linear: argument {name} is missing$"):
        call("bf16_linear", **{k: v for k, v in LINEAR.items() if k != name})


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="^bf16_linear: takes no argument row_stride$"):
        call("bf16_linear", **LINEAR, row_stride=1)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        extension.load().bf16_linear(1)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rows", 1 << 31, "an integer of 32 bits, got 2147483648"),
        ("rows", -(1 << 31) - 1, "an integer of 32 bits, got -2147483649"),
        ("rows", 1.5, "an integer of 32 bits, got 1.5"),
        ("rows", "99", "an integer of 32 bits, got '99'"),
        ("x_stride", 1 << 63, "an integer of 64 bits, got 9223372036854775808"),
        ("x", -1, "an address, got -1"),
        ("x", 1 << 64, "an address, got 18446744073709551616"),
        ("x", None, "an address, got None"),
        ("pdl", 1, "True or False, got 1"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, value, expected):
    with pytest.raises(TypeError) as caught:
        call("bf16_linear", **LINEAR | {name: value})
    assert str(caught.value) == f"bf16_linear: argument {name} must be {expected}"


def test_what_has_a_default_is_checked_where_it_is_given():
    with pytest.raises(TypeError, match="^fp8_linear: argument position_bytes must be an integer of 32 bits, got 'x'$"):
        call("fp8_linear", **FP8_LINEAR, position_bytes="x")
    with pytest.raises(TypeError, match="^fp8_linear: takes no argument eps$"):
        call("fp8_linear", **FP8_LINEAR, eps=0.1)
    with pytest.raises(RuntimeError, match=r"^fp8_linear: takes strides below 2\^32, got -1$"):
        call("fp8_linear", **FP8_LINEAR | dict(x_stride=-1))


def test_a_word_is_checked():
    times = dict(value=0, seen=0, times=0, hold_ns=0)
    with pytest.raises(TypeError, match="^card_chain: argument middle must be a str, got 3$"):
        call("card_chain", **times, middle=3)
