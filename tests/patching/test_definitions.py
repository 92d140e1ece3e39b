"""wheels.definition: a function's own lines are what the whole file's tree has of it, at the same places."""

import ast
import os

import pytest

from deepseek_v4_sm120.patching import contract
from tests.patching.wheels import RELEASES, WheelSources, content, definition, fetch, lines_of, members

TEXT = '''
import one, two as renamed


@decorated(
    by=[1],
)
# a comment
@again
def plain(
    a,
) -> int:
    """Of several
    lines."""

    def inner(): ...

    # less deep
# not deep at all
    return inner


class Both(plain):
    kept = 1

    @property
    def of_two(self):
        return 1

    @of_two.setter
    def of_two(self, value): ...

    async def method(self):
        return plain(kept=2)

    def last(self): return {
    }
SQL = """
def within(): ...
"""

def within():
    text = """
back to the margin
"""
    return text


if SQL:
    def conditional(): ...
else:
    from three import conditional
'''
BY_LINES = ("plain", "Both", "Both.method", "Both.last", "absent", "Both.absent")
BY_THE_WHOLE = ("within", "conditional", "Both.of_two", "Both.kept", "SQL", "renamed", "one", "Both.plain")


def dumped(node):
    return None if node is None else ast.dump(node, include_attributes=True)


@pytest.mark.parametrize("name", [*BY_LINES, *BY_THE_WHOLE])
def test_it_is_as_in_the_whole_tree_or_left_to_it(name):
    lines = lines_of(TEXT, name)
    assert (lines is None) == (name in BY_THE_WHOLE)
    expected = contract.find_definition(ast.parse(TEXT), name)
    assert (expected is None) == (name in ("absent", "Both.absent", "Both.plain"))
    if lines is not None:
        assert dumped(contract.find_definition(lines, name)) == dumped(expected)


@pytest.mark.parametrize(
    "again", ["plain = 1", "other, plain = 1, 2", "import plain", "from x import (\n    plain,\n)"]
)
def test_what_is_bound_once_more_is_the_whole_trees(again):
    assert lines_of(TEXT + again, "plain") is None


def test_of_a_releases_own_files():
    wheel = fetch(RELEASES[-1])
    names = {
        "managers.scheduler": "Scheduler.abort_request",
        "models.deepseek_v4": "DeepseekV4ForCausalLM.load_weights",
    }
    for module, name in (names | {"utils.common": "get_available_gpu_memory"}).items():
        found = definition(wheel, f"sglang.srt.{module}", name)
        whole = ast.parse(WheelSources(wheel).read(f"sglang.srt.{module}"))
        assert dumped(found) == dumped(contract.find_definition(whole, name)) is not None


def test_forks_read_of_a_release_at_places_of_their_own():
    wheel = fetch(RELEASES[-1])
    names = sorted(m for m in members(wheel) if m.startswith("sglang/srt/managers/"))
    expected, forks = [content(wheel, name) for name in names], []
    for _ in range(3):
        forks.append(os.fork())
        if not forks[-1]:
            try:
                same = all([content(wheel, name) for name in names] == expected for _ in range(3))
            except BaseException:
                same = False
            os._exit(not same)
    assert [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks] == [0] * 3
