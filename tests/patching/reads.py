"""What adapters and fixes read of SGLang's objects in the newest release that was reviewed, as reads.json has it: an
engine that meets a later one asks whether all of it is still there.

python3 -m tests.patching.reads    writes it
"""

import json
import re

from deepseek_v4_sm120.sglang_patches.table import READS
from tests.patching import attributes
from tests.patching import test_wheel_attributes as known
from tests.patching.wheels import RELEASES

NEWEST = RELEASES[-1]


def place(where: str) -> str:
    """ "module:Class", or "module" where it is no class's: of "module:Class.method(parameter)", too."""
    module, _, qualname = where.removeprefix(known.TEXT_OF).partition(":")
    name = re.match(r"\w*", qualname)[0]
    return f"{module}:{name}" if name else module


def of_newest() -> dict[str, list[list[str]]]:
    """Module with a patch's replacements -> [name, place, ..]: the name is in the text of one of these places' modules.
    Without what is only read where another name is there, and what a base of another module has."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for adapter in (one for one in known.FILES if known.has_rows(one, NEWEST)):
        owner = known.SERVES.get(adapter, adapter)
        entries = found.setdefault(f"{attributes.FILES[owner][0]}.{owner}", set())
        for read in (one for one in attributes.reads(adapter) if one.required):
            if (adapter, read.of, read.name) in known.GUARDED:
                continue
            for places in known.kinds_in(NEWEST, adapter, read):
                having = {place(where) for where in places if known.defined(NEWEST, where, read.name)}
                texts = {one: known.release(NEWEST).text(one.partition(":")[0]) for one in having}
                entries.add(
                    (read.name, *sorted(o for o, text in texts.items() if re.search(rf"\b{read.name}\b", text)))
                )
    return {
        module: sorted(map(list, (e for e in each if len(e) > 1))) for module, each in sorted(found.items()) if each
    }


def text() -> str:
    lines = [
        f" {json.dumps(module)}: [\n  " + ",\n  ".join(map(json.dumps, entries)) + "\n ]"
        for module, entries in of_newest().items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    READS.write_text(text())
