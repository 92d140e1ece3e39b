"""Shadow mode: ours and the original on the same live inputs, and a record of how far apart they are.

DSV4_SM120_SHADOW=1 keeps the original's result, =ours keeps ours. Without it nothing of this runs.

What counts. Two results are compared over every element where the original is finite. Elements where the original is
not finite (uninitialised padding rows and heads) are left out and counted in `nonfinite_original`. An element where the
original is finite and ours is not makes the call bad, and is counted in `nonfinite_ours`. Adapters cut away what the
engine throws away (padded heads) before they compare, and what has no defined result (several rows that write the same
place); the latter is counted in `left_out`. A call is bad above its bound of relative L2, or where a row of it is above
ROW_BOUNDS times that: one wrong row of a prompt's thousands is a small part of the call, and all of its token.

Massive elements. Trained models have a few channels that are thousands of times the others. Of a row that is nearly
such an element, one bf16 step of it is up to 0.008, in two results that are both right; and all the others could be
anything. So elements that have much of their row's sum of squares (MASSIVE) are judged by themselves, by their own
relative error where it is more than bf16's, as a row is; relative L2 is that of the rest.

How it works. Each (patch, layer, call shape, eager or captured) owns one row of a float64 table on the device. A call
updates its row by device operations alone and copies it to the same row of a table in pinned host memory. Under CUDA
graph capture these operations become part of the graph, so every replay counts and nothing waits. A reader looks at the
pinned table, without one CUDA call: no capture can be disturbed, and what the last finished step wrote is there even
if the engine is about to be killed. A daemon thread rewrites the report twice a second while calls arrive.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch

from deepseek_v4_sm120 import patching
from deepseek_v4_sm120.patching import report as process_report
from deepseek_v4_sm120.settings import settings

logger = logging.getLogger(__name__)

LEFT_OUT = ("nonfinite_ours", "nonfinite_original", "left_out")
SUMS = ("calls", "relative_l2_sum", "bad_calls", "rows", *LEFT_OUT)
MAXIMA = ("relative_l2_max", "row_relative_l2_max", "absolute_error_max")
FIRST_BAD = ("first_bad_call", "first_bad_rows")
FIELDS = SUMS + MAXIMA + FIRST_BAD

MAX_RECORDS = 16384  # rows of the table (96 B each); what comes later shares row 0
CHUNK_ELEMENTS = 1 << 22  # float32 temporaries of one comparison step: 16 MiB each
WRITE_EVERY_S = 0.5
LOG_EVERY_S = 60.0
EXACT_ROWS = 128  # above it, eager row counts are recorded by power of two
ROW_BOUNDS = 2.0  # a row's bound, in the call's: in all recorded runs no row of ours was above the call's own
SMALL_ROW = 1e-3  # of the root mean square of a tensor's rows: what is smaller counts as if it were so large
LONG_ROW = 256  # elements, from which on a row can have massive ones: normally distributed, none is
MASSIVE, MASSIVE_PASSES = 1 / 16, 4  # of the sum of squares of a row, or of what is left of it without those found
MASSIVE_ROUNDING = 2.0**-6  # of such an element: two steps of bf16 at most, as of a norm's input and output
SMALL_REST = 1e-6  # of a row: without its massive elements it counts as if it were so large, if it is smaller
TINY = 1e-30


@dataclass(frozen=True)
class Comparison:
    """What an adapter tells about the results of its patch.

    tensors      (ours, original, *args, **kwargs) -> pairs of tensors [rows, ...] to compare, ours first
    identity     (*args, **kwargs) -> hashable that is constant for a layer (a cache's address); layers are numbered in
                 the order in which their identities first appear
    shape        (*args, **kwargs) -> mapping of names to ints, with "rows"
    relative_l2  a call above it is bad, and one with a row above ROW_BOUNDS times it
    """

    tensors: Callable
    identity: Callable[..., Hashable]
    shape: Callable[..., Mapping[str, int]]
    relative_l2: float


@dataclass
class Table:
    """The records of one device: rows on the device, their copy in host memory, and what each row stands for."""

    device: torch.device
    on_device: torch.Tensor
    on_host: torch.Tensor
    rows: dict[tuple, int] = field(default_factory=dict)
    layers: dict[tuple, int] = field(default_factory=dict)

    @classmethod
    def create(cls, device: torch.device) -> Table:
        # a tensor made under inference mode could not be updated outside of it
        with torch.inference_mode(False):
            on_device = torch.zeros(MAX_RECORDS, len(FIELDS), dtype=torch.float64, device=device)
            on_host = on_device
            if device.type == "cuda":
                on_host = torch.zeros(MAX_RECORDS, len(FIELDS), dtype=torch.float64, pin_memory=True)
        return cls(device, on_device, on_host)

    def layer(self, patch_name: str, identity: Hashable) -> int:
        return self.layers.setdefault((patch_name, identity), sum(name == patch_name for name, _ in self.layers))

    def row(self, key: tuple) -> int:
        if key not in self.rows and len(self.rows) >= MAX_RECORDS - 1:
            return 0
        return self.rows.setdefault(key, len(self.rows) + 1)


_tables: dict[torch.device, Table] = {}
_unrecorded: dict[str, int] = {}  # calls captured before the device had a table, by patch
_writer: threading.Thread | None = None


def shadowed(patch_name: str, ours: Callable, original: Callable, compare: Comparison) -> Callable:
    """`ours`; in shadow mode a function that calls both, records the difference and returns the one the mode keeps."""
    if not settings().shadow:
        return ours
    keep_ours = settings().shadow == "ours"

    @functools.wraps(ours)
    def both(*args, **kwargs):
        # ours first: a reused allocation must not hold the right answer
        our_result = ours(*args, **kwargs)
        original_result = original(*args, **kwargs)
        pairs = compare.tensors(our_result, original_result, *args, **kwargs)
        if pairs[0][0].shape[0] > 0:
            record(
                patch_name,
                pairs,
                identity=compare.identity(*args, **kwargs),
                shape=compare.shape(*args, **kwargs),
                relative_l2=compare.relative_l2,
            )
        return our_result if keep_ours else original_result

    return both


def record(patch_name, pairs, *, identity, shape, relative_l2, left_out=None) -> None:
    """Add one call's differences to its record. Capture-safe: only device operations, nothing waits. left_out: a number
    on the device, of what the pairs do not have because its result is chance."""
    device = pairs[0][0].device
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    table = _tables.get(device)
    if table is None:
        if captured:  # zeros allocated here would be zeroed again by every replay
            _unrecorded[patch_name] = _unrecorded.get(patch_name, 0) + 1
            return
        table = _tables[device] = Table.create(device)
        _start_writer()
    rows = shape["rows"]
    named = {**shape, "rows": rows if captured else _rows_bucket(rows)}
    key = (patch_name, table.layer(patch_name, identity), captured, tuple(named.items()), relative_l2)
    row = table.row(key)
    found = difference(pairs, rounding=MASSIVE_ROUNDING if relative_l2 > 0.0 else 0.0)
    found["left_out"] = torch.zeros_like(found["relative_l2"]) if left_out is None else left_out.double()
    _update(table.on_device[row], found, rows, relative_l2)
    if table.on_host is not table.on_device:
        table.on_host[row].copy_(table.on_device[row], non_blocking=True)


def _rows_bucket(rows: int) -> int | str:
    if rows <= EXACT_ROWS:
        return rows
    top = 1 << (rows - 1).bit_length()
    return f"{top // 2 + 1}-{top}"


def difference(pairs, *, rounding: float = MASSIVE_ROUNDING) -> dict[str, torch.Tensor]:
    """Differences of the pairs taken as one call: float64 scalars on the device. rounding: relative error of a massive
    element up to which it does not count."""
    errors, references, worst_rows, worst, nonfinite_ours, nonfinite_original = [], [], [], [], [], []
    for ours, original in pairs:
        if ours.shape != original.shape:
            raise ValueError(f"shadow: ours has shape {tuple(ours.shape)}, the original {tuple(original.shape)}")
        row_errors, row_references, smallest = [], [], []
        step = max(1, CHUNK_ELEMENTS // max(1, ours[0].numel()))
        for start in range(0, ours.shape[0], step):
            a = ours[start : start + step].flatten(1).float()
            b = original[start : start + step].flatten(1).float()
            b_finite = torch.isfinite(b)
            a_missing = b_finite & ~torch.isfinite(a)
            skip = ~b_finite | a_missing
            error = (a - b).masked_fill_(skip, 0.0)
            b = b.masked_fill(skip, 0.0)
            worst.append(error.abs().amax().double())
            nonfinite_ours.append(a_missing.sum(dtype=torch.float64))
            nonfinite_original.append((~b_finite).sum(dtype=torch.float64))
            if b.shape[1] >= LONG_ROW:
                massive = _massive(b)
                relative = (error / b).abs().masked_fill_(~massive, 0.0).amax().double()
                worst_rows.append(relative.masked_fill(relative <= rounding, 0.0))
                smallest.append(SMALL_REST**2 * b.square().sum(1, dtype=torch.float64))
                error, b = error.masked_fill_(massive, 0.0), b.masked_fill_(massive, 0.0)
            row_errors.append(error.square().sum(1, dtype=torch.float64))
            row_references.append(b.square().sum(1, dtype=torch.float64))
        row_error, row_reference = torch.cat(row_errors), torch.cat(row_references)
        if smallest:
            row_reference = torch.maximum(row_reference, torch.cat(smallest))
        least = (SMALL_ROW**2 * row_reference.mean()).clamp_min(TINY)
        worst_rows.append((row_error / torch.maximum(row_reference, least)).sqrt().amax())
        errors.append(row_error.sum())
        references.append(row_reference.sum())
    return {
        "relative_l2": (torch.stack(errors).sum() / torch.stack(references).sum().clamp_min(TINY)).sqrt(),
        "row_relative_l2": torch.stack(worst_rows).amax(),
        "absolute_error": torch.stack(worst).amax(),
        "nonfinite_ours": torch.stack(nonfinite_ours).sum(),
        "nonfinite_original": torch.stack(nonfinite_original).sum(),
    }


def _massive(values: torch.Tensor) -> torch.Tensor:
    """Which of values [rows, n], finite, are massive."""
    squares = values.square()
    found = torch.zeros_like(squares, dtype=torch.bool)
    for _ in range(MASSIVE_PASSES):
        left = squares.masked_fill(found, 0.0).sum(1, keepdim=True, dtype=torch.float64)
        found = found | (squares > MASSIVE * left)
    return found


def _update(record_row: torch.Tensor, found: Mapping[str, torch.Tensor], rows: int, relative_l2: float) -> None:
    """record_row += one call; device operations only, in place, so that a captured graph repeats them."""
    sums = record_row[: len(SUMS)]
    maxima = record_row[len(SUMS) : len(SUMS) + len(MAXIMA)]
    first_bad = record_row[len(SUMS) + len(MAXIMA) :]
    error = found["relative_l2"]
    one, row_count = torch.ones_like(error), torch.full_like(error, rows)
    is_within = (error <= relative_l2) & (found["row_relative_l2"] <= ROW_BOUNDS * relative_l2)  # not what is NaN
    bad = (~is_within | (found["nonfinite_ours"] > 0)).double()
    is_first_bad = (bad > 0) & (sums[SUMS.index("bad_calls")] == 0)
    first_bad.copy_(torch.where(is_first_bad, torch.stack([sums[SUMS.index("calls")] + 1, row_count]), first_bad))
    sums.add_(torch.stack([one, error, bad, row_count, *(found[name] for name in LEFT_OUT)]))
    newest = torch.stack([error, found["row_relative_l2"], found["absolute_error"]])
    maxima.copy_(torch.maximum(maxima, newest))


def report() -> list[dict]:
    """All records with at least one executed call, as plain data. Makes no CUDA call."""
    found = []
    for table in list(_tables.values()):
        for key, row in [*table.rows.items(), (("other", -1, False, (), 0.0), 0)]:
            values = dict(zip(FIELDS, table.on_host[row].tolist(), strict=True))
            if not values["calls"]:
                continue
            patch_name, layer, captured, shape, bound = key
            mean = values.pop("relative_l2_sum") / values["calls"]
            counts = {name: int(values[name]) for name in (*SUMS, *FIRST_BAD) if name in values}
            found.append(
                {
                    "patch": patch_name,
                    "device": str(table.device),
                    "layer": layer,
                    "captured": captured,
                    "shape": dict(shape),
                    "bound": bound,
                    "relative_l2_mean": mean,
                    **{name: values[name] for name in MAXIMA},
                    **counts,
                }
            )
    return found


def summary(records: list[dict]) -> list[dict]:
    """One line of totals for each patch of `report()`'s records, for `status` and the log."""
    totals: dict[str, dict] = {}
    for r in records:
        t = totals.setdefault(
            r["patch"],
            {"patch": r["patch"], "bound": r["bound"], "layers": set(), "replayed_calls": 0, "relative_l2_mean": 0.0}
            | dict.fromkeys((*MAXIMA, "calls", "bad_calls", "rows", *LEFT_OUT), 0)
            | {"first_bad": None},
        )
        t["layers"].add(r["layer"])
        t["replayed_calls"] += r["calls"] if r["captured"] else 0
        t["relative_l2_mean"] += r["relative_l2_mean"] * r["calls"]
        for name in ("calls", "bad_calls", "rows", *LEFT_OUT):
            t[name] += r[name]
        for name in MAXIMA:
            t[name] = max(t[name], r[name])
        if r["bad_calls"] and t["first_bad"] is None:
            t["first_bad"] = {name: r[name] for name in ("layer", "captured", "shape", *FIRST_BAD)}
    for t in totals.values():
        t["layers"] = len(t["layers"])
        t["relative_l2_mean"] /= t["calls"]
        t["unrecorded_calls"] = _unrecorded.get(t["patch"], 0)
    return list(totals.values())


def flush() -> None:
    """Wait for the devices and write the report. Never called while a graph may be under capture."""
    for table in list(_tables.values()):
        if table.device.type == "cuda":
            torch.cuda.synchronize(table.device)
    _write_report()


def reset() -> None:
    """Forget all records (tests, and a user who wants to start over)."""
    _tables.clear()
    _unrecorded.clear()


def _start_writer() -> None:
    global _writer
    if _writer is None:
        _writer = threading.Thread(target=_write_while_calls_arrive, name="dsv4-sm120-shadow", daemon=True)
        _writer.start()
        atexit.register(flush)


def _write_while_calls_arrive() -> None:
    """Rewrite the report when calls arrived since the last time. Reads host memory only (see the module's text)."""
    written, logged, bad_seen, next_log = -1.0, -1.0, 0.0, time.monotonic()
    while True:
        time.sleep(WRITE_EVERY_S)
        tables = list(_tables.values())
        calls = sum(float(t.on_host[:, SUMS.index("calls")].sum()) for t in tables)
        bad = sum(float(t.on_host[:, SUMS.index("bad_calls")].sum()) for t in tables)
        if calls != written:
            _write_report()
            written = calls
        newly_bad = bad > 0 and bad_seen == 0
        if newly_bad or (calls != logged and time.monotonic() >= next_log):
            for line in summary(report()):
                logger.log(logging.ERROR if line["bad_calls"] else logging.INFO, describe(line))
            logged, bad_seen, next_log = calls, bad, time.monotonic() + LOG_EVERY_S


def _write_report() -> None:
    engine = patching.active_engine()
    if engine is not None:
        process_report.write(engine)


def describe(line: Mapping) -> str:
    """One entry of `summary` in words."""
    text = (
        f"shadow {line['patch']}: {line['calls']} calls ({line['replayed_calls']} in replayed graphs), "
        f"relative L2 mean {line['relative_l2_mean']:.2e} max {line['relative_l2_max']:.2e} "
        f"(worst row {line['row_relative_l2_max']:.2e}), worst absolute error {line['absolute_error_max']:.2e}, "
        f"{line['bad_calls']} calls above {line['bound']:g} (a row: {ROW_BOUNDS * line['bound']:g})"
    )
    if line["nonfinite_ours"] or line["nonfinite_original"]:
        text += f", not finite: ours {line['nonfinite_ours']}, original {line['nonfinite_original']} elements"
    if line["left_out"]:
        text += f", {line['left_out']} results not compared: several rows of a call write there, which stays is chance"
    if line["unrecorded_calls"]:
        text += f", {line['unrecorded_calls']} captured calls not recorded (no eager call came before)"
    if line["first_bad"]:
        text += f"; first bad call: {line['first_bad']}"
    return text
