"""The host's defaults that the table changes, in this process: which ones, who decided it, and the values put there.

The parent decides, while it resolves the arguments of a model that is ours on a GPU that we serve (`apply`). Its
children are new interpreters: they find the decision in one variable and put back what the parent's host code has
overwritten since (`inherit`). What the user set himself always stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace

from deepseek_v4_sm120.patching.spec import VALUE, Default
from deepseek_v4_sm120.settings import NO, Settings

ON, OFF, USER, NOT_APPLICABLE = "ON", "OFF", "USER'S OWN", "NOT APPLICABLE"
HANDOVER = "_DSV4_SM120_CHILD_ENVIRONMENT"  # JSON that a patched parent leaves for its children; no setting of users
BY_DEFAULT, NOT_BY_DEFAULT = "by default", "not by default"  # reasons
MISSING = object()  # a server argument that the host does not have
EMPTY: Mapping[str, str] = {}
AT_HOST_DEFAULT = (None, "auto")  # values of a server argument that nobody chose


def without(names: Iterable[str], choices: Mapping[str, str], fixed: Container[str]) -> str:
    """What to set DSV4_SM120_SET to, so that these are left out and the choices that are made stay; of those which are
    no settings (`fixed`) none."""
    chosen = {name: value for name, value in choices.items() if name not in fixed} | dict.fromkeys(names, "off")
    return ",".join(f"{name}={value}" for name, value in chosen.items())


@dataclass
class Outcome:
    """What became of one of the table's defaults: ON, OFF, USER'S OWN or NOT APPLICABLE."""

    default: str
    state: str
    reason: str
    value: int | None = None
    applied: tuple[str, ...] = ()


class Steering:
    """The changed defaults of one process. `in_range` answers whether the host's version is in a specifier set."""

    def __init__(
        self,
        rows: tuple[Default, ...],
        settings: Settings,
        in_range: Callable[[str], bool],
        operators: tuple[str, ...] = (),  # the engine leaves out those that are chosen "off"
        fixed: Mapping[str, str] = EMPTY,  # what it does not leave out -> why
    ):
        self._fixed = {name: why for name, why in fixed.items() if name in settings.choices}
        self.rows = {row.name: row for row in rows if in_range(row.sglang)}
        self.known = tuple(dict.fromkeys((*(row.name for row in rows), *operators)))  # a patch may have its default's
        self.unknown = sorted(set(settings.choices) - set(self.known))
        by_number = {row.name for row in rows if row.value is not None}
        self.numbered = [n for n in self.known if n not in by_number and settings.choices.get(n, "off").isdigit()]
        self._decided = [self._decide(row, in_range, settings) for row in rows]
        self.outcomes = [replace(outcome) for outcome in self._decided]
        self.is_child = False
        self._ours: dict[str, str] = {}  # variables that we set; all others that are set are the user's
        self._left: dict[str, str] = {}  # what the host has made of them

    def _decide(self, row: Default, in_range: Callable[[str], bool], settings: Settings) -> Outcome:
        asked = settings.choices.get(row.name)
        if settings.off:
            return Outcome(row.name, NOT_APPLICABLE, "DSV4_SM120=off")
        if row.name not in self.rows:
            return Outcome(row.name, NOT_APPLICABLE, f"for SGLang {row.sglang}")
        if asked in NO:
            return Outcome(row.name, OFF, "DSV4_SM120_SET")
        value = int(asked) if asked and asked.isdigit() else row.value
        if asked:
            return Outcome(row.name, ON, "DSV4_SM120_SET", value)
        is_on = row.on and (row.on_in is None or in_range(row.on_in))
        if is_on and settings.mode != "sm120":
            return Outcome(row.name, OFF, "validation mode: only what DSV4_SM120_SET asks for")
        with_it = f", with {flag(row.only_with)}" if row.only_with else ""
        return Outcome(row.name, ON if is_on else OFF, BY_DEFAULT + with_it if is_on else NOT_BY_DEFAULT, value)

    def problem(self) -> str | None:
        """A name in DSV4_SM120_SET that no default and no operator has, or a number for what has none."""
        if self.numbered:
            return f"DSV4_SM120_SET must be on or off for {', '.join(self.numbered)}, which are no numbers"
        if self._fixed:
            return f"DSV4_SM120_SET: {'; '.join(f'{name} is no setting: {why}' for name, why in self._fixed.items())}"
        if not self.unknown:
            return None
        from difflib import get_close_matches

        near = [name for unknown in self.unknown for name in get_close_matches(unknown.lower(), self.known, n=1)]
        meant = f" (perhaps {', '.join(dict.fromkeys(near))}?)" if near else ""
        return f"DSV4_SM120_SET names {', '.join(self.unknown)}{meant}; it takes {', '.join(self.known)}"

    def outcome(self, name: str) -> Outcome:
        return next(c for c in self.outcomes if c.default == name)

    def value(self, name: str) -> int:
        """The number of a default that is on, else 0."""
        return next((c.value or 0 for c in self.outcomes if c.default == name and c.state == ON), 0)

    def start(self, environ: MutableMapping[str, str]) -> None:
        """Before the host's first line: a child takes over the parent's decision."""
        self.is_child = HANDOVER in environ
        if self.is_child:
            environ.update(json.loads(environ[HANDOVER]))

    def begin(self, environ: MutableMapping[str, str]) -> None:
        """The host begins to resolve a server's arguments, whatever its model. What an earlier server was given, in
        this process or in the one that started it, is taken back, but for what somebody has written over: the host's
        own value is written over again, and any other is the user's from now on."""
        given = {**self._ours, **json.loads(environ.pop(HANDOVER, "{}"))}
        for name in [name for name, value in given.items() if environ.get(name) == value]:
            del environ[name]
        is_users = {name for name in self._ours if name in environ and environ[name] != self._left.get(name)}
        self._ours = {name: value for name, value in self._ours.items() if name not in is_users}
        self.outcomes = [replace(outcome) for outcome in self._decided]
        self.is_child = False

    def end(self, environ: Mapping[str, str]) -> None:
        """The host has resolved what it resolves by the model, and may have written over variables of ours."""
        self._left = {name: environ[name] for name in self._ours if name in environ}

    def set_aside(self, reason: str) -> None:
        """None of the defaults is changed, until `begin`: the host serves a model that they are not for."""
        for outcome in [c for c in self.outcomes if c.state == ON]:
            outcome.state, outcome.reason = NOT_APPLICABLE, reason

    def apply(self, environ: MutableMapping[str, str], argument: Callable, set_argument: Callable) -> list[Outcome]:
        """Put the values in place. `argument(name[, default])` reads a server argument, `set_argument(name, value)`
        writes it."""
        if self.is_child:
            return self.outcomes
        handover: dict[str, str] = {}
        for outcome in [c for c in self.outcomes if c.state == ON]:
            row = self.rows[outcome.default]
            if users := [name for name, values in row.unless if self._is_users(name, values, environ)]:
                outcome.state, outcome.reason = NOT_APPLICABLE, f"{users[0]}={environ[users[0]]}"
                continue
            if row.only_with and not argument(row.only_with, None):
                outcome.state, outcome.reason = NOT_APPLICABLE, f"without {flag(row.only_with)}"
                continue
            if row.only_where and outcome.reason.startswith(BY_DEFAULT):
                name, value = row.only_where
                if (found := argument(name, value)) != value:
                    outcome.state, outcome.reason = OFF, f"not by default with {flag(name)} {found}"
                    continue
            if missing := [flag(name) for name in row.arguments if argument(name, MISSING) is MISSING]:
                outcome.state, outcome.reason = NOT_APPLICABLE, f"this SGLang has no {', '.join(missing)}"
                continue
            self._apply_row(row, outcome, environ, handover, argument, set_argument)
        if handover:
            environ[HANDOVER] = json.dumps(handover)
        return self.outcomes

    def _is_users(self, name: str, values: tuple[str, ...], environ: Mapping[str, str]) -> bool:
        return name in environ and name not in self._ours and (not values or environ[name].lower() in values)

    def _apply_row(self, row, outcome, environ, handover, argument, set_argument) -> None:
        applied, kept = [], []
        for name, value in row.environment.items():
            if name in environ and name not in self._ours:
                kept.append(f"{name}={environ.get(name)}")
                continue
            environ[name] = handover[name] = self._ours[name] = value
            applied.append(f"{name}={value}")
        for name, value in row.arguments.items():
            wanted = outcome.value if value == VALUE else value
            current = argument(name)
            if current in AT_HOST_DEFAULT:
                set_argument(name, wanted)
                applied.append(f"{name}={wanted}")
            elif current != wanted:
                kept.append(f"{name}={current}")
        outcome.applied = (*outcome.applied, *(one for one in applied if one not in outcome.applied))
        if kept:
            outcome.state = USER if not outcome.applied else ON
            outcome.reason = f"kept {', '.join(kept)}"

    def as_rows(self) -> list[dict]:
        """For reports: every default with its state, and why it exists."""
        rows = {row.name: row for row in self.rows.values()}
        return [
            {
                **asdict(outcome),
                "would_set": what(rows[outcome.default], outcome.value) if outcome.default in rows else "",
                "why": rows[outcome.default].why if outcome.default in rows else "",
            }
            for outcome in self.outcomes
        ]


def what(row: Default, value: int | None) -> str:
    """The values of a default in words."""
    arguments: Mapping[str, object] = {k: value if v == VALUE else v for k, v in row.arguments.items()}
    words = [f"{name}={text}" for name, text in row.environment.items()]
    words += [f"{flag(name)} {text}" for name, text in arguments.items()]
    return " ".join(words)


def flag(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"
