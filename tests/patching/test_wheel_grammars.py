"""Grammars of many schemas: each release's own table with our bound and without, and how it makes XGrammar's."""

import inspect
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.sglang_patches.fixes import grammars
from deepseek_v4_sm120.sglang_patches.rows.scheduler import GRAMMAR_BACKEND, XGRAMMAR
from tests.patching.test_wheel_wo_a import take
from tests.patching.wheels import content, every_release, fetch

MANY = 3 * grammars.KEPT


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(grammars, "is_ours", lambda: True)


class Grammar:
    def copy(self):
        return self

    def maybe_init_reasoning(self, require_reasoning):
        pass


def backend(version, *, ours):
    """The release's table of grammars, over stand-ins."""
    module, _, kind = GRAMMAR_BACKEND.partition(":")
    methods = ("__init__", "set_cache", "get_cached_or_future_value", "reset")
    taken = {name: take(fetch(version), {}, f"{kind}.{name}", module) for name in methods}
    if ours:
        taken["set_cache"] = grammars.replace_set_cache(taken["set_cache"])
    return type(kind, (), {**taken, "_init_value_dispatch": None})()


def key(number):
    return "json", f'{{"enum": ["order {number}"]}}'


@every_release()
def test_what_was_set_first_is_forgotten_first(version):
    without, ours = (backend(version, ours=ours) for ours in (False, True))
    for one in (without, ours):
        for number in range(MANY):
            one.set_cache(key(number), Grammar())
            one.set_cache(key(number), Grammar())  # again: by a second request that waited for it
    assert len(without.cache) == MANY  # so they grow with the schemas that were asked for
    assert list(ours.cache) == [key(number) for number in range(MANY - grammars.KEPT, MANY)]
    is_known = [ours.get_cached_or_future_value(key(number), False)[1] for number in (0, MANY - 1)]
    assert is_known == [False, True]


@every_release()
def test_a_rank_that_forgets_waits_for_one_that_does_not(version):
    """Why a server whose hosts do not all have us is stopped (several_hosts.py): a schema that one rank has forgotten
    is compiled there, and its being ready is told in an exchange, of which a rank that has it still knows nothing."""
    ranks = [backend(version, ours=ours) for ours in (True, True, False)]
    for one in ranks:
        for number in range(grammars.KEPT + 1):
            one.set_cache(key(number), Grammar())
        one._init_value_dispatch = one.executor = SimpleNamespace(submit=lambda *_, **__: "compiles")
    assert [one.get_cached_or_future_value(key(0), False)[1] for one in ranks] == [False, False, True]


@every_release()
def test_the_compiler_is_made_by_the_name_that_we_replace(version):
    text = content(fetch(version), f"{XGRAMMAR.replace('.', '/')}.py")
    made = [line.strip() for line in text.splitlines() if " GrammarCompiler(" in line]
    assert made and all("cache_limit_bytes" not in line for line in made)
    assert "self.grammar_compiler = GrammarCompiler(tokenizer_info=tokenizer_info)" in made


def test_the_compiler_has_a_bound_unless_another_was_asked_for(monkeypatch):
    class GrammarCompiler:
        def __init__(self, tokenizer_info, *, cache_enabled=True, cache_limit_bytes=-1):
            self.told = tokenizer_info, cache_enabled, cache_limit_bytes

    compiler = grammars.replace_compiler(GrammarCompiler)
    assert compiler(tokenizer_info=1, cache_enabled=False).told == (1, False, grammars.COMPILED_BYTES)
    assert compiler(1, cache_limit_bytes=5).told == (1, True, 5) and isinstance(compiler(1), GrammarCompiler)
    assert inspect.unwrap(compiler) is GrammarCompiler
    monkeypatch.setattr(grammars, "is_ours", lambda: False)
    of_others = backend("0.5.23", ours=True)
    for number in range(MANY):
        of_others.set_cache(key(number), Grammar())
    assert len(of_others.cache) == MANY
    assert compiler(1).told == (1, True, -1)
