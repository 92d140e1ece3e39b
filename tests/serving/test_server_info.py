"""What /server_info tells, release by release: nothing of it makes two equal servers differ, and the stand-in's is as
real.
"""

from __future__ import annotations

import ast

from bench.serving.identity import NOT_FLAGS
from tests.patching import wheels
from tests.patching.wheels import RELEASES, every_release, fetch, members, tree
from tests.serving import fake_info

FUNCTIONS = {
    "sglang.srt.entrypoints.http_server": "server_info",
    "sglang.srt.managers.scheduler": "get_init_info",
    "sglang.srt.utils.common": "build_server_info",  # 0.5.22 and later
}
# not of the arguments, and equal where the servers are
EQUAL = {"frontend", "hicache_object_layout"}
# ports of another server, whose choice is a difference
OTHERS_PORTS = {"remote_instance_weight_loader_seed_instance_service_port"}


def keys(found: ast.AST) -> set[str]:
    """Names that a function gives in the dictionaries that it makes."""
    told = set()
    for node in ast.walk(found):
        if isinstance(node, ast.Dict):
            told |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            told |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    return told


def beside_arguments(version: str) -> set[str]:
    told = set()
    for module, name in FUNCTIONS.items():
        for node in ast.walk(tree(fetch(version), module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                told |= keys(node)
    return told


def arguments(version: str) -> set[str]:
    """Fields of ServerArgs, wherever the release keeps them."""
    folder = "sglang/srt/arg_groups/fields/"
    names = {m for m in members(fetch(version)) if m.startswith(folder) and m.endswith(".py")}
    modules = [name.removesuffix(".py").replace("/", ".") for name in names if not name.endswith("__init__.py")]
    return {
        node.target.id
        for module in ["sglang.srt.server_args", *modules]
        for of in ast.walk(tree(fetch(version), module))
        if isinstance(of, ast.ClassDef)
        for node in of.body
        if isinstance(node, ast.AnnAssign)
    }


@every_release()
def test_equal_servers_are_told_as_equal(version):
    assert beside_arguments(version) <= NOT_FLAGS | EQUAL, "new in /server_info: is it the same of two equal servers?"
    ports = {name for name in arguments(version) if name.endswith("_port")}
    assert ports <= NOT_FLAGS | OTHERS_PORTS


def test_nothing_is_left_out_that_no_release_tells():
    told = set().union(*(beside_arguments(version) | arguments(version) for version in RELEASES))
    assert told >= NOT_FLAGS | EQUAL | OTHERS_PORTS


@every_release()
def test_the_stand_in_tells_what_the_release_tells(version):
    told, given = beside_arguments(version), arguments(version)
    ours = fake_info.server_info(version, {}, 30000, {}).keys()
    assert len(given) > 300 and ours >= told - {"kv_event_sources"}, "a field that the stand-in lacks"  # of gRPC alone
    assert ours <= told | given, "a field that the release has not"
    text = wheels.content(fetch(version), "sglang/srt/entrypoints/http_server.py")
    assert "max_model_len=_global_state.tokenizer_manager.model_config.context_len" in text
    assert all(f'"{name}"' in text for name in fake_info.model_info("m"))


@every_release()
def test_a_context_that_is_not_given_is_not_told(version):
    """No release sets the argument itself: whoever reads it must look elsewhere (/v1/models)."""
    for member in members(fetch(version)):
        if member.startswith(("sglang/srt/arg_groups/", "sglang/srt/server_args.py")) and member.endswith(".py"):
            text = wheels.content(fetch(version), member)
            assert "self.context_length =" not in text and "server_args.context_length =" not in text, member
            assert " context_length=" not in text, member  # of a resolution that is declared
