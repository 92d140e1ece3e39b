"""What instructions do to numbers in registers, by the text of the PTX ISA and without the emulator: test_forms.py asks
each of it. Numbers are bits here, as Python's integers; floats are decoded to exact fractions and rounded once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

NAN = "NaN"  # as a result: any of them


@dataclass(frozen=True)
class Format:
    """A binary float: bits of its exponent and of its fraction."""

    exponent: int
    fraction: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    def decoded(self, bits: int) -> float:
        """Exact, for all of these fit in Python's own."""
        sign = -1.0 if bits >> self.bits - 1 else 1.0
        exponent, fraction = bits >> self.fraction & (1 << self.exponent) - 1, bits & (1 << self.fraction) - 1
        if exponent == (1 << self.exponent) - 1:
            return math.nan if fraction else sign * math.inf
        whole = fraction + (1 << self.fraction if exponent else 0)
        return sign * math.ldexp(whole, max(exponent, 1) - self.bias - self.fraction)

    def encoded(self, value, mode: str = "rn") -> int | str:
        """Of a fraction, or of a float that stands for itself (zeros, infinities, NaN)."""
        if isinstance(value, float) and (value == 0 or not math.isfinite(value)):
            if math.isnan(value):
                return NAN
            sign = int(math.copysign(1, value) < 0) << self.bits - 1
            return sign | (self._infinity if value else 0)
        value = Fraction(value)
        sign, size = value < 0, abs(value)
        least = 1 - self.bias - self.fraction  # exponent of the smallest step
        power = max(_floor_log2(size) - self.fraction, least)
        steps = size / Fraction(2) ** power
        low = math.floor(steps)
        rest = steps - low
        away = {
            "rz": False,
            "rm": sign,
            "rp": not sign,
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low & 1),
        }
        low += bool(rest) and away[mode]
        # a carry into the next exponent is one of the number's bits
        bits = low if power == least else low + (power - least << self.fraction)
        if bits >= self._infinity:
            stays = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
            bits = self._infinity - 1 if stays else self._infinity
        return sign << self.bits - 1 | bits

    @property
    def _infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.fraction


F32, F16, BF16 = Format(8, 23), Format(5, 10), Format(8, 7)


def _floor_log2(size: Fraction) -> int:
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


# ---- floats; exact results as fractions, or as floats that stand for themselves


def added(x: float, y: float, mode: str = "rn"):
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    return _sum(Fraction(x) + Fraction(y), x, y, mode)


def _sum(exact: Fraction, x: float, y: float, mode: str):
    """Of two that cancel it is +0, but toward less -0; of two zeros of one sign that one."""
    if exact:
        return exact
    same = x == 0 and math.copysign(1, x) == math.copysign(1, y)
    return x * 0.0 if same else -0.0 if mode == "rm" else 0.0


def multiplied(x: float, y: float, mode: str = "rn"):
    if not (math.isfinite(x) and math.isfinite(y)) or x == 0 or y == 0:
        return x * y
    return Fraction(x) * Fraction(y)


def fused(x: float, y: float, z: float, mode: str = "rn"):
    if not all(map(math.isfinite, (x, y, z))):
        return x * y + z if not (math.isfinite(x) and math.isfinite(y)) else z
    product = Fraction(x) * Fraction(y)
    exact = product + Fraction(z)
    sign = math.copysign(1, x) * math.copysign(1, y)
    return _sum(exact, math.copysign(0.0 if product == 0 else 1.0, sign), z, mode)


def divided(x: float, y: float, mode: str = "rn"):
    sign = math.copysign(1, x) * math.copysign(1, y)
    if math.isnan(x) or math.isnan(y) or x == y == 0 or math.isinf(x) and math.isinf(y):
        return math.nan
    if math.isinf(x) or y == 0:
        return sign * math.inf
    if math.isinf(y) or x == 0:
        return sign * 0.0
    return Fraction(x) / Fraction(y)


def roughly_divided(x: float, y: float, mode: str = "rn"):
    """div.approx: of |y| above 2^126 the result is a zero, or no number."""
    if 2.0**126 < abs(y) < math.inf:
        return math.nan if not math.isfinite(x) else math.copysign(0.0, x) * math.copysign(1, y)
    return divided(x, y)


def root(x: float, mode: str = "rn"):
    if not x > 0 or math.isinf(x):
        return math.nan if x < 0 else x
    scaled = Fraction(x) * 4**200
    low = math.isqrt(math.floor(scaled))
    return Fraction(2 * low + (low * low != scaled), 2 * 2**200)  # between two steps: which way it is rounded shows


def one_by_root(x: float, mode: str = "rn"):
    of = root(x)
    return of if isinstance(of, float) and math.isnan(of) else divided(1.0, of) if isinstance(of, float) else 1 / of


def power_of_two(x: float, mode: str = "rn"):
    return 2.0**x if x < 1000 else x if math.isnan(x) else math.inf


def lesser(*given: float):
    there = [x for x in given if not math.isnan(x)]
    return min(there, key=lambda x: (x, math.copysign(1, x))) if there else math.nan


def greater(*given: float):
    there = [x for x in given if not math.isnan(x)]
    return max(there, key=lambda x: (x, math.copysign(1, x))) if there else math.nan


def unless_nan(function: Callable) -> Callable:
    return lambda *given: math.nan if any(map(math.isnan, given)) else function(*given)


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


FLOATS = {  # of one, two or three; those that round are told how
    **{"add": added, "sub": lambda x, y, mode: added(x, -y, mode), "mul": multiplied, "fma": fused, "div": divided},
    **{"rcp": lambda x, mode: divided(1.0, x), "sqrt": root, "rsqrt": one_by_root, "ex2": power_of_two},
}


def float_result(words: list[str], given: list[int]) -> int | str:
    """Of an instruction of f32."""
    modes = [word for word in words if word in ("rn", "rm", "rp", "rz")]
    flush = flushed if "ftz" in words else lambda x: x
    values = [flush(F32.decoded(bits)) for bits in given]
    if words[0] in FLOATS:
        function = roughly_divided if words[:2] == ["div", "approx"] else FLOATS[words[0]]
        exact = function(*values, modes[0] if modes else "rn")
    else:
        function = {"min": lesser, "max": greater, "neg": lambda x: -x, "abs": abs, "cvt": lambda x: x}[words[0]]
        exact = (unless_nan(function) if "NaN" in words else function)(*values)
    bits = F32.encoded(exact, modes[0] if modes else "rn")
    if "ftz" in words and bits != NAN:
        bits = F32.encoded(flush(F32.decoded(bits)))
    if "sat" in words:  # +0 of NaN
        bits = 0 if bits == NAN or bits >> 31 else min(bits, F32.encoded(Fraction(1)))
    return bits


def half_result(words: list[str], given: list[int]) -> int | str:
    """Of an instruction of one f16 or bf16."""
    form = BF16 if words[-1].startswith("bf16") else F16
    values = [form.decoded(bits) for bits in given]
    functions = {**FLOATS, "min": lesser, "max": greater, "neg": lambda x: -x, "abs": abs}
    function = functions[words[0]]
    if words[0] in FLOATS:
        return form.encoded(function(*values, "rn"))
    return form.encoded((unless_nan(function) if "NaN" in words else function)(*values))


def e4m3(bits: int) -> float:
    """E4M3: no infinities, one NaN of each sign."""
    if bits & 0x7F == 0x7F:
        return math.nan
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9)
    return -size if bits & 0x80 else size


def e2m1(bits: int) -> float:
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[bits & 7]
    return -size if bits & 8 else size


def to_e4m3(x: float) -> int:
    """The nearest, of two the even one; what is beyond them is the greatest (satfinite)."""
    if math.isnan(x):
        return 0x7F
    size = min(abs(x), 448.0)
    nearest = min(range(0x7F), key=lambda bits: (abs(Fraction(e4m3(bits)) - Fraction(size)), bits & 1))
    return nearest | (0x80 if math.copysign(1, x) < 0 else 0)


# ---- integers


@functools.cache
def bits_of(type_: str) -> int:
    return int("".join(c for c in type_ if c.isdigit()))


def read(bits: int, type_: str) -> int:
    """As the type has it: u, b or s, and how many."""
    count = bits_of(type_)
    bits &= (1 << count) - 1
    return bits - (1 << count) if type_[0] == "s" and bits >> count - 1 else bits


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def is_undefined(words: list[str], a: int, b: int, *_: int) -> bool:
    least = -(1 << bits_of(words[-1]) - 1) if words[-1][0] == "s" else None
    return words[0] in ("div", "rem") and (b == 0 or (b == -1 and a == least))


TWO = {
    **{"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "min": min, "max": max, "and": lambda a, b: a & b},
    **{
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "div": quotient,
        "rem": lambda a, b: a - b * quotient(a, b),
    },
}


def integer_result(words: list[str], given: list[int]) -> int | None:
    """None: of division by zero, and what else has no result. Not yet cut to the destination's bits."""
    op, type_ = words[0], words[-1]
    if op in ("shl", "shr"):
        value, by = read(given[0], type_), min(given[1], 64)
        return value << by if op == "shl" else value >> by
    a = [read(bits, type_) for bits in given[:2]]
    if op in ("mul", "mad"):
        product = a[0] * a[1] >> (bits_of(type_) if words[1] == "hi" else 0)
        return product + (given[2] if op == "mad" else 0)
    if op in TWO:
        return None if is_undefined(words, *a) else TWO[op](*a)
    return {"not": lambda x: ~x, "neg": lambda x: -x, "abs": abs}[op](a[0])


def permuted(a: int, b: int, how: int) -> int:
    both = [(a | b << 32) >> 8 * n & 0xFF for n in range(8)]
    out = 0
    for n in range(4):
        choice = how >> 4 * n & 15
        byte = both[choice & 7]
        out |= (0xFF * (byte >> 7) if choice & 8 else byte) << 8 * n
    return out


def looked_up(table: int, a: int, b: int, c: int, bits: int = 32) -> int:
    """lop3: each bit is that of the table whose number the three bits are."""
    return sum((table >> 4 * (a >> n & 1) + 2 * (b >> n & 1) + (c >> n & 1) & 1) << n for n in range(bits))


def funnel(left: bool, wraps: bool, low: int, high: int, by: int) -> int:
    by = by & 31 if wraps else min(by, 32)
    both = high << 32 | low
    return (both << by >> 32 if left else both >> by) & 0xFFFFFFFF


def field(type_: str, a: int, first: int, count: int) -> int:
    """bfe: what is asked for above the value's top is its sign's bit, or zero."""
    first, count = first & 0xFF, count & 0xFF
    if count == 0:
        return 0
    sign = type_[0] == "s" and a >> min(first + count - 1, 31) & 1
    got = [a >> n & 1 if n < 32 else 0 for n in range(first, min(first + count, 32))][:32]
    out = sum(bit << n for n, bit in enumerate(got))
    return out | (0xFFFFFFFF << len(got) & 0xFFFFFFFF if sign else 0)


def bit_result(words: list[str], given: list[int]) -> int:
    op, a = words[0], given[0]
    if op == "shf":
        return funnel(words[1] == "l", words[2] == "wrap", *given)
    if op == "bfind":
        return 0xFFFFFFFF if a == 0 else 32 - a.bit_length() if "shiftamt" in words else a.bit_length() - 1
    return {
        "prmt": lambda: permuted(*given),
        "brev": lambda: int(f"{a:032b}"[::-1], 2),
        "popc": lambda: a.bit_count(),
        "clz": lambda: 32 - a.bit_length(),
        "bfe": lambda: field(words[-1], *given),
    }[op]()


def compared(words: list[str], given: list[int]) -> bool:
    how, type_ = words[1], words[-1]
    a, b = (F32.decoded(x) if type_ == "f32" else read(x, type_) for x in given)
    unordered = a != a or b != b
    if how in ("num", "nan"):
        return unordered == (how == "nan")
    so = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[how[:2]]
    return unordered if unordered and how.endswith("u") else so and not unordered


def converted(words: list[str], given: list[int]) -> int | str:
    """Into a register of 64 bits where it is an integer."""
    d, s = words[-2], words[-1]
    if d == "f32" and s == "f32":
        return float_result(words, given)
    if d == "f32":
        if s in ("f16", "bf16"):
            return F32.encoded((F16 if s == "f16" else BF16).decoded(given[0] & 0xFFFF))
        value = read(given[0], s)
        return F32.encoded(Fraction(value)) if value else 0
    if s == "f32" and d in ("f16", "bf16", "f16x2", "bf16x2"):
        form = BF16 if d.startswith("bf16") else F16
        parts = [form.encoded(F32.decoded(bits)) for bits in given]
        return parts[0] if len(parts) == 1 else tuple(parts[::-1])  # the first one is above the second
    if d == "e4m3x2":
        return to_e4m3(F32.decoded(given[0])) << 8 | to_e4m3(F32.decoded(given[1]))
    if s in ("e4m3x2", "e2m1x2"):
        form, (decode, count) = BF16 if d == "bf16x2" else F16, (e4m3, 8) if s == "e4m3x2" else (e2m1, 4)
        return tuple(form.encoded(decode(given[0] >> at & (1 << count) - 1)) for at in (0, count))
    if s == "f32":
        return _to_integer(words, F32.decoded(given[0])) & (1 << 64) - 1
    return read(read(given[0], s), d) & (1 << 64) - 1


def _to_integer(words: list[str], x: float) -> int:
    """Beyond the integers it is the nearest of them; of NaN zero."""
    count = bits_of(words[-2])
    least, most = (-(1 << count - 1), (1 << count - 1) - 1) if words[-2][0] == "s" else (0, (1 << count) - 1)
    if math.isnan(x):
        return 0
    if math.isinf(x):
        return most if x > 0 else least
    return min(
        max({"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[words[1]](Fraction(x)), least), most
    )
