"""SGLang plugin (entry point group sglang.srt.plugins): what a scheduler's process holds, once a second in
$E2E_WATCH/<pid>.json: memory of torch's allocator on each card, and of our package the words (ZeroedWords), entries of
bounded and unbounded caches, what stands in lists, sets and dicts of its modules, and how many passes of prompts went
in halves.

$E2E_WATCH/<pid>.compiles has a line a kernel that Triton compiled or took from its folder of compiled ones:
[time.monotonic() at its end, name, did it compile, seconds].
"""

import functools
import json
import os
import sys
import threading
import time
from pathlib import Path

OURS = "deepseek_v4_sm120"
PERIOD_S = 1.0
SCHEDULER = "sglang.srt.managers.scheduler"
CONTAINERS = (dict, list, set)
_words = []  # every ZeroedWords


def of_ours():
    """The loaded modules of our package."""
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == OURS and module]


def cached(modules):
    """(entries of caches that have a limit, of those that have none); a cache that two modules name counts once."""
    found = {id(value): value for module in modules for value in list(vars(module).values())
             if hasattr(value, "cache_info")}  # fmt: skip
    infos = [value.cache_info() for value in found.values()]
    return (
        sum(i.currsize for i in infos if i.maxsize is not None),
        sum(i.currsize for i in infos if i.maxsize is None),
    )


def contained(modules):
    """{module.name: entries} of the lists, sets and dicts that stand in modules and are no constants."""
    found = {
        f"{module.__name__.removeprefix(OURS + '.')}.{name}": len(value)
        for module in modules
        for name, value in list(vars(module).items())
        if isinstance(value, CONTAINERS) and not name.isupper() and not name.startswith("__")
    }
    return {name: entries for name, entries in found.items() if entries}


def held_words(stores):
    """Streams and captures that have words, and how many of the stores' words are given out."""
    return {
        "streams": sum(len(one._by_stream) for one in stores),
        "captures": sum(len(one._captured) for one in stores),
        "given": sum(one._given for one in stores),
    }


def passes_in_halves():
    """By the note of our report; 0 of a server that has none."""
    report = sys.modules.get(f"{OURS}.patching.report")
    _, found = getattr(report, "_notes", {}).get("prompts_in_halves", (None, dict))
    return found().get("passes", 0)


def of_cards():
    """{number of a card as this process has it: [bytes that its allocator gave out, that it holds]}, of those of which
    it holds any. By their numbers: which one is the current is a thread's own, and this thread's is always the first.
    """
    import torch

    found = {
        i: [torch.cuda.memory_allocated(i), torch.cuda.memory_reserved(i)] for i in range(torch.cuda.device_count())
    }
    return {i: held for i, held in found.items() if any(held)}


def state():
    modules = of_ours()
    limited, unlimited = cached(modules)
    cards = of_cards()
    return {
        "at": time.monotonic(),
        "pid": os.getpid(),
        "allocated": sum(allocated for allocated, _ in cards.values()),
        "cards": cards,
        "words": held_words(list(_words)),
        "cached": limited,
        "cached_without_limit": unlimited,
        "contained": contained(modules),
        "halves": passes_in_halves(),
    }


def write(folder):
    path = folder / f"{os.getpid()}.json"
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(state()))
    draft.replace(path)


def keep_writing(folder):
    import torch

    while True:
        time.sleep(PERIOD_S)
        if SCHEDULER in sys.modules and torch.cuda.is_initialized():
            write(folder)


def note_compiles(folder):
    """Behind whoever listens already."""
    from triton import knobs

    before, path = knobs.compilation.listener, folder / f"{os.getpid()}.compiles"

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        if before is not None:
            before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        seconds = getattr(times, "total", 0) / 1e6
        with open(path, "a") as file:
            file.write(json.dumps([time.monotonic(), metadata.get("name"), not cache_hit, seconds]) + "\n")

    knobs.compilation.listener = listen


def note_words():
    from deepseek_v4_sm120.ops.shared.zeroed_words import ZeroedWords

    original = ZeroedWords.__init__

    @functools.wraps(original)
    def init(self, *arguments, **named):
        original(self, *arguments, **named)
        _words.append(self)

    ZeroedWords.__init__ = init


def register():
    folder = Path(os.environ["E2E_WATCH"])
    folder.mkdir(parents=True, exist_ok=True)
    note_compiles(folder)
    if any((Path(entry) / OURS / "__init__.py").exists() for entry in sys.path):  # stock's servers lack us
        note_words()
    threading.Thread(target=keep_writing, args=(folder,), name="engine watch", daemon=True).start()
