"""The lines of SGLang's log that `serve` and start_stage.py read are in the releases."""

import re

import pytest

from deepseek_v4_sm120.commands.serve.command import POOLS, READY, STAGES
from tests.e2e.start_stage import PARTS, parts
from tests.patching.wheels import content, every_release, fetch, members, since

FOLDERS = ("model_executor/", "model_loader/", "mem_cache/", "distributed/")
OF_OTHERS = {"Uvicorn running", "Autotuning process starts"}  # of uvicorn, of flashinfer
ELAPSED_SINCE = "0.5.14"  # "Time elapsed: ... s" before


def sources(version: str) -> str:
    start = tuple(f"sglang/srt/{folder}" for folder in FOLDERS)
    names = sorted(name for name in members(fetch(version)) if name.startswith(start) and name.endswith(".py"))
    return "\n".join(content(fetch(version), name) for name in names)


@every_release()
def test_every_stage_and_part_has_its_line(version):
    text = sources(version)
    for words, stage in STAGES:
        assert words in OF_OTHERS or words.lower() in text.lower(), (words, stage)
    if since(version, ELAPSED_SINCE):
        ends = re.findall(r'"(Load weight end|Init [\w ]+ ends)\b', text)
        assert len(set(ends)) == 2 and all(PARTS.search(f"{end}. elapsed=1.00 s") for end in ends), ends
        assert re.search(r"CUDA graph end\. \"\s+f\"elapsed=", text)


@every_release()
def test_pools_without_room_are_told_in_these_words(version):
    """The first of them in every release, the others in those that have pools of a fixed size, or count drafts."""
    text = re.sub(r'"\s+f?"', "", sources(version))
    assert [words in text for words in POOLS] == [True, since(version, "0.5.14"), since(version, "0.5.14")]


@every_release()
def test_a_server_says_that_it_is_ready(version):
    assert READY in content(fetch(version), "sglang/srt/entrypoints/http_server.py")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[TP1] Init torch distributed ends. elapsed=2.50 s, mem usage=0.1 GB", {"Init torch distributed": 2.5}),
        ("[TP1] Init parallel ends. elapsed=2.50 s", {"Init parallel": 2.5}),
        ("Capture target verify CUDA graph end. bs=[1, 2], elapsed=3.00 s", {"Capture target verify CUDA graph": 3.0}),
    ],
)
def test_a_part_under_the_name_of_its_release(line, found):
    assert parts(line) == found
