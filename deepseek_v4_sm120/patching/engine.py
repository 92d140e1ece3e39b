"""version -> target -> contract -> needs -> setattr -> record. Knows neither the host nor our kernels.

A patch is put in place as a whole or not at all: every target of it, and of the operator that it serves, is checked on
disk before the first is replaced, and a target that turns out missing later takes the others back. What does not fit is
told in one line and left out; nothing is raised inside an import. A server is stopped in Table.resolved_at and
Table.built_at, which the host calls for our model only, and there only where the GPU is ours too.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_v4_sm120.patching import contract, import_hook, profile, report, verdict
from deepseek_v4_sm120.patching.host_version import HostVersion
from deepseek_v4_sm120.patching.reads import Reads
from deepseek_v4_sm120.patching.sources import Sources, package_version
from deepseek_v4_sm120.patching.spec import Patch, PatchError, StandIn, Table, Target
from deepseek_v4_sm120.patching.steering import ON, Steering, without
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches import device_gate

READY = "READY"  # fits; waits for the host to import the module
APPLIED = "APPLIED"
NOT_APPLICABLE = "NOT APPLICABLE"  # not for this mode or this host version: quiet
UNSUPPORTED = "UNSUPPORTED"  # a host version that we do not know: one warning, stock code runs
OFF = "OFF"  # DSV4_SM120=off
BROKEN = "BROKEN"  # in range, but it, or another target of its patch, does not fit or cannot load: left out

MARK = "__deepseek_v4_sm120__"  # on every function that we put in place: the names of its patches


@dataclass
class Record:
    """What became of one target of one patch in this process."""

    patch: Patch
    target: Target | None  # None: no target of the patch is for this version
    state: str
    reason: str
    review: str = ""  # "reviewed", or what is unreviewed about it, in words
    digest: str | None = None
    holder: object = None
    original: object = None
    replacement: object = None
    elsewhere: list = field(default_factory=list)  # (module, name) that had the original by name, and have ours
    by_name: list[str] = field(default_factory=list)  # module attributes that still hold the original
    problem: str | None = None  # of this very target; another BROKEN one is left out because of its patch

    @property
    def name(self) -> str:
        return self.patch.name

    @property
    def where(self) -> str:
        return self.target.where if self.target else "-"

    @property
    def attribute(self) -> str:
        return self.target.qualname.rpartition(".")[2]


class Engine:
    """The patches of one process. `start()` hooks them; `survey()` only looks at what is on disk."""

    def __init__(self, table: Table, host: str, settings: Settings):
        self.table = table
        self.host = host
        self.settings = settings
        version_files = Sources()
        self.version = package_version(host, version_files)
        self.known = table.known(self.version)
        self.release = HostVersion(host, self.version, table, lambda t: self._look(t.where, t.contract, t.caller))
        self.stand_ins = [s for s in table.stand_ins if self.release.is_known_in(s.sglang)]
        self.sources = Sources({s.name: _package_file(s.package) for s in self.stand_ins})
        self._text = functools.cache(self.sources.read)
        reads = table.reads() if self.release.is_ahead else Reads()
        self._lacks = functools.cache(lambda module: reads.missing(module, self._text))
        told = (*version_files.problems, self.known.problem, reads.problem)
        self.unparsable = [one for one in told if one]  # sentences; a target's own is in its record
        self.steering = Steering(table.defaults, settings, self.release.is_known_in, table.operators, table.fixed)
        self.build = verdict.build()
        self.inherited = verdict.inherited(os.environ, self.version)  # None in the first process of a server
        handed = self.inherited.profile if self.inherited else None
        self.profile = profile.of_parent(handed) if handed else profile.consult(settings.profile, self.version)
        self.records = [record for patch in table.patches for record in self._select(patch)]
        self._leave_out_what_serves_nothing()
        self.disagreements: list[str] = []  # what only this process of the server cannot have
        self._announced = False
        self._has_layers = False  # of our model on a GPU of ours: from here on a patch cannot be taken back
        self._order: list[Record] = []  # the APPLIED ones, as they were put in place
        self._checked: set[str] = set()  # patches
        self._told: set[str] = set()  # problems
        self._watched: list[tuple[object, str, object, object]] = []  # (holder, attribute, original, ours)
        self._needs_met: dict[str, str | None] = {}  # "module:function" -> None, or why it failed

    # Selection ------------------------------------------------------------------------------------------------------

    def _select(self, patch: Patch) -> list[Record]:
        if self.settings.off:
            return [Record(patch, None, OFF, "DSV4_SM120=off")]
        name, choices = patch.serves or patch.name, self.settings.choices
        asked = choices.get(name)
        for one in () if patch.stays else (name, patch.name):
            if choices.get(one) == "off":
                return [Record(patch, None, OFF, f"DSV4_SM120_SET={one}=off")]
        against = self.profile.against(name)
        if self.sources.path(self.host) is None:
            return [Record(patch, None, NOT_APPLICABLE, f"{self.host} is not on this interpreter's path")]
        if self.settings.mode not in patch.modes:
            wanted = " or ".join("normal use" if m == "sm120" else f"DSV4_SM120_FORCE={m}" for m in patch.modes)
            return [Record(patch, None, NOT_APPLICABLE, f"only in {wanted}")]
        if patch.variable and not self.settings.given(patch.variable):
            return [Record(patch, None, NOT_APPLICABLE, f"only with {patch.variable}")]
        if not self.release.is_supported(patch):
            reason = (
                f"{self.release} is outside of what this release knows ({self.table.supported}): "
                f"the stock code runs. Use a newer release of deepseek_v4_sm120, or an older {self.host}"
            )
            return [Record(patch, None, UNSUPPORTED, reason)]
        if against is not None and asked is None:
            return [Record(patch, None, NOT_APPLICABLE, against)]
        if patch.default and (default := self.steering.outcome(patch.default)).state != ON:
            elsewhere = f", {default.reason}" if default.state == NOT_APPLICABLE else ""
            return [Record(patch, None, NOT_APPLICABLE, f"only in DSV4_SM120_SET={patch.default}=on{elsewhere}")]
        targets = self.release.targets(patch)
        why = f": {patch.absent}" if patch.absent else ""
        if not targets and self.release.is_told:
            return [Record(patch, None, NOT_APPLICABLE, f"{self.release} has no such place{why}")]
        if not targets and not self.release.may_have(patch):
            reason = f"{self.host} tells no release; behind {self.release.like}, which it is most like, nobody knows of"
            return [Record(patch, None, NOT_APPLICABLE, f"{reason} such a place{why}")]
        if not targets:
            reason = f"{self.host} does not tell its version, and no place of it fits {patch.name}: the stock code runs"
            return [Record(patch, None, UNSUPPORTED, reason)]
        why = f"; DSV4_SM120_SET={name}={asked}, although {against}" if against else ""
        return [Record(patch, t, READY, f"when {self.host} imports it{why}") for t in targets]

    def _leave_out_what_serves_nothing(self) -> None:
        """A patch that serves an operator makes no sense, and may do harm, where the operator is not replaced."""
        states = {r.name: r.state for r in self.records}
        for record in self.records:
            operator = record.patch.serves
            if record.state == READY and states.get(operator, READY) != READY:
                record.state = NOT_APPLICABLE
                record.reason = f"serves {operator}, which is {states[operator]}"

    def _look(self, where: str, expected: contract.Contract, caller: str | None) -> contract.Finding:
        known = self.known.finding(where, expected, caller, self.sources.digest)
        return known or contract.check(where, expected, caller, self.sources.parse)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hook every chosen target, the preflight and the places where a server may be stopped."""
        for text in report.surroundings():
            report.warn_once(text)
        self.steering.start(os.environ)
        device_gate.on_first_served(self.audit)
        for stand_in in self.stand_ins:
            import_hook.provide(stand_in.name, _package_file(stand_in.package), self._condition(stand_in))
        states = {record.state for record in self.records}
        is_unsupported = UNSUPPORTED in states and READY not in states  # then the GPU is not even asked for
        for where in () if is_unsupported else self._stops():  # before the patches: one may lie in the same place
            import_hook.on_import(where.partition(":")[0], lambda module, where=where: self._watch(where, module))
        for record in self.records:
            if record.state == READY:
                import_hook.on_import(record.target.module, lambda module, record=record: self.apply(record, module))
        import_hook.on_import(self.table.preflight, lambda module: self.preflight())
        for patch in (p for p in self.table.patches if p.ahead is not None and self.inherited is not None):
            import_hook.before_import(patch.ahead[0], functools.partial(self._go_ahead, patch))
        report.start(self)

    def _go_ahead(self, patch: Patch) -> None:
        """What a patch begins early in a process that a server started; only where nothing speaks against it so far."""
        if patch.name in self.in_place() and patch.name not in self.inherited.left_out:
            _load(patch.ahead[1])()

    def _condition(self, stand_in: StandIn) -> Callable[[], bool]:
        def holds() -> bool:
            return stand_in.only_after in sys.modules and _load(stand_in.condition)()

        return holds

    def _watch(self, where: str, module) -> None:
        """Have `enter_model` called in front of a function that the host calls for our model only."""
        holder, attribute = _holder(module, where.partition(":")[2])
        original = vars(holder).get(attribute) if holder is not None else None
        if not callable(original) or getattr(original, "__dict__", {}).get(MARK) == ():
            return

        @functools.wraps(original)
        def watched(*args, **kwargs):
            self.enter_model(where == self.table.built_at)
            return original(*args, **kwargs)

        setattr(watched, MARK, ())
        setattr(holder, attribute, watched)
        self._watched.append((holder, attribute, original, watched))

    def preflight(self) -> None:
        """Before the host starts to work: check every row on disk, load what they need, say what does not fit."""
        import_hook.catch_up()
        self._check(patch.name for patch in self.table.patches)
        self._tell()
        self._forget()
        told = [r.reason for r in self.records if r.state == UNSUPPORTED] + self.profile.warnings + self.unparsable
        told += [self.profile.outdated] if self.profile.outdated else []
        unreviewed = {r.name: "" for r in self.records if r.state != BROKEN and r.review.startswith("UNREVIEWED")}
        if unreviewed:
            told.append(
                f"UNREVIEWED in {self.release}, and replaced where it fits: {', '.join(unreviewed)}; "
                "`python3 -m deepseek_v4_sm120 status` says what, DSV4_SM120_UNREVIEWED=refuse leaves it out"
            )
        for text in dict.fromkeys(told):
            report.warn_once(text)
        report.write(self)

    def survey(self) -> list[Record]:
        """The records after checking everything on disk, as the preflight does it; nothing is said or patched."""
        self._checked.clear()
        self._check(patch.name for patch in self.table.patches)
        self._forget()
        return self.records

    def _forget(self) -> None:
        self.sources.forget()
        self._text.cache_clear()
        self._lacks.cache_clear()

    def enter_model(self, makes_layers: bool) -> None:
        """The host is about to run our model. On a GPU of ours, PatchError where something would be missing; what is
        decided here holds for the processes that this one starts."""
        import_hook.catch_up()
        self._check(patch.name for patch in self.table.patches)
        if self.inherited is None:
            left_out = {r.name: r.problem or r.reason for r in reversed(self.records) if r.state == BROKEN}
            mine = verdict.identity(self.version)
            verdict.Verdict(mine, left_out, self.profile.handover(), self.build).hand_over(os.environ)
        if not device_gate.serves_current_device():
            return
        if (replaced := verdict.replaced(self.build, self.inherited)) is not None:
            self.disagreements.append(replaced)
            report.write(self)
            raise PatchError(f"deepseek_v4_sm120 {report.our_version()}: {replaced}. {verdict.REMEDY}")
        problems = self.problems()
        if self.disagreements or (problems and self.settings.on_broken == "raise"):
            raise self._refusal(self.disagreements + problems)
        if makes_layers and not self._has_layers and self.table.agrees:
            _load(self.table.agrees)()
        self._has_layers = self._has_layers or makes_layers
        self._tell()

    # What is wrong --------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What stops a server of our model on a GPU of ours: nothing where no patch would be used."""
        if not any(r.state in (READY, APPLIED, BROKEN) for r in self.records):
            return []
        misfits = [f"{r.name}: {r.problem}" for r in self.records if r.state == BROKEN and r.problem]
        return list(dict.fromkeys([*self._mistakes(), *misfits]))

    def _mistakes(self) -> list[str]:
        """Of problems() those that are the user's to mend: variables and the profile."""
        return [text for text in (*self.settings.wrong, self.steering.problem(), self.profile.problem) if text]

    def _beginning(self, problems: list[str]) -> str:
        us = f"deepseek_v4_sm120 {report.our_version()}"
        if set(problems) <= set(self._mistakes()):
            return f"{us} cannot do what its variables ask for"
        if self._lacks_what_it_needs(problems):
            return f"{us} cannot run here"
        return f"{us} does not fit {self.release}"

    def _lacks_what_it_needs(self, problems: list[str]) -> bool:
        """Whether something of ours is not whole on this machine: then a patch may not fit for that reason alone."""
        unmet = {problem for problem in self._needs_met.values() if problem}
        return not unmet.isdisjoint(problem.partition(": ")[2] for problem in problems)

    def missing_stops(self) -> str | None:
        """In words, when no place is left in which a server could be stopped."""
        gone = [where for where in self._stops() if self._look(where, contract.Bound(), None).problem]
        if len(gone) < len(self._stops()):
            return None
        return f"no server is stopped: {self.release} has none of the places for it ({', '.join(gone)})"

    def _stops(self) -> list[str]:
        return [where for where in (self.table.resolved_at, self.table.built_at) if where]

    def _tell(self) -> None:
        """One line about all that is left out, in one process of a server."""
        problems = self.problems()
        if self._told >= set(problems):
            return
        self._told.update(problems)
        if self.settings.on_broken == "warn":
            then = "DSV4_SM120_ON_BROKEN=warn: every server starts"
        else:
            then = "A server of this model on a GPU that we serve does not start; any other runs as without us"
            then = self.missing_stops() or then
        report.write(self)
        report.warn_once(f"{self._beginning(problems)}: {'; '.join(report.by_reason(problems))}. {then}")

    def _refusal(self, problems: list[str]) -> PatchError:
        report.write(self)
        if set(problems) <= set(self._mistakes()):
            fix = "mend or unset what is named; or set DSV4_SM120_ON_BROKEN=warn to start without it"
        elif self._lacks_what_it_needs(problems):
            fix = "mend what is named; or set DSV4_SM120_ON_BROKEN=warn to run the stock code in these places"
        else:
            fix = "mend the variables; " if set(problems) & set(self._mistakes()) else ""
            fix += "use a release of deepseek_v4_sm120 that lists this version; or set "
            fix += f"DSV4_SM120_ON_BROKEN=warn{self._or_off()} to run the stock code in these places"
        return PatchError(
            f"{self._beginning(problems)}:\n  "
            + "\n  ".join(report.by_reason(problems))
            + f"\nWhat to do: {fix}; or DSV4_SM120=off to run without us."
        )

    def _or_off(self) -> str:
        """The choices that leave out all that does not fit, beside those that are made; nothing where all fits, or
        where what does not is left out by no choice."""
        misfits = [r for r in self.records if r.state == BROKEN and r.problem]
        if not misfits or any(r.patch.stays for r in misfits):
            return ""
        return f", or DSV4_SM120_SET={without((r.name for r in misfits), self.settings.choices, self.table.fixed)},"

    def _check(self, patches: Iterable[str]) -> None:
        """Decide whether these patches can be put in place, from what is on disk and in the environment alone."""
        for name in dict.fromkeys(patches):
            if name in self._checked:
                continue
            self._checked.add(name)
            group = [r for r in self.records if r.name == name and r.state == READY]
            for record in group:
                record.problem = self._examine(record)
            unread = [r.where for r in group if r.patch.only_read and not self._is_read(r)]
            if unread and not any(record.problem for record in group):
                why = f"nobody has looked at this code of {', '.join(unread)}: its fault may be mended there"
                for record in group:
                    record.state, record.reason, record.review = NOT_APPLICABLE, why, ""
            elif any(record.problem for record in group):
                if self.inherited and name not in self.inherited.left_out:
                    self.disagreements.append(
                        f"{name}: the process that started this one has it, this one cannot; all processes of a server "
                        "must run the same code"
                    )
                self._leave_out(name)
            elif group and self.inherited and name in self.inherited.left_out:
                group[0].problem = f"left out by the process that started this one: {self.inherited.left_out[name]}"
                self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        """Make a patch BROKEN as a whole, with what serves it; what of them is in place is taken back."""
        group = [r for r in self.records if r.name == name and r.state in (READY, APPLIED)]
        cause = next(r.problem for r in self.records if r.name == name and r.problem)
        servants = [r for r in self.records if r.patch.serves == name and r.state in (READY, APPLIED)]
        self._take_back([r for r in group + servants if r.state == APPLIED])
        for record in group:
            record.state, record.reason = BROKEN, record.problem or f"left out as a whole: {cause}"
        for record in servants:
            record.state, record.reason = NOT_APPLICABLE, f"serves {name}, which is {BROKEN}"

    # One target -----------------------------------------------------------------------------------------------------

    def apply(self, record: Record, module) -> None:
        """Put the replacement in place; called right after each execution of the target's module."""
        self._check([name for name in (record.name, record.patch.serves) if name])
        if record.state in (READY, APPLIED) and (problem := self._put(record, module)):
            record.problem = problem
            if self._has_layers:
                record.state, record.reason = BROKEN, problem
                raise self._refusal([f"{record.name}: {problem}", "too late to run the stock code instead"])
            self._leave_out(record.name)
        if record.state == BROKEN:
            self._check(patch.name for patch in self.table.patches)  # so that one line tells all
            self._tell()
        report.write(self)

    def _put(self, record: Record, module) -> str | None:
        """Replace one target; the problem where that cannot be done."""
        holder, attribute = _holder(module, record.target.qualname)
        if holder is None or attribute not in vars(holder):
            return f"{record.target.module} has no {record.target.qualname} after its import"
        current = vars(holder)[attribute]
        if record.name in _marks(current):
            return None
        others = [] if import_hook.is_executing(record.target.module) else _bound_elsewhere(record, current)
        if others and not record.target.rebound:
            names = ", ".join(f"{module.__name__}:{name}" for module, name in others)
            return (
                f"{record.where} was imported before our hook, and {names} has the original by name; let "
                "our folder be the first on PYTHONPATH, and import nothing of it ahead of us"
            )
        try:
            _lay(record, current, self._order)
        except Exception as error:  # ours, but raised inside an import of the host's: it stops where patches are used
            return f"{record.target.replacement}: {type(error).__name__}: {error}"
        record.holder, record.elsewhere = holder, others
        for place, name in ((holder, attribute), *others):
            setattr(place, name, record.replacement)
        record.state, record.reason = APPLIED, f"by {record.target.replacement}"
        self._order = [*(r for r in self._order if r is not record), record]
        if not self._announced:
            self._announced = True
            report.info(report.summary(self))
        return None

    def _take_back(self, records: list[Record]) -> None:
        """Restore the originals of these; patches that lie in the same places on top of them are put there again, and
        what another patch shares stays."""
        for record in records:
            applied = [r for r in self._order if r.state == APPLIED and r.holder is record.holder]
            chain = [r for r in applied if r.attribute == record.attribute]  # the lowest first
            if vars(record.holder).get(record.attribute) is not chain[-1].replacement:
                self.disagreements.append(
                    f"{record.name}: {record.where} cannot be taken back, somebody put another function on top of ours"
                )
                continue
            record.state = READY
            sharing = [r for r in chain if r is not record and r.replacement is record.replacement]
            if sharing:
                _mark(record.replacement, sharing)
                continue
            current, *above = record.original, *chain[chain.index(record) + 1 :]
            for other in above:
                _lay(other, current, above)
                current = other.replacement
            for place, name in ((record.holder, record.attribute), *record.elsewhere):
                setattr(place, name, current)

    def _examine(self, record: Record) -> str | None:
        """Check contract and needs; fills in digest and review, returns the problem."""
        target = record.target
        finding = self._look(target.where, target.contract, target.caller)
        record.digest = finding.digest
        record.review = self._review(target, finding.digest)
        if finding.problem:
            return f"{target.where}: {finding.problem}"
        if self.settings.unreviewed == "refuse" and record.review.startswith("UNREVIEWED"):
            return f"{target.where}: {record.review} (DSV4_SM120_UNREVIEWED=refuse)"
        if lacks := self._lacks(target.replacement.partition(":")[0]):
            return f"{target.where}: {lacks}"
        for need in record.patch.needs:
            if need not in self._needs_met:
                self._needs_met[need] = _attempt(need)
            if self._needs_met[need]:
                return self._needs_met[need]
        return None

    def _is_read(self, record: Record) -> bool:
        return record.digest in self.table.reviewed().of(record.where).values()

    def _review(self, target: Target, digest: str | None) -> str:
        if digest is None:
            return ""
        ledger = self.table.reviewed()
        if ledger.problem:
            return f"UNREVIEWED: {ledger.problem}"
        reviewed = ledger.of(target.where)
        if reviewed.get(self.version) == digest:
            return "reviewed"
        same = [version for version, known in reviewed.items() if known == digest]
        if same:
            return f"UNREVIEWED: nobody has looked at {self.release}; this code is that of {same[-1]}"
        known = ", ".join(reviewed) or "none"
        return (
            f"UNREVIEWED: nobody has looked at this code (digest {digest}) of {self.release}; it takes the "
            f"arguments that we expect, so it is replaced. Reviewed: {known}"
        )

    def in_place(self) -> set[str]:
        """The patches that are applied, or will be when what they replace is imported."""
        return {record.patch.name for record in self.records if record.state in (READY, APPLIED)}

    # Afterwards -----------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Once, at the first served call: list module attributes that still are an original; rewrites nothing.

        Only for functions that the target's module defines: one that it imported is replaced there on purpose, and
        stays what it is for everybody else.
        """
        applied = [r for r in self.records if r.state == APPLIED and hasattr(r.replacement, MARK)]
        originals = {id(r.original): r for r in applied if r.original.__module__ == r.target.module}
        for name, module in list(sys.modules.items()):
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                record = originals.get(id(value))
                if record is not None and value is record.original:
                    record.by_name.append(f"{name}:{attribute}")
        for record in originals.values():
            if record.by_name:
                report.warn(f"{record.name}: still the original in {', '.join(record.by_name)}")
        report.write(self)

    def undo(self) -> list[Record]:
        """Restore every original whose place still holds what we put there; returns the records left alone. The last
        first: two patches may have put theirs in one place."""
        left = []
        for record in [r for r in reversed(self.records) if r.state == APPLIED]:
            held = vars(record.holder).get(record.attribute)
            if held is record.replacement or held is record.original:  # the original: what it shared was undone before
                setattr(record.holder, record.attribute, record.original)
                record.state, record.reason = READY, "undone"
            else:
                left.append(record)
        for holder, attribute, original, ours in self._watched:
            if vars(holder).get(attribute) is ours:
                setattr(holder, attribute, original)
        return left


def _package_file(package: str) -> str:
    """The `__init__.py` of one of our packages, without importing it."""
    top, *rest = package.split(".")
    return str(Path(sys.modules[top].__file__).parent.joinpath(*rest, "__init__.py"))


def _holder(module, qualname: str) -> tuple[object, str]:
    """(module or class that holds the name, its last part); (None, ...) where a class is missing."""
    *classes, attribute = qualname.split(".")
    return functools.reduce(lambda holder, name: getattr(holder, name, None), classes, module), attribute


def _bound_elsewhere(record: Record, function) -> list[tuple[object, str]]:
    """(module, name) under which other modules have a function that the target's module defines."""
    if getattr(function, "__module__", None) != record.target.module or "." in record.target.qualname:
        return []
    return [
        (module, attribute)
        for name, module in list(sys.modules.items())
        if name != record.target.module
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]


def _lay(record: Record, current, others: list[Record]) -> None:
    """Make the record's replacement of what is in its place. One that gives that back shares it with its owner."""
    replacement = _load(record.target.replacement)(current)
    owners = [r for r in others if r is not record and (r.state, r.where) == (APPLIED, record.where)]
    owners = [r for r in owners if r.replacement is replacement is current]
    record.original, record.replacement = owners[0].original if owners else current, replacement
    _mark(replacement, [*owners, record])


def _mark(replacement, records: list[Record]) -> None:
    if callable(replacement) and not isinstance(replacement, type):
        setattr(replacement, MARK, tuple(r.name for r in records))


def _marks(function) -> list[str]:
    """The patches that put in place what is there: the last one, and those that it was put on top of."""
    found: list[str] = []
    while function is not None:
        found += getattr(function, "__dict__", {}).get(MARK) or ()
        function = getattr(function, "__wrapped__", None)
    return found


def _load(where: str):
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _attempt(need: str) -> str | None:
    """Call a need; its own words if it fails. Only RuntimeError and ImportError mean "not available"."""
    try:
        _load(need)()
    except (RuntimeError, ImportError) as error:
        return str(error)
    return None
