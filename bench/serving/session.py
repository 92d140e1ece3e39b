"""Runs the matrix on both sides, alternating; keeps every round; writes what there is after every cell."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.serving import identity, machine, measures
from bench.serving.answers import first_state, is_acceptance
from bench.serving.cells import DEPTH_SUFFIX, Cell
from bench.serving.endpoint import KEY_STATUSES, Endpoint, ServerError, ServerRefused
from bench.serving.generator_process import Generator, GeneratorFailed, Row
from bench.serving.prompts import PromptSource
from bench.serving.server_process import ServerDied, ServerProcess, command_of, watched_environment
from deepseek_v4_sm120.commands.disclosure import API_KEY, shown

FORMAT = "serving-comparison 1"
OWN_VARIABLE = "DSV4_SM120_REPORT"  # set by this program on both sides
FLUSH_TRIES = 20
UNENDED = "it was cut off: this was written while it ran, and nothing came after it"


class SessionEnded(Exception):
    """The session cannot go on; what was measured is kept and marked."""


class ComparisonRefused(Exception):
    """The sides differ in more than the intended change."""


@dataclass
class Settings:
    rounds: int = 3
    seed: int = 1
    prompts: str = "text"
    both_at_once: bool = False
    natural_end: bool = False
    model: str | None = None
    start_s: float = 1800.0
    cell_s: float = 3600.0
    limit_s: float | None = None
    warmup_up_to_tokens: int = 65536
    clock_period_s: float = 1.0


@dataclass
class Side:
    """A or B: an address, and a command where this program starts the server itself."""

    letter: str
    label: str
    url: str
    command: str | None = None
    backend: str = "sglang"
    report: Path | None = None
    pid: int | None = None
    api_key: str | None = None
    clocks: list[dict] = field(default_factory=list)
    identity: identity.Identity | None = None
    server: ServerProcess | None = None
    starts: int = 0
    startup_s: list[float] = field(default_factory=list)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, api_key=self.api_key)


def tell(text: str) -> None:
    """Progress on stdout, as it may be shown."""
    print(shown(text), flush=True)


def seed_of(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


class Session:
    """One variant (a pair of sides) over a list of cells. `save` is called after every cell with the result so far."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        settings: Settings,
        generator: Generator,
        folder: Path,
        choose_cells: Callable[[int | None], list[Cell]],
        changes: list[str],
        save: Callable[[dict], None],
        say: Callable[[str], None] = tell,
    ):
        self.sides, self.settings, self.generator, self.folder = sides, settings, generator, folder
        self.choose_cells, self.changes, self.save, self.say = choose_cells, changes, save, say
        self.cells: list[Cell] = []
        self.results: dict[str, dict] = {}
        self.incomplete: list[str] = []
        self.interrupted = False
        self.prompt_source: PromptSource | None = None

    # --- servers

    def _start(self, side: Side) -> None:
        if side.command is None:
            return
        report = side.report
        if report is None and "docker" not in side.command.split():
            report = self.folder / f"patch_reports_{side.letter}_{side.starts}"
            report.mkdir(parents=True, exist_ok=True)
        side.starts += 1
        environment = {OWN_VARIABLE: str(report)} if report else {}
        log = self.folder / f"server_{side.letter}.log"
        side.server = ServerProcess(side.label, side.command, side.url, log, environment)
        self.say(f"{side.label}: starting ({side.command})")
        side.server.start()

    def _ready(self, side: Side) -> None:
        """Wait for the server and learn who it is. A later start of the same side must be the same server."""
        report = side.report
        environment, command = None, side.command
        if side.server is not None:
            side.startup_s.append(round(side.server.wait_ready(self.settings.start_s), 1))
            self.say(f"{side.label}: ready after {side.startup_s[-1]:.0f} s")
            environment = side.server.watched_environment()
        elif side.pid is not None:
            try:
                environment, command = watched_environment(side.pid), command_of(side.pid)
            except OSError as error:
                raise SessionEnded(f"{side.label}: no process {side.pid} can be looked at: {error}") from error
        if environment is not None:
            folder = environment.pop(OWN_VARIABLE, None)
            report = report or (Path(folder) if folder else None)
        found = identity.identify(side.label, side.endpoint, self.settings.model, command, environment, report)
        if side.identity is not None:
            changed = identity.reasons_to_refuse(side.identity, found, ["nothing"])
            if changed:
                raise SessionEnded(f"{side.label} is not the server that it was before: {'; '.join(changed)}")
        side.identity = found
        if all(s.identity is not None for s in self.sides) and (reasons := self._differences()):
            raise ComparisonRefused("; ".join(reasons))  # before hours are spent on it

    def _differences(self) -> list[str]:
        a, b = (side.identity for side in self.sides)
        return identity.reasons_to_refuse(a, b, self.changes)

    @contextlib.contextmanager
    def _up(self, sides: list[Side]) -> Iterator[None]:
        try:
            for side in sides:
                self._start(side)
            for side in sides:
                self._ready(side)
            yield
        finally:
            for side in sides:
                if side.server is not None:
                    side.server.stop()
                    side.server = None

    # --- the order of things

    def run(self) -> dict:
        """The result; `incomplete` says why it is not whole."""
        self._save_unended()
        try:
            if self.settings.both_at_once or all(side.command is None for side in self.sides):
                self._alternate_cells()
            else:
                self._alternate_servers()
        except ComparisonRefused:
            pass  # `refused` says it
        except (SessionEnded, ServerDied, ServerError) as error:
            wants_key = isinstance(error, ServerRefused) and error.status in KEY_STATUSES
            hint = f". Give the servers' key: {API_KEY} in the environment, or --api-key" if wants_key else ""
            self.incomplete.append(str(error) + hint)
        except KeyboardInterrupt:
            self.interrupted = True
            self.incomplete.append("interrupted")
        found = self.result()
        self.save(found)
        return found

    def _order(self, round_index: int) -> list[Side]:
        """A B, B A, A B, ...: a slow drift of the machine hits both alike."""
        return list(self.sides) if round_index % 2 == 0 else list(reversed(self.sides))

    def _rounds(self) -> Iterator[int]:
        """The rounds; ends the session where the next one, as long as the last, would pass the limit."""
        begin = last = time.monotonic()
        for index in range(self.settings.rounds):
            now = time.monotonic()
            if index and self.settings.limit_s is not None and 2 * now - last - begin > self.settings.limit_s:
                done = f"{index} of {self.settings.rounds} rounds"
                raise SessionEnded(f"{done}: another one would pass the limit of {self.settings.limit_s:.0f} s")
            last = now
            yield index

    def _alternate_cells(self) -> None:
        with self._up(list(self.sides)):
            self._prepare(self.sides[0])
            for round_index in self._rounds():
                for cell in self.cells:
                    for side in self._order(round_index):
                        self._measure(side, cell, round_index, first=round_index == 0)

    def _alternate_servers(self) -> None:
        for round_index in self._rounds():
            for side in self._order(round_index):
                with self._up([side]):
                    self._prepare(side)
                    for cell in self.cells:
                        self._measure(side, cell, round_index, first=True)

    def _prepare(self, side: Side) -> None:
        if not self.cells:
            limits = [s.identity.max_request_tokens for s in self.sides if s.identity and s.identity.max_request_tokens]
            self.cells = self.choose_cells(min(limits) if limits else None)
            for cell in self.cells:
                self.results[cell.name] = {"cell": dataclasses.asdict(cell), "runs": {"A": [], "B": []}}
        if self.prompt_source is None:
            self.prompt_source = self._prompts(side)

    def _prompts(self, side: Side) -> PromptSource:
        if self.settings.prompts == "random":
            return PromptSource("random")
        try:
            side.endpoint.tokenize("probe")
        except (ServerError, KeyError) as error:
            raise SessionEnded(
                f"no tokenizer: {side.label} does not tokenize ({error}). Start the server with its tokenizer, or take "
                "--prompts random, which says nothing of speculation"
            ) from error
        return PromptSource("text", side.endpoint.tokenize)

    # --- one cell

    def _rows(self, cell: Cell, phase: str, round_index: int) -> tuple[list[Row], Row | None]:
        """(the measured requests, the request that fills the shared prefix). The same for both sides."""

        def seed(index: object) -> int:
            return seed_of(self.settings.seed, cell.name, phase, round_index, index)

        source = self.prompt_source
        if cell.kind == "depth":
            prefix = source.beginning(cell.prompt_tokens, seed("prefix"))
            rows = [Row(prefix + source.end(DEPTH_SUFFIX, seed(i)), cell.output_tokens) for i in range(cell.requests)]
            return rows, Row(prefix, 1)
        if cell.kind == "intrusion":
            rows = [Row(source.ids(cell.prompt_tokens, seed(i)), cell.output_tokens) for i in range(cell.streams)]
            return [*rows, Row(source.ids(cell.long_tokens, seed("late")), 1, cell.delay_s)], None
        return [Row(source.ids(cell.prompt_tokens, seed(i)), cell.output_tokens) for i in range(cell.requests)], None

    def ignores_eos(self, cell: Cell) -> bool:
        return not (self.settings.natural_end and cell.kind in ("single", "concurrent", "depth"))

    def _send(self, side: Side, cell: Cell, rows: list[Row], streams: int) -> list[dict]:
        found = self.generator.run(
            side.url,
            side.backend,
            side.identity.model or "default",
            rows,
            streams,
            self.ignores_eos(cell),
            self.settings.cell_s,
        )
        outputs = found["outputs"]
        if side.backend != "sglang":  # bench_serving learns of cache hits from SGLang's own interface only
            outputs = [{key: value for key, value in o.items() if key != "cached_tokens"} for o in outputs]
        if found["failure"] and not any(not output["success"] for output in outputs):
            raise GeneratorFailed(found["failure"].strip().splitlines()[-1])
        return outputs

    def _flush(self, side: Side) -> None:
        """Every cell starts with an empty prefix cache. Refused while a request is still ending, so ask again."""
        if side.backend != "sglang":
            return
        for attempt in range(FLUSH_TRIES):
            try:
                return side.endpoint.flush_cache()
            except ServerRefused:
                if attempt == FLUSH_TRIES - 1:
                    raise
                time.sleep(0.25)

    def _warm_up(self, side: Side, cell: Cell) -> bool:
        """The cell once with prompts of its own, not measured: compilation and tuning happen here."""
        if cell.context_tokens > self.settings.warmup_up_to_tokens:
            return False
        rows, fill = self._rows(cell, "warm-up", 0)
        if fill is not None:
            rows = [fill, rows[0]]
        elif cell.kind != "intrusion":
            rows = rows[: cell.streams]
        self._send(side, cell, rows, 1 if fill else max(cell.streams, len(rows)))
        return True

    def _measure(self, side: Side, cell: Cell, round_index: int, first: bool) -> None:
        run: dict = {"round": round_index, "values": {}, "problems": []}
        self.results[cell.name]["runs"][side.letter].append(run)
        watch = machine.ClockWatch(self.settings.clock_period_s)
        try:
            if first:
                run["warmed_up"] = self._warm_up(side, cell)
            self._flush(side)
            rows, fill = self._rows(cell, "measured", round_index)
            fill_output = None
            if fill is not None:
                (fill_output,) = self._send(side, cell, [fill], 1)
                if not fill_output["success"]:
                    run["problems"].append(
                        f"the prefix could not be filled: {' '.join(fill_output['error'].split())[-200:]}"
                    )
            with watch.watching():
                outputs = self._send(side, cell, rows, len(rows) if cell.kind == "intrusion" else cell.streams)
            self._judge(run, side, cell, outputs, fill_output)
        except GeneratorFailed as error:
            run["problems"].append(str(error))
        except ServerError as error:
            run["problems"].append(str(error))
        side.clocks += watch.samples
        self._tell(side, cell, run)
        self._save_unended()
        if run["problems"]:
            self._check_alive(side, cell)

    def _acceptance_of_server(self, run: dict, side: Side) -> None:
        """bench_serving before 0.5.17 keeps no acceptance by request: the server's own average since its start then."""
        length = first_state(side.endpoint.server_info()).get("avg_spec_accept_length")
        if is_acceptance(length) and "stream_tok_s" in run["values"]:
            run["values"] |= {"acceptance_length": length, "verifier_steps_s": run["values"]["stream_tok_s"] / length}
            run["note"] = "the acceptance is the server's average since its start"

    def _judge(self, run: dict, side: Side, cell: Cell, outputs: list[dict], fill: dict | None) -> None:
        run["requests"] = [{k: v for k, v in o.items() if k not in ("itl", "error")} for o in outputs]
        run["problems"] += measures.problems(cell, outputs, self.ignores_eos(cell))
        if run["problems"]:
            return
        run["cached_share"] = measures.cached_share(outputs, cell.prompt_tokens)
        try:
            run["values"], pools = measures.figures(cell, outputs, fill)
        except ValueError as error:
            run["problems"].append(str(error))
            return
        if side.identity.speculates and "acceptance_length" not in run["values"]:
            self._acceptance_of_server(run, side)
        if cell.kind == "intrusion":
            run["pools"] = {name: sorted(round(value, 3) for value in values) for name, values in pools.items()}
        share = run["cached_share"]
        if cell.kind == "depth" and share is not None and share < measures.REUSED_MIN_PROMPT_CACHED:
            run["note"] = "the prefix was not reused: every request filled it again, and ttft_ms holds that"

    def _tell(self, side: Side, cell: Cell, run: dict) -> None:
        shown = measures.HEADLINES[cell.kind]
        values = ", ".join(f"{name} {run['values'][name]:.4g}" for name in shown if name in run["values"])
        self.say(f"round {run['round'] + 1} {side.label}, {cell.name}: {'; '.join(run['problems']) or values}")

    def _check_alive(self, side: Side, cell: Cell) -> None:
        if side.server is not None:
            side.server.check_alive()
        if not side.endpoint.is_ready():
            raise SessionEnded(f"{side.label} does not answer any more, last seen in the cell {cell.name}")

    # --- the result

    def _save_unended(self) -> None:
        """What there is, should nothing else come: what kills this process leaves it no time to say so."""
        found = self.result()
        self.save(found | {"incomplete": [*found["incomplete"], UNENDED]})

    def result(self) -> dict:
        """Everything known so far, JSON-able. A side's clocks are summarised over all its measured time."""
        return {
            "sides": {
                side.letter: {
                    "label": side.label,
                    "backend": side.backend,
                    "startup_s": side.startup_s,
                    "clocks": machine.summarise_clocks(side.clocks),
                    "identity": dataclasses.asdict(side.identity) if side.identity else None,
                }
                for side in self.sides
            },
            "cells": json.loads(json.dumps(list(self.results.values()))),
            "refused": self.refused(),
            "incomplete": list(self.incomplete),
        }

    def refused(self) -> list[str]:
        """Why A and B must not be compared; empty if they may."""
        if any(side.identity is None for side in self.sides):
            return []  # incomplete, not refused
        return self._differences() + identity.clock_reasons(*(machine.summarise_clocks(s.clocks) for s in self.sides))
