"""The review of a release: what changed in the definitions that the table replaces, and the record of who read it.

    python3 tests/patching/review.py RELEASE                      against the release before it in reviewed.json
    python3 tests/patching/review.py RELEASE --against RELEASE    against another one
    python3 tests/patching/review.py RELEASE --record             write its digests to reviewed.json and known_files/

Shows for every row of the table that is for RELEASE the unified diff of the definition, or that it is the same, new or
gone; then what else calls it, is for the reader. Needs the package `packaging`, and PyPI for wheels not fetched before.
Exit status: 0, or 1 where a row does not fit the release; such a one is not recorded.
"""

import argparse
import ast
import difflib
import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from packaging.specifiers import SpecifierSet  # noqa: E402
from packaging.version import InvalidVersion, Version  # noqa: E402

from deepseek_v4_sm120.patching import contract, known_files, ledger  # noqa: E402
from deepseek_v4_sm120.patching.spec import Target  # noqa: E402
from deepseek_v4_sm120.sglang_patches.table import KNOWN_FILES, LEDGER, TABLE  # noqa: E402
from tests.patching.wheels import WheelSources, fetch  # noqa: E402

STAND_INS = {s.name: s for s in TABLE.stand_ins}


def sources(release: str) -> WheelSources:
    packages = {name: s.package for name, s in STAND_INS.items() if is_for(s.sglang, release)}
    files = {name: str(REPO.joinpath(*package.split("."), "__init__.py")) for name, package in packages.items()}
    return WheelSources(fetch(release), files)


def is_for(specifiers: str, release: str) -> bool:
    return SpecifierSet(specifiers).contains(release, prereleases=True)


def targets(release: str) -> dict[str, Target]:
    """where -> a target of the table that is for the release; two rows may replace one definition."""
    return {t.where: t for patch in TABLE.patches for t in patch.targets if is_for(t.sglang, release)}


def elsewhere(target: Target) -> bool:
    """Whether the definition is in another wheel than SGLang's, and in no stand-in of ours."""
    top = target.module.partition(".")[0]
    return top != "sglang" and top not in STAND_INS


def digests(release: str, known: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """(where -> digest, rows that do not fit) of a release. What is in another wheel stays as it is `known`."""
    found, problems, read = {}, [], sources(release)
    for where, target in targets(release).items():
        if elsewhere(target):
            found |= {where: known[where]} if where in known else {}
            continue
        finding, _ = read.check(where, target.contract, target.caller)
        if finding.problem:
            problems.append(f"{where}: {finding.problem}")
        elif finding.digest:
            found[where] = finding.digest
    return found, problems


def of_files(release: str) -> dict:
    """What known_files/ has of a release: every row that fits, but for what is in other wheels and in files of ours."""
    read, fits, files = sources(release), {}, {}
    for target in (t for patch in TABLE.patches for t in patch.targets if is_for(t.sglang, release)):
        finding, modules = read.check(target.where, target.contract, target.caller)
        digests = {module: read.file_digest(module) for module in modules}
        if finding.problem is None and all(digests.values()):
            key = known_files.question(target.where, target.contract, target.caller)
            fits[key] = " ".join((finding.digest, *sorted(modules)))
            files |= digests
    return {"files": dict(sorted(files.items())), "fits": dict(sorted(fits.items()))}


def source_of(target: Target, release: str) -> list[str] | None:
    """The definition's lines as ast writes them, so that formatting and comments make no difference."""
    node, _ = contract.definition(target.module, target.qualname, target.contract, sources(release).parse)
    return None if node is None else ast.unparse(node).splitlines()


def show(release: str, against: str) -> None:
    for where, target in targets(release).items():
        before, after = source_of(target, against), source_of(target, release)
        if before is None or after is None:
            print(f"\n##### {where}: {'new' if after else 'not found'} in {release}")
        elif before != after:
            print(f"\n##### {where}")
            print("\n".join(difflib.unified_diff(before, after, against, release, n=5, lineterm="")))
    same = [w for w, t in targets(release).items() if source_of(t, against) == source_of(t, release) is not None]
    print(f"\nthe same as in {against}: {', '.join(same) or 'nothing'}")


def record(release: str) -> list[str]:
    """Write the release's digests to reviewed.json, in the order of releases, and what is known of its files; the rows
    that do not fit."""
    releases = {name: dict(known) for name, known in ledger.read(LEDGER).releases.items()}
    releases[release], problems = digests(release, releases.get(release, {}))
    ordered = {name: dict(sorted(releases[name].items())) for name in sorted(releases, key=Version)}
    LEDGER.write_text(json.dumps(ordered, indent=1) + "\n")
    KNOWN_FILES.mkdir(exist_ok=True)
    (KNOWN_FILES / f"{release}.json").write_text(json.dumps(of_files(release), indent=1) + "\n")
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", metavar="RELEASE")
    parser.add_argument("--against", metavar="RELEASE")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        earlier = [r for r in ledger.read(LEDGER).releases if Version(r) < Version(arguments.release)]
    except InvalidVersion as error:
        parser.error(str(error))
    if arguments.record:
        problems = record(arguments.release)
    else:
        against = arguments.against or (earlier[-1] if earlier else None)
        if against is None:
            parser.error(f"reviewed.json has no release before {arguments.release}: name one with --against")
        show(arguments.release, against)
        problems = digests(arguments.release, {})[1]
    print("\n".join(f"DOES NOT FIT  {problem}" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
