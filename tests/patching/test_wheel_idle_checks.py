"""An idle server's look through its prefix cache: each release's own, with ours and without."""

import ast
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from deepseek_v4_sm120.sglang_patches.fixes import idle_checks as fix
from deepseek_v4_sm120.sglang_patches.rows.scheduler import IDLE_CHECKS, SCHEDULER
from tests.patching.test_wheel_wo_a import definition, take
from tests.patching.wheels import every_release, since


def place(version):
    return IDLE_CHECKS.targets[since(version, "0.5.13")].where


def looked(wheel, where, *, ours, monkeypatch):
    """How often the tree was looked through."""
    module, _, name = where.partition(":")
    found, asked = [], {"envs": SimpleNamespace(SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK=SimpleNamespace(get=bool))}
    check = take(wheel, asked, name, module)
    monkeypatch.setattr(fix, "is_ours", lambda: ours)
    tree = SimpleNamespace(
        sanity_check=lambda: found.append(True),
        **dict.fromkeys(("is_tree_cache", "supports_swa", "supports_prefix_sharing"), lambda: True),
    )
    replaced = fix.replace_check(check)
    assert replaced(SimpleNamespace(tree_cache=tree, is_hybrid_swa=True, is_hybrid_ssm=False)) is None
    return len(found)


@every_release()
def test_an_idle_server_does_not_look_through_its_prefix_cache(version, sglang_wheel, monkeypatch):
    wheel, mended = sglang_wheel(version), since(version, "0.5.19")
    where = place(version)
    assert looked(wheel, where, ours=True, monkeypatch=monkeypatch) == 0
    assert looked(wheel, where, ours=False, monkeypatch=monkeypatch) == (0 if mended else 1), "SGLang alone"


@every_release()
def test_the_books_are_checked_beside_it(version, sglang_wheel):
    """Pools and requests by others of SGLang's functions, in front of it."""
    module, _, name = (SCHEDULER if since(version, "0.5.13") else place(version)).partition(":")
    owner = name.partition(".")[0]
    text = ast.unparse(definition(sglang_wheel(version), f"{owner}.on_idle", module))
    assert 0 < text.index("_check_all_pools(") < text.index("_check_tree_cache()")


@pytest.mark.parametrize(("release", "asked"), [("0.5.12", 1), ("0.5.13", 1), ("0.5.18", 1), ("0.5.19", 0)])
def test_it_is_mended_where_sglang_does_it(release, asked):
    assert sum(release in SpecifierSet(target.sglang) for target in IDLE_CHECKS.targets) == asked
