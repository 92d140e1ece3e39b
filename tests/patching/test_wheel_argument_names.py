"""Calls whose arguments have blanks in their names, read by the reader of each release that has deepseek-recipe."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patching.recipe_calls_read import CASES, TEXT
from tests.patching.wheels import every_release

REPO = Path(__file__).resolve().parents[2]
with_recipe = every_release("0.5.23")
SAME = ("no blank",)


@functools.cache
def read(version: str) -> dict:
    command = [sys.executable, "-m", "tests.patching.recipe_calls_read", version]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@with_recipe
@pytest.mark.parametrize("which", ["ours", "with cut_characters"])
def test_the_arguments_have_their_names(version, which):
    """Whatever the steps, and in their order."""
    for case, wanted in CASES.items():
        for way, (text, arguments) in read(version)[which][case].items():
            assert text == TEXT, (case, way)
            assert list(json.loads(arguments).items()) == list(wanted.items()), (case, way)


@with_recipe
def test_sglangs_are_no_json(version):
    """So the row is needed."""
    for case, ways in read(version)["stock"].items():
        for _, arguments in ways.values():
            if case in SAME:
                assert json.loads(arguments) == CASES[case]
            else:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(arguments)


@with_recipe
def test_elsewhere_and_without_calls_it_stays_sglangs(version):
    found = read(version)
    assert found["elsewhere"] == found["stock"]
    assert found["ours, no calls"] == found["stock, no calls"]
    assert all(found["ours"][case] == found["stock"][case] for case in SAME)
