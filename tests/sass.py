"""What a kernel's machine code does with memory around the wait for the kernels in front of it.

A small abstract interpretation of what nvdisasm prints. Of every point of a function two things are known: whether each
path to it has come past the wait (ACQBULK, PTX's griddepcontrol.wait), and from which pointers among the kernel's
parameters each register may have been made. So a load is attributed to its parameter, and is `ahead` if any path
reaches it without the wait.

Registers are followed through integer arithmetic, shuffles and uniform registers; what is loaded from memory is no
pointer here. A load under a predicate is taken to have loaded: what its registers held is of no use under another.
Calls (divisions, a trap's message) are taken to return and to change nothing that matters.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

WAIT, TRIGGER = "ACQBULK", "PREEXIT"
READS = ("LDG", "LD", "LDGSTS", "UBLKCP", "ATOMG", "ATOM")
WRITES = ("STG", "ST", "REDG", "RED", "ATOMG", "ATOM")
ANY = 1 << 200  # of a set of pointers: one that was chosen at run time
_ENDS = ("EXIT", "BRA", "RET", "BRX", "JMP")
_UNIFORM = 256  # number of the first uniform register

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_LABEL = re.compile(r"(\.L_[\w]+):")
_SECTION = re.compile(r"\.text\.(\S+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"(?<![\w.])(U?)R(\d+)")
_DESTINATION = re.compile(r"U?R\d+(\.reuse)?")
_PREDICATE = re.compile(r"!?U?P(\d|T|R)")  # PR: all of them
_CONSTANT = re.compile(r"c\[0x0\]\[(U?R\d+)?\+?(0x[0-9a-f]+)?\]")


@dataclass
class Access:
    opcode: str
    pointers: frozenset[int]  # offsets of the parameters that it may come from; empty: shared memory, or unknown
    any_pointer: bool  # or from one chosen at run time
    ahead: bool  # of the wait, on some path
    text: str

    @property
    def constant(self) -> bool:
        """Whether it is PTX's ld.global.nc: for memory that nobody writes while the kernel runs."""
        return "CONSTANT" in self.opcode


@dataclass
class Function:
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    ends_without_wait: list[str] = field(default_factory=list)
    triggers: list[bool] = field(default_factory=list)  # whether each is behind the wait
    weights: list[bool] = field(default_factory=list)  # of each load by 256 bytes of the L2: whether it is ahead
    waits: int = 0


@dataclass(slots=True)
class _Step:
    opcode: str
    guard: str | None  # the predicate under which it runs
    target: str | None
    predicates: tuple[str, ...] = ()  # that it may write
    keeps: bool = False  # what was in the registers may still be there
    clears: tuple[int, ...] = ()  # registers that are written
    sources: tuple[int, ...] = ()
    constants: tuple[tuple[bool, int], ...] = ()  # of the bank with the parameters: chosen at run time, offset
    loads: bool = False  # one of them, into `clears`
    made: int = 0  # pointers that come from the constant bank
    pairs: tuple[tuple[int, int], ...] = ()  # of a wide load from the constant bank: register and its pointers
    address: tuple[int, ...] = ()
    conditional: bool = False


def split(listing: str) -> dict[str, list[str]]:
    """The lines of each function of `nvdisasm -c`."""
    functions: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in listing.splitlines():
        if found := _SECTION.match(line):
            lines = functions.setdefault(found[1], [])
        elif lines is not None and (line.startswith((" ", ".L_"))):
            lines.append(line)
    return functions


@functools.cache  # kernels have the same operands a thousand times
def _registers(operand: str, pair: bool) -> tuple[int, ...]:
    found: list[int] = []
    for uniform, number in _REGISTER.findall(operand):
        first = int(number) + (_UNIFORM if uniform else 0)
        found += [first, first + 1] if pair else [first]
    return tuple(found)


@functools.cache
def _operands(rest: str) -> tuple[str, ...]:
    return tuple(o.strip() for o in re.split(r",(?![^\[]*\])", rest))


@functools.cache
def _predicates(rest: str) -> tuple[str, ...]:
    """Those an instruction may write: in front of the first register, and right behind it."""
    written, registers = [], 0
    for operand in _operands(rest):
        if _is_predicate(operand):
            written.append(operand)
        elif registers == 1 or not _REGISTER.match(operand):
            break
        else:
            registers += 1
    return tuple(written)


@functools.cache
def _source(operand: str, pair: bool) -> tuple[tuple[int, ...], tuple[tuple[bool, int], ...]]:
    """(registers, constants) that it reads."""
    constants = tuple((bool(index), int(offset or "0", 16)) for index, offset in _CONSTANT.findall(operand))
    return _registers(_CONSTANT.sub("", operand) if constants else operand, pair), constants


@functools.cache
def _destination(operand: str) -> int | None:
    """The register; None: no register, so shared memory or a barrier."""
    return _registers(operand, False)[0] if _DESTINATION.fullmatch(operand) else None


@functools.cache
def _is_predicate(operand: str) -> bool:
    return _PREDICATE.fullmatch(operand) is not None


@functools.cache
def _width(opcode: str) -> int:
    parts = opcode.split(".")
    if parts[0] in ("HMMA", "QMMA", "OMMA", "IMMA", "LDSM"):
        return 4
    if "128" in parts:
        return 4
    wide = "64" in parts or "WIDE" in parts or (parts[0] in ("CS2R", "CS2UR") and "32" not in parts)
    return 2 if wide else 1


@functools.lru_cache(maxsize=1 << 15)  # a kernel repeats itself
def _step(guard: str | None, opcode: str, rest: str) -> _Step:
    """What an instruction does, whichever kernel has it: without what is in the constant bank."""
    target = _TARGET.search(rest)
    step = _Step(opcode, guard, target[1] if target else None, _predicates(rest))
    name = opcode.partition(".")[0]
    if name in _ENDS:
        further = "." in opcode or rest.strip().startswith(("P", "!P", "UP", "!UP"))  # BRA.DIV, EXIT P1
        step.conditional = name != "RET" and (step.guard is not None or further)
        return step
    if name in READS or name in WRITES:
        _memory(step, name, rest)
    else:
        _arithmetic(step, name, rest)
    return step


def _memory(step: _Step, name: str, rest: str) -> None:
    brackets = re.findall(r"(desc\[UR\d+\])?\[([^\]]*)\]", rest)
    if name == "UBLKCP":
        step.address = tuple(_registers(brackets[1][1], True))
        return
    inside = brackets[-1][1]
    step.address = tuple(r for part in inside.split("+") for r in _registers(part, "64" in part or "UR" in part))
    if name in ("LDG", "LD", "ATOMG", "ATOM"):
        destination = next(iter(_registers(rest.partition("[")[0].replace("desc", ""), False)), None)
        if destination is not None:
            step.clears = tuple(range(destination, destination + _width(step.opcode)))


def _arithmetic(step: _Step, name: str, rest: str) -> None:
    if "SETP" in name or name in ("R2P", "R2UP"):
        return  # predicates
    operands = _operands(rest)
    first = next((i for i, o in enumerate(operands) if not _is_predicate(o)), None)
    if first is None or (register := _destination(operands[first])) is None:
        return
    width = _width(step.opcode)
    step.clears = tuple(range(register, register + width))
    if name.startswith(("LDS", "H", "Q", "F", "MUFU", "S2", "CS2", "POPC", "MATCH", "VOTE")):
        return  # what it makes is no pointer
    step.keeps = step.guard is not None
    step.loads = name in ("LDC", "LDCU", "ULDC")
    if step.loads:
        found = _CONSTANT.search(rest)  # None: another bank
        step.constants = ((bool(found[1]), int(found[2] or "0", 16)),) if found else ()
        return
    for i, operand in enumerate(operands[first + 1 :], 1):
        registers, constants = _source(operand, width == 2 and ("WIDE" not in step.opcode or i == 3))
        step.sources += registers
        step.constants += constants


class _Reader:
    """Turns lines into steps; `base`: of the parameters in the constant bank, `pointers`: their offsets."""

    def __init__(self, base: int, pointers: Iterable[int]):
        self.bits = {offset: 1 << i for i, offset in enumerate(sorted(pointers))}
        self.at = {base + offset + half: bit for offset, bit in self.bits.items() for half in (0, 4)}

    def constant(self, is_chosen: bool, offset: int) -> int:
        return ANY if is_chosen else self.at.get(offset, 0)

    def step(self, line: str) -> _Step | None:
        found = _LINE.match(line)
        if found is None:
            return None
        step = _step(*found.group(2, 3, 4))
        if not step.constants:
            return step
        if step.loads:
            ((is_chosen, offset),) = step.constants
            pairs = tuple((r, self.constant(is_chosen, offset + 4 * i)) for i, r in enumerate(step.clears))
            return replace(step, pairs=pairs)
        return replace(step, made=functools.reduce(operator.or_, (self.constant(*one) for one in step.constants)))


def _blocks(lines: list[str], reader: _Reader) -> tuple[list[list[tuple[_Step, str]]], list[list[int]]]:
    """Straight runs of steps, each with its line, and where each run goes on."""
    blocks: list[list[tuple[_Step, str]]] = [[]]
    labels: dict[str, int] = {}
    for line in lines:
        if found := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[found[1]] = len(blocks) - 1
        elif (step := reader.step(line)) is not None:
            blocks[-1].append((step, line))
            if step.opcode.partition(".")[0] in _ENDS:
                blocks.append([])
    follow: list[list[int]] = []
    for i, block in enumerate(blocks):
        (last, line), after = block[-1] if block else (None, ""), [i + 1] if i + 1 < len(blocks) else []
        if last is None or last.opcode.partition(".")[0] not in _ENDS:
            follow.append(after)
            continue
        is_end = last.opcode.partition(".")[0] in ("EXIT", "RET")
        assert is_end or last.target is not None, f"who knows where this goes: {line.strip()}"
        jumps = [labels[last.target]] if last.target is not None else []
        follow.append(jumps + (after if last.conditional else []))
    return blocks, follow


class _State(dict):
    """Pointers of the registers that may be made of any; of those written under a predicate also what they then are."""

    def __init__(self, known: dict[int, int]):
        super().__init__(known)
        self.under: dict[int, tuple[str, int]] = {}

    def pointers(self, registers: Iterable[int], guard: str | None) -> int:
        made = 0
        for register in registers:
            predicate, then = self.under.get(register, (None, 0))
            made |= then if guard is not None and predicate == guard else self.get(register, 0)
        return made

    def run(self, step: _Step) -> None:
        if step.pairs:
            for register, pointers in step.pairs:
                self._put(register, pointers, step)
        elif step.clears and (step.made or self or self.under):
            made = step.made | self.pointers(step.sources, step.guard)
            for register in step.clears:
                self._put(register, made, step)
        if self.under and step.predicates:
            for register, (guard, _) in list(self.under.items()):
                if "PR" in step.predicates or guard.lstrip("!") in step.predicates:
                    del self.under[register]

    def _put(self, register: int, pointers: int, step: _Step) -> None:
        self.under.pop(register, None)
        if step.keeps:
            self.under[register] = (step.guard, pointers)
            pointers |= self.get(register, 0)
        if pointers:
            self[register] = pointers
        else:
            self.pop(register, None)


def analyse(lines: list[str], base: int, pointers: Iterable[int]) -> Function:
    """`lines`: a function's; `base`: of its parameters in the constant bank; `pointers`: offsets among them."""
    reader = _Reader(base, pointers)
    blocks, follow = _blocks(lines, reader)
    states: list[dict[int, int] | None] = [None] * len(blocks)
    waited = [True] * len(blocks)
    states[0], waited[0] = {}, False
    pending = [0]
    while pending:
        at = pending.pop()
        state, past = _State(states[at]), waited[at]
        for step, _ in blocks[at]:
            if step.opcode == WAIT and not step.guard is not None:
                past = True
            state.run(step)
        for to in follow[at]:
            known = states[to]
            if known is None:
                states[to], waited[to] = dict(state), past
                pending.append(to)
                continue
            more = {r: p | known.get(r, 0) for r, p in state.items() if p & ~known.get(r, 0)}
            if more or (waited[to] and not past):
                known.update(more)
                waited[to] = waited[to] and past
                pending.append(to)
    result = Function()
    for i, block in enumerate(blocks):
        if states[i] is not None:
            _collect(result, block, _State(states[i]), waited[i], reader)
    return result


def _collect(result: Function, block: list[tuple[_Step, str]], state: _State, past: bool, reader: _Reader) -> None:
    for step, line in block:
        name = step.opcode.partition(".")[0]
        if step.opcode == WAIT:
            result.waits += 1
            past = past or not step.guard is not None
        elif step.opcode == TRIGGER:
            result.triggers.append(past)
        elif name in ("EXIT", "RET") and not past:
            result.ends_without_wait.append(line.strip())
        elif name in READS or name in WRITES:
            made = state.pointers(step.address, step.guard)
            named = frozenset(offset for offset, bit in reader.bits.items() if made & bit)
            access = Access(step.opcode, named, bool(made & ANY), not past, line.strip())
            if name in READS:
                result.reads.append(access)
            if name in WRITES:
                result.writes.append(access)
            if "LTC256B" in step.opcode and name == "LDG":
                result.weights.append(not past)
        state.run(step)
