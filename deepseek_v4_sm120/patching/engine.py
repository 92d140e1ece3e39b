"""version -> target -> contract -> needs -> setattr -> record. Knows neither the host nor our kernels."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_v4_sm120 import device_gate
from deepseek_v4_sm120.patching import contract, import_hook, profile, report
from deepseek_v4_sm120.patching.sources import Sources, package_version
from deepseek_v4_sm120.patching.spec import Patch, PatchError, StandIn, Table, Target
from deepseek_v4_sm120.patching.steering import ON, Steering
from deepseek_v4_sm120.settings import Settings

READY = "READY"  # fits; waits for the host to import the module
APPLIED = "APPLIED"
NOT_APPLICABLE = "NOT APPLICABLE"  # not for this mode or this host version: quiet
UNSUPPORTED = "UNSUPPORTED"  # a host version that we do not know: one warning, stock code runs
OFF = "OFF"  # DSV4_SM120=off
BROKEN = "BROKEN"  # in range, but it does not fit or cannot load: raises, or warns with DSV4_SM120_ON_BROKEN=warn

MARK = "__deepseek_v4_sm120__"  # on every function that we put in place: the patch's name


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
    by_name: list[str] = field(default_factory=list)  # module attributes that still hold the original

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
        self.unparsable = version_files.problems  # sentences; what a target's file has is in the target's record
        self.stand_ins = [s for s in table.stand_ins if self._version_is_known() and self._in_range(s.sglang)]
        self.sources = Sources({s.name: _package_file(s.package) for s in self.stand_ins})
        operators = tuple(dict.fromkeys(patch.serves or patch.name for patch in table.patches))
        self.steering = Steering(table.settings, settings, self._has_setting, operators)
        self.profile = profile.consult(settings.profile, self.version)
        self.records = [record for patch in table.patches for record in self._select(patch)]
        self._announced = False
        self._warned: set[str] = set()  # each reason is told once
        self._needs_met: dict[str, str | None] = {}  # "module:function" -> None, or why it failed

    # Selection ------------------------------------------------------------------------------------------------------

    def _select(self, patch: Patch) -> list[Record]:
        if self.settings.off:
            return [Record(patch, None, OFF, "DSV4_SM120=off")]
        name = patch.serves or patch.name
        asked = self.settings.choices.get(name)
        if asked == "off":
            return [Record(patch, None, OFF, f"DSV4_SM120_SET={name}=off")]
        against = self.profile.against(name)
        if self.sources.path(self.host) is None:
            return [Record(patch, None, NOT_APPLICABLE, f"{self.host} is not on this interpreter's path")]
        if self.settings.mode not in patch.modes:
            wanted = " or ".join("normal use" if m == "sm120" else f"DSV4_SM120_FORCE={m}" for m in patch.modes)
            return [Record(patch, None, NOT_APPLICABLE, f"only in {wanted}")]
        if self.version is not None and not self._in_range(self.table.supported):
            reason = (
                f"{self.host} {self.version} is outside of what this release knows ({self.table.supported}): "
                f"the stock code runs. Use a newer release of deepseek_v4_sm120, or an older {self.host}"
            )
            return [Record(patch, None, UNSUPPORTED, reason)]
        if patch.setting and self.steering.state(patch.setting) != ON:
            return [Record(patch, None, NOT_APPLICABLE, f"only in DSV4_SM120_SET={patch.setting}=on")]
        if against is not None and asked != "on":
            return [Record(patch, None, NOT_APPLICABLE, against)]
        targets = self._targets(patch)
        if not targets and self._version_is_known():
            why = f": {patch.absent}" if patch.absent else ""
            return [Record(patch, None, NOT_APPLICABLE, f"{self.host} {self.version} has no such place{why}")]
        if not targets:
            reason = f"{self.host} does not tell its version, and no place of it fits {patch.name}: the stock code runs"
            return [Record(patch, None, UNSUPPORTED, reason)]
        why = f"; DSV4_SM120_SET={name}=on, although {against}" if against else ""
        return [Record(patch, t, READY, f"when {self.host} imports it{why}") for t in targets]

    def _has_setting(self, specifiers: str) -> bool:
        """Settings are for versions that we know: a tree that does not tell its version gets none."""
        return self._version_is_known() and self._in_range(self.table.supported) and self._in_range(specifiers)

    def _version_is_known(self) -> bool:
        return self.version is not None and not self.version.startswith("0.0.0")  # 0.0.0.devN: a checkout without tags

    def _in_range(self, specifiers: str) -> bool:
        if not self._version_is_known():
            return True
        try:
            from packaging.specifiers import SpecifierSet
        except ImportError as error:
            raise PatchError(
                f"deepseek_v4_sm120: {sys.executable} finds {self.host} {self.version} but not the package `packaging`,"
                f" which {self.host} itself requires; install it with: {sys.executable} -m pip install packaging"
            ) from error
        return SpecifierSet(specifiers).contains(self.version, prereleases=True)

    def _targets(self, patch: Patch) -> list[Target]:
        """By version; by what is on disk in a tree that does not tell its version, and for a pre-release that lies
        between two ranges (0.5.13.dev5 is neither <0.5.13 nor >=0.5.13)."""
        if not self._version_is_known():
            return self._fitting(patch)
        by_version = [t for t in patch.targets if self._in_range(t.sglang)]
        if by_version or not self._is_between_ranges(patch):
            return by_version
        return self._fitting(patch) or [t for t in patch.targets if self.sources.path(t.module) is not None]

    def _is_between_ranges(self, patch: Patch) -> bool:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        version = Version(self.version)
        released = [t for t in patch.targets if SpecifierSet(t.sglang).contains(version.base_version)]
        return version.is_prerelease and bool(released)

    def _fitting(self, patch: Patch) -> list[Target]:
        return [t for t in patch.targets if self._check(t).problem is None]

    def _check(self, target: Target) -> contract.Finding:
        return contract.check(target.where, target.contract, target.caller, self.sources.parse)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hook every chosen target and the preflight."""
        self.steering.start(os.environ)
        device_gate.on_first_served(self.audit)
        for stand_in in self.stand_ins:
            import_hook.provide(stand_in.name, _package_file(stand_in.package), self._condition(stand_in))
        for record in self.records:
            if record.state == READY:
                import_hook.on_import(record.target.module, lambda module, record=record: self.apply(record, module))
        import_hook.on_import(self.table.preflight, lambda module: self.preflight())
        report.start(self)

    def _condition(self, stand_in: StandIn) -> Callable[[], bool]:
        def holds() -> bool:
            return stand_in.only_after in sys.modules and _load(stand_in.condition)()

        return holds

    def preflight(self) -> None:
        """Before the host starts to work: check every row on disk, load what they need; BROKEN stops it now."""
        import_hook.fire_missed()
        problems = [problem for problem in (self.steering.problem(), self.profile.problem) if problem]
        for record in self.records:
            if record.state == READY:
                problem = self._examine(record)
                if problem:
                    problems.append(self._broken(record, problem))
        self.sources.forget()
        told = [r.reason for r in self.records if r.state == UNSUPPORTED] + self.profile.warnings + self.unparsable
        unreviewed = [r for r in self.records if r.state != BROKEN and r.review.startswith("UNREVIEWED")]
        told += [f"{r.patch.name}: {r.review}" for r in unreviewed]
        for text in dict.fromkeys(told):
            if text not in self._warned:
                self._warned.add(text)
                report.warn(text)
        report.write(self)
        self._fail(problems)

    def survey(self) -> list[Record]:
        """The records after checking everything on disk, as the preflight does it; nothing is raised or patched."""
        for record in self.records:
            if record.state == READY:
                problem = self._examine(record)
                if problem:
                    self._broken(record, problem)
        self.sources.forget()
        return self.records

    # One target -----------------------------------------------------------------------------------------------------

    def apply(self, record: Record, module) -> None:
        """Put the replacement in place; called right after each execution of the target's module."""
        problem = None
        holder = module
        for name in record.target.qualname.split(".")[:-1]:
            holder = getattr(holder, name, None)
        current = vars(holder).get(record.attribute) if holder is not None else None
        if record.patch.name in _marks(current):
            return
        if holder is None or record.attribute not in vars(holder):
            problem = f"{record.target.module} has no {record.target.qualname} after its import"
        problem = problem or self._examine(record)
        if problem:
            self._fail([self._broken(record, problem)])
            return
        replacement = _load(record.target.replacement)(current)
        if callable(replacement) and not isinstance(replacement, type):
            setattr(replacement, MARK, record.patch.name)
        setattr(holder, record.attribute, replacement)
        record.holder, record.original, record.replacement = holder, current, replacement
        record.state, record.reason = APPLIED, f"by {record.target.replacement}"
        if not self._announced:
            self._announced = True
            report.info(report.summary(self))
        report.write(self)

    def _examine(self, record: Record) -> str | None:
        """Check contract and needs; fills in digest and review, returns the problem."""
        target = record.target
        finding = self._check(target)
        record.digest = finding.digest
        record.review = self._review(target, finding.digest)
        if finding.problem:
            return f"{target.where}: {finding.problem}"
        for need in record.patch.needs:
            if need not in self._needs_met:
                self._needs_met[need] = _attempt(need)
            if self._needs_met[need]:
                return self._needs_met[need]
        return None

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
            return f"UNREVIEWED: nobody has looked at {self.host} {self.version}; this code is that of {same[-1]}"
        known = ", ".join(reviewed) or "none"
        return (
            f"UNREVIEWED: nobody has looked at this code (digest {digest}) of {self.host} {self.version}; it takes the "
            f"arguments that we expect, so it is replaced. Reviewed: {known}"
        )

    def _broken(self, record: Record, problem: str) -> str:
        record.state, record.reason = BROKEN, problem
        return f"{record.patch.name}: {problem}"

    def _fail(self, problems: list[str]) -> None:
        if self.settings.on_broken == "warn":
            problems = [problem for problem in problems if problem not in self._warned]
            self._warned.update(problems)
        if not problems:
            return
        text = (
            f"deepseek_v4_sm120 {report.our_version()} does not fit {self.host} {self.version}:\n  "
            + "\n  ".join(problems)
            + "\nWhat to do: use a release of deepseek_v4_sm120 that lists this version; or set"
            " DSV4_SM120_ON_BROKEN=warn to run the stock code in these places; or DSV4_SM120=off to run without us."
        )
        report.write(self)
        if self.settings.on_broken == "warn":
            report.warn(text)
        else:
            raise PatchError(text)

    def setting_rows(self) -> list[dict]:
        """The settings for reports; `moot` is the patch that makes one that is off superfluous here, or None."""
        in_place = {record.patch.name for record in self.records if record.state in (READY, APPLIED)}
        rows = self.steering.as_rows()
        for row in rows:
            replacing = self.steering.rows[row["setting"]].moot_with if row["setting"] in self.steering.rows else None
            row["moot"] = replacing if replacing in in_place and row["state"] == OFF else None
            if row["moot"]:
                row["reason"] = f"{replacing} runs in its place"
        return rows

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
                report.warn(f"{record.patch.name}: still the original in {', '.join(record.by_name)}")
        report.write(self)

    def undo(self) -> list[Record]:
        """Restore every original whose place still holds what we put there; returns the records left alone. The last
        first: two patches may have put theirs in one place."""
        left = []
        for record in [r for r in reversed(self.records) if r.state == APPLIED]:
            if vars(record.holder).get(record.attribute) is record.replacement:
                setattr(record.holder, record.attribute, record.original)
                record.state, record.reason = READY, "undone"
            else:
                left.append(record)
        return left


def _package_file(package: str) -> str:
    """The `__init__.py` of one of our packages, without importing it."""
    top, *rest = package.split(".")
    return str(Path(sys.modules[top].__file__).parent.joinpath(*rest, "__init__.py"))


def _marks(function) -> list[str]:
    """The patches that put in place what is there: the last one, and those that it was put on top of."""
    found = []
    while function is not None:
        found.append(getattr(function, "__dict__", {}).get(MARK))
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
