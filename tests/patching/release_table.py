"""docs/releases.md, from the table of patches and the ledger of what was reviewed; dates are those of the wheels.

    python3 tests/patching/release_table.py            write it
    python3 tests/patching/release_table.py --check    say whether it is as it would be written; exit status 1 if not

Needs the package `packaging`, and PyPI for wheels not fetched before.
"""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from deepseek_v4_sm120.patching import ledger  # noqa: E402
from deepseek_v4_sm120.patching.spec import Patch  # noqa: E402
from deepseek_v4_sm120.sglang_patches.table import LEDGER, TABLE  # noqa: E402
from tests.patching.review import is_for  # noqa: E402
from tests.patching.wheels import RELEASES, built  # noqa: E402

PAGE = REPO / "docs/releases.md"
REVIEWED, UNREVIEWED, ABSENT = "reviewed", "UNREVIEWED", "not there"
MARKS = {REVIEWED: "yes", UNREVIEWED: "UNREVIEWED", ABSENT: "-"}
HEAD = """# SGLang releases

Written by `python3 tests/patching/release_table.py`; a test says when it is stale. The date is that on which the
release's wheel was packed. "{reviewed}": the patch is there, a human read all of its places in that release, and what
was read is what the wheel has (tests/patching/test_wheels.py); "{UNREVIEWED}": nobody did, then it is applied if it
fits and one warning tells it; "{not there}": SGLang's own code runs, and the last column says why. So it does below
0.5.12 and from 0.6 on. A build of between two releases (0.5.24.dev7) and a tree that names none (0.0.0.dev1, a
checkout without tags) get the rows of the release whose definitions are most like theirs, each patch whole; a mended
fault's fix is left out where the fault may be mended; a tree that names none keeps SGLang's defaults.
"""


def state(patch: Patch, release: str) -> str:
    known = ledger.read(LEDGER).releases[release]
    wheres = [target.where for target in patch.targets if is_for(target.sglang, release)]
    if not wheres:
        return ABSENT
    return REVIEWED if all(where in known for where in wheres) else UNREVIEWED


def page() -> str:
    shown = [patch for patch in TABLE.patches if "sm120" in patch.modes]
    rows = [["", *RELEASES, "where not"], ["wheel of", *map(built, RELEASES), ""]]
    for patch in shown:
        states = [state(patch, release) for release in RELEASES]
        rows.append([f"`{patch.name}`", *map(MARKS.__getitem__, states), patch.absent if ABSENT in states else ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] + [0]  # the last is prose
    lines = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))} |" for row in rows]
    lines.insert(1, f"|{'|'.join('-' * (max(w, 3) + 2) for w in widths)}|")
    return "\n".join([HEAD.format(**MARKS), *lines]) + "\n"


def main(argv: list[str]) -> int:
    text = page()
    if argv == ["--check"]:
        is_current = PAGE.is_file() and PAGE.read_text() == text
        print(f"{PAGE.relative_to(REPO)} is {'as the table and the ledger say' if is_current else 'stale'}")
        return 0 if is_current else 1
    if argv:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(REPO)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
