"""Which targets are for the host found here: by the version that it tells, and by what is on disk where that decides
nothing: a tree that tells no release, a build of ahead of the first one, one of between two."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepseek_v4_sm120.patching.sources import tells_release
from deepseek_v4_sm120.patching.spec import Patch, PatchError, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.version import Version

    from deepseek_v4_sm120.patching.contract import Finding


class HostVersion:
    """told: what the host says, None where it says nothing. look: what checking a target on disk gives."""

    def __init__(self, host: str, told: str | None, table: Table, look: Callable[[Target], Finding]):
        self.host = host
        self.told = told
        self.is_told = tells_release(told)
        self._table = table
        self._look = look
        self._ranges: dict[str, bool] = {}  # specifiers -> whether what is told is in them

    def __str__(self) -> str:
        return f"{self.host} {self.told}" if self.told else f"{self.host} (which tells no version)"

    def is_known_in(self, specifiers: str) -> bool:
        """Defaults and stand-ins are for versions that we know: a tree that does not tell its version gets none."""
        return self.is_told and self._in_range(self._table.supported) and self._in_range(specifiers)

    def is_supported(self, patch: Patch) -> bool:
        """In range, or untold; or a build of ahead of the first release, where it has all that the patch needs."""
        is_in_range = not self.is_told or self._in_range(self._table.supported)
        return is_in_range or (self._is_early_build() and bool(self._fitting(patch, self._begins(patch))))

    def targets(self, patch: Patch) -> list[Target]:
        """Those that are for this host; of what lies between two ranges (0.5.13.dev5 is neither <0.5.13 nor >=0.5.13)
        the later ones or the earlier ones, as a whole, by what fits what is on disk, the likelier first."""
        if not self.is_told:
            return self._fitting(patch, self._candidates(patch))
        if self._is_early_build():
            return self._fitting(patch, self._begins(patch))
        version, release = _version(self.told), _version(_version(self.told).base_version)
        if version >= release:
            return [t for t in patch.targets if self._in_range(t.sglang)]
        after, before = self._of(patch, release), self._of(patch, self._ahead_of(release, patch))
        if after == before or not after:
            return after
        is_later = self.like is None or _version(self.like) >= release
        order = (after, before) if is_later else (before, after)
        fitting = next((targets for targets in order if self._fit(targets)), None)
        return fitting if fitting is not None else self._fitting(patch, self._begins(patch)) or after

    def may_have(self, patch: Patch) -> bool:
        """Of a tree that tells no release: whether one that it may be of has a place for the patch."""
        return any(self._of(patch, release) for release in self._candidates(patch))

    @functools.cached_property
    def is_ahead(self) -> bool:
        """Whether it is, or may be, later than all that was reviewed."""
        version, reviewed = self.told if self.is_told else self.like, self._table.reviewed().releases
        if version is None or not reviewed:
            return False
        self._specifiers("")  # says so where `packaging` is missing
        newest = max(map(_version, reviewed))
        return _version(version) > newest or (not self.is_told and _version(version) == newest)

    @property
    def like(self) -> str | None:
        """The reviewed release that shares most of its definitions with what is on disk; None where none shares any."""
        best = max(self._shared.values(), default=0)
        return [release for release, share in self._shared.items() if share == best][-1] if best else None

    @functools.cached_property
    def _shared(self) -> dict[str, float]:
        """Reviewed release -> which part of its definitions is on disk as it has them."""
        where = {t.where: t for patch in self._table.patches for t in patch.targets if self._is_of_host(t.where)}
        here = {name: self._look(target).digest for name, target in where.items()}
        shared = {}
        for release, known in self._table.reviewed().releases.items():
            same = [here.get(name) == digest for name, digest in known.items() if self._is_of_host(name)]
            shared[release] = sum(same) / max(len(same), 1)
        return shared

    def _is_of_host(self, where: str) -> bool:
        return where.partition(":")[0].partition(".")[0] == self.host

    def _candidates(self, patch: Patch) -> list[Version]:
        """Releases that a tree which tells none may be of, as far as the patch goes, the likeliest first. It may be
        ahead of what it is like: what the release behind that has no place for, its fault mended, is not tried."""
        begins = self._begins(patch)
        if self.like is None:
            return begins
        like, is_it = _version(self.like), self._shared[self.like] == 1
        major, minor, micro, *_ = (*like.release, 0, 0)
        is_kept = self._of(patch, like) and (is_it or self._of(patch, _version(f"{major}.{minor}.{micro + 1}")))
        newer, older = [b for b in reversed(begins) if b > like and not is_it], [b for b in begins if b < like]
        return [like, *newer, *older] if is_kept else newer

    def _fitting(self, patch: Patch, releases: Iterable[Version]) -> list[Target]:
        """The targets of the first of these releases for which every one of them fits what is on disk."""
        each = (self._of(patch, release) for release in releases)
        return next((targets for targets in each if targets and self._fit(targets)), [])

    def _fit(self, targets: list[Target]) -> bool:
        return all(self._look(target).problem is None for target in targets)

    def _of(self, patch: Patch, release: Version) -> list[Target]:
        return [t for t in patch.targets if self._specifiers(t.sglang).contains(release, prereleases=True)]

    def _begins(self, patch: Patch) -> list[Version]:
        return self._borders(patch, (">=", "==", "~="))

    def _ahead_of(self, release: Version, patch: Patch) -> Version:
        """A release of right ahead of this one, as far as the patch's ranges tell them apart."""
        return next((border for border in self._borders(patch) if border < release), _version("0"))

    def _borders(self, patch: Patch, operators: tuple[str, ...] = (">=", "==", "~=", "<", "<=", ">")) -> list[Version]:
        texts = (self._table.supported, *(t.sglang for t in patch.targets))
        found = {_version(s.version) for text in texts for s in self._specifiers(text) if s.operator in operators}
        return sorted(found, reverse=True)

    def _is_early_build(self) -> bool:
        version = _version(self.told)
        first = [s.version for s in self._specifiers(self._table.supported) if s.operator == ">="]
        return version.is_devrelease and any(version < _version(begin) for begin in first)

    def _in_range(self, specifiers: str) -> bool:
        if specifiers not in self._ranges:  # a table asks the same hundreds of times
            self._ranges[specifiers] = self._specifiers(specifiers).contains(self.told, prereleases=True)
        return self._ranges[specifiers]

    def _specifiers(self, text: str):
        try:
            from packaging.specifiers import SpecifierSet
        except ImportError as error:
            raise PatchError(
                f"deepseek_v4_sm120: {sys.executable} finds {self} but not the package `packaging`, which {self.host} "
                f"itself requires; install it with: {sys.executable} -m pip install packaging"
            ) from error
        return _set_of(SpecifierSet, text)


@functools.cache  # a table asks the same hundreds of times
def _set_of(kind: type, text: str):
    return kind(text)


def _version(text: str) -> Version:
    from packaging.version import Version

    return Version(text)
