"""SGLang's group coordinator and its own communicator, taken out of the wheels and run on the CPU with ours between
them: who sums and gathers what, in a step, under capture and in its warm-up; and what the adapter relies on in each
release."""

import ast
import functools
import itertools
import re
import zlib
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from deepseek_v4_sm120.ops import all_reduce as op
from deepseek_v4_sm120.sglang_patches.adapters import all_reduce as adapter
from deepseek_v4_sm120.sglang_patches.all_reduce_ahead import CONTROLLER
from deepseek_v4_sm120.sglang_patches.table import TABLE
from tests.adapters.test_all_reduce import HIDDEN, Group
from tests.patching.test_wheel_wo_a import definition, source, take
from tests.patching.wheels import WheelSources, content, every_release, members, since, tree

FIRST = "0.5.13"
STATE = adapter.PARALLEL_STATE
COMMUNICATOR = "sglang.srt.distributed.device_communicators.custom_all_reduce"
HOOK = "sglang.srt.arg_groups.deepseek_v4_hook"
LOGITS = "sglang.srt.layers.logits_processor"
MULTIMEM = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag"
COMMUNICATION = "sglang.srt.distributed.communication_op"
SCHEDULER, PROFILER = (f"sglang.srt.managers.scheduler{name}" for name in ("", "_components.profiler_manager"))
ENGINE, FIELDS = "sglang.srt.entrypoints.engine", "sglang.srt.arg_groups.fields"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STOP = ("_stop_profile", "_merge_profile_traces")
WATCHDOG_S = 300  # --watchdog-timeout's default
METHODS = (
    *("all_reduce", "graph_capture", "_resolve_outplace_all_reduce_method", "_all_reduce_out_place"),
    *("_all_reduce_in_place", "_can_use_flashinfer_allreduce", "all_gather"),
)
OURS, THEIRS, NCCL = 2.0, 7.0, 3.0  # what each makes of ones


class OnACard(torch.Tensor):
    """A tensor that the coordinator does not take for one of a CPU."""

    is_cpu = False


def x_of(rows, dtype=torch.bfloat16):
    return torch.ones(rows, HIDDEN, dtype=dtype).as_subclass(OnACard)


def both_halves(coordinator, output, x):
    """NCCL's gather of a group of two, whose other rank has twice ours."""
    output.copy_(torch.cat([x, 2 * x]))


class Nccl:
    disabled = False

    def all_reduce(self, x):
        x.fill_(NCCL)

    def outplace_all_reduce(self, x):
        return torch.full_like(x, NCCL)

    def change_state(self, enable):
        return nullcontext()


def coordinator_of(wheel, ca_comm):
    """A GroupCoordinator with the wheel's methods, in a group of two."""
    made = {}
    names = {
        **{"torch": torch, "contextmanager": contextmanager, "nullcontext": nullcontext},
        "outplace_all_reduce": lambda x, group_name, outplace_all_reduce_method: made["it"]._all_reduce_out_place(
            x, outplace_all_reduce_method
        ),
        "inplace_all_reduce": lambda x, group_name: made["it"]._all_reduce_in_place(x),
        "GraphCaptureContext": SimpleNamespace,
        "get_current_device_stream_fast": lambda: "stream",
    }
    members = {name: take(wheel, names, f"GroupCoordinator.{name}", STATE) for name in METHODS}
    members = {name: function for name, function in members.items() if function is not None}
    none = ("hpu", "xpu", "npu")
    attributes = {f"{name}_communicator": None for name in none}
    attributes |= {f"{name}_comm": None for name in ("qr", "pymscclpp", "torch_symm_mem", "pcie_ipc")}
    attributes |= {"world_size": 2, "unique_name": "tp:0", "_fi_workspace_hint": None, "pynccl_comm": Nccl()}
    attributes |= {"is_symmetric_memory_enabled": lambda self: False, "ca_comm": ca_comm}
    attributes |= {"use_symmetric_memory": lambda self, *_, **__: nullcontext()}
    attributes |= {"is_allocation_symmetric": lambda self: False, "all_gather_into_tensor": both_halves}
    attributes["device_module"] = SimpleNamespace(stream=lambda stream: nullcontext())
    made["it"] = type("GroupCoordinator", (), attributes | members)()
    return made["it"]


def v1_of(wheel, *, disabled):
    """SGLang's CustomAllreduce of a group of two, without its constructor and its kernels."""
    names = {"torch": torch, "contextmanager": contextmanager, "is_weak_contiguous": lambda x: True}
    made = object.__new__(take(wheel, names, "CustomAllreduce", COMMUNICATOR))
    made.disabled, made._IS_CAPTURING, made.max_size, made._ptr = disabled, False, 8 << 20, 0
    made.world_size, made.full_nvlink, made.tms_cudagraph = 2, False, False
    made.register_graph_buffers = lambda: None
    made._all_reduce_impl = lambda x, registered: torch.full_like(x, THEIRS)
    return made


@pytest.fixture
def ours(monkeypatch):
    """The operator doubles; nothing is under capture."""
    monkeypatch.setattr(op, "all_reduce", lambda x, group, *, tag: OURS * x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def summed(coordinator, *x):
    return float(coordinator.all_reduce(x_of(*x))[0, 0])


@every_release(FIRST)
@pytest.mark.parametrize("disabled", [True, False], ids=["above two cards", "two cards"])
def test_who_sums_what(version, disabled, ours, sglang_wheel):
    wheel = sglang_wheel(version)
    coordinator = coordinator_of(wheel, adapter.Communicator(v1_of(wheel, disabled=disabled), Group()))
    stock = NCCL if disabled else THEIRS
    assert [summed(coordinator, rows) for rows in (1, 8, 512, 513, 1024, 1025)] == [OURS] * 3 + [stock] * 2 + [NCCL]
    assert summed(coordinator, 8, torch.float32) == stock
    coordinator.ca_comm.disabled = True  # as SGLang may
    assert summed(coordinator, 8) == NCCL


@every_release(FIRST)
def test_where_peers_fail_and_ours_is_not_there_every_sum_is_nccls(version, ours, sglang_wheel):
    """SGLang's own object with the one word that we set, eager and under capture."""
    wheel = sglang_wheel(version)
    for stock in (False, True):
        v1 = adapter._disabled(lambda group, device: v1_of(wheel, disabled=False), None, None)  # noqa: B023
        coordinator = coordinator_of(wheel, v1_of(wheel, disabled=False) if stock else v1)
        expected = THEIRS if stock else NCCL
        assert [summed(coordinator, rows) for rows in (1, 512, 1024)] == [expected] * 3
        coordinator.ca_comm._IS_CAPTURING = True
        assert summed(coordinator, 8) == (0.0 if stock else NCCL)  # a capture's warm-up
    second = source(wheel, f"{COMMUNICATOR}_v2")  # which full NVLink has
    assert "self.disabled = True" in second and "if self.disabled" in second


@every_release(FIRST)
def test_a_gather_is_sglangs_to_the_bit_and_ours_where_the_sums_are(version, ours, sglang_wheel, monkeypatch):
    wheel = sglang_wheel(version)
    asked = []
    monkeypatch.setattr(op, "all_gather", lambda x, group, *, tag: asked.append(x.shape) or torch.cat([x, 2 * x], 1))
    coordinator = coordinator_of(wheel, adapter.Communicator(v1_of(wheel, disabled=True), Group()))
    stock = type(coordinator).all_gather
    served = adapter.replace_all_gather(stock)
    few, many = (torch.randn(rows, 64_640).bfloat16().as_subclass(OnACard) for rows in (3, 65))
    for x, call in ((few, ()), (few, (-1,)), (few, (1,)), (few[0], (-1,)), (few, (0,)), (many, ()), (few.long(), ())):
        before = len(asked)
        found, expected = served(coordinator, x, *call), stock(coordinator, x, *call)
        assert torch.equal(found, expected) and len(asked) - before == (x is few and call != (0,))
    coordinator.ca_comm.disabled = True
    assert torch.equal(served(coordinator, few), stock(coordinator, few)) and len(asked) == 3


@every_release(FIRST)
def test_the_logits_come_to_the_coordinator_as_they_are(version, sglang_wheel):
    """[rows, vocabulary / ranks] along the last dim of the tp group, from 0.5.15 on behind a gather by multicast, which
    a card without gives up when it is built; then, and no sooner, they become float32."""
    wheel = sglang_wheel(version)
    logits = ast.unparse(definition(wheel, "LogitsProcessor._get_logits", LOGITS))
    gather = ("self._logits_gatherer(logits)", "tensor_model_parallel_all_gather(logits)")[not since(version, "0.5.15")]
    assert logits.count(gather) == 1
    assert logits.index("self._compute_lm_head(") < logits.index(gather) < logits.index("self._copy_logits_to_buffer(")
    if since(version, "0.5.15"):
        gatherer = ast.unparse(definition(wheel, "MultimemAllGatherer.__call__", MULTIMEM))
        assert gatherer.rstrip().endswith("return tensor_model_parallel_all_gather(x, dim=-1)")
        build = source(wheel, MULTIMEM)
        assert "multicast_ptr == 0" in build and "disabled (no multicast" in build
    assert "return get_tp_group().all_gather(input_, dim)" in source(wheel, COMMUNICATION)
    asked = ast.unparse(definition(wheel, "tensor_model_parallel_all_gather", COMMUNICATION).args)
    assert asked == "input_: torch.Tensor, dim: int=-1"


@every_release(FIRST)
def test_a_sum_that_is_decided_when_it_runs(version, ours, sglang_wheel):
    """torch.compile leaves the choice to the operator that it put in the graph."""
    wheel = sglang_wheel(version)
    coordinator = coordinator_of(wheel, adapter.Communicator(v1_of(wheel, disabled=True), Group()))
    assert ('"auto"' in source(wheel, STATE)) == since(version, "0.5.16")
    if since(version, "0.5.16"):
        found = [float(coordinator._all_reduce_out_place(x_of(rows), "auto")[0, 0]) for rows in (8, 1025)]
        assert found == [OURS, NCCL]


@every_release(FIRST)
@pytest.mark.parametrize("disabled", [True, False])
def test_under_capture_and_in_its_warm_up(version, disabled, ours, sglang_wheel, monkeypatch):
    wheel = sglang_wheel(version)
    v1 = v1_of(wheel, disabled=disabled)
    coordinator = coordinator_of(wheel, adapter.Communicator(v1, Group()))
    stock = NCCL if disabled else 0.0  # v1 gives zeros in a warm-up
    with coordinator.graph_capture(SimpleNamespace(stream="stream")):
        assert v1._IS_CAPTURING is True
        assert [summed(coordinator, rows) for rows in (8, 600)] == [OURS, stock]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert [summed(coordinator, rows) for rows in (8, 600)] == [OURS, NCCL if disabled else THEIRS]
    assert v1._IS_CAPTURING is False


@every_release(FIRST)
def test_the_object_is_asked_for_with_the_groups_cpu_group(version, sglang_wheel):
    """dispatch(group=, device=), then what it gave with the same, once for each group, where an error is SGLang's."""
    made = definition(sglang_wheel(version), "GroupCoordinator.__init__", STATE)
    (guard,) = [node for node in ast.walk(made) if isinstance(node, ast.Try) and "dispatch_custom" in ast.unparse(node)]
    given = "(group=self.cpu_group, device=self.device)"
    assert [ast.unparse(statement) for statement in guard.body] == [
        f"CAClass = dispatch_custom_allreduce{given}",
        f"self.ca_comm = CAClass{given}",
    ]
    assert ast.unparse(guard.handlers[0].type) == "Exception" and "ca_comm" not in ast.unparse(guard.handlers[0])


def begun(wheel, module, until):
    """SGLang's modules in the order in which the import of `module` begins them, up to `until`."""
    order, sources, asked = {}, WheelSources(wheel), set()  # a thousand modules, which name each other time and again

    def begin(name):
        if name in asked:
            return
        asked.add(name)
        for known in itertools.accumulate(name.split("."), "{}.{}".format):
            if known in order or until in order or sources.path(known) is None:
                continue
            order[known] = True
            for found in imported(wheel, known) if known != until else ():
                begin(found)

    begin(module)
    return list(order)


@functools.cache
def imported(wheel, module):
    path, text = WheelSources(wheel).path(module), WheelSources(wheel).read(module)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    return of_sglang(text, package)


@functools.cache  # most files are those of the release before
def of_sglang(text, package):
    return named(ast.parse("\n".join(import_statements(text))), package)


def named(parsed, package):
    return tuple(found for found in imports(parsed.body, package) if found.startswith("sglang."))


STRINGS = re.compile(r"(?s)\"\"\".*?\"\"\"|'''.*?'''")
LINES = re.compile(
    r"^( *)(?:((?:async )?def|class|try|except|finally|with|for|while|if|elif|else)\b(.*)"
    r"|((?:from [.\w]+ import|import) (?:\([^()\n]*\)|\((?s:.*?)\n *\)|.*)))",
    re.MULTILINE,
)


def import_statements(text):
    """Those that `imports` looks at, of formatted code, by its lines: parsing a thousand files takes four seconds, of
    which most are the bodies of functions. test_the_lines_tell_what_the_syntax_tree_does has both."""
    blocks = []  # (indent, whether what is in it is left out), from the outermost
    for indent, word, rest, statement in LINES.findall(STRINGS.sub("", text)):
        before = False
        while blocks and blocks[-1][0] >= len(indent):
            before = blocks.pop()[1]
        is_left_out = blocks[-1][1] if blocks else False
        if not word:
            if not is_left_out and ("sglang" in statement or statement.startswith("from .")):
                yield statement
            continue
        is_left_out |= word.endswith("def") or (word == "if" and ("TYPE_CHECKING" in rest or "__name__" in rest))
        blocks.append((len(indent), is_left_out or (word in ("elif", "else") and before)))


def imports(statements, package):
    """The names, modules' or not, that statements outside of functions import."""
    for node in statements:
        asked = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join(filter(None, (*above, node.module)))
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
        elif not isinstance(node, FUNCTIONS) and "TYPE_CHECKING" not in asked and "__name__" not in asked:
            inner = (getattr(node, name, ()) for name in ("body", "handlers", "orelse", "finalbody"))
            yield from imports(itertools.chain.from_iterable(inner), package)


@every_release(FIRST)
def test_a_rank_begins_with_the_schedulers_module(version, sglang_wheel):
    """Unpickling its function, which the controller's module and the engine's take from there. No other process of a
    server imports it but by way of the controller's: that tells them apart (all_reduce_ahead.py)."""
    wheel = sglang_wheel(version)
    (row,) = [patch for patch in TABLE.patches if patch.name == adapter.PATCH]
    assert row.ahead[0] == SCHEDULER and definition(wheel, "run_scheduler_process", SCHEDULER) is not None
    for module in (ENGINE, CONTROLLER):
        assert "run_scheduler_process" in names_from(tree(wheel, module), SCHEDULER)
        order = begun(wheel, module, SCHEDULER)
        assert order.index(CONTROLLER) < order.index(SCHEDULER)
    for module in ("sglang.launch_server", "sglang.cli.main", DETOKENIZER):
        assert not {SCHEDULER, CONTROLLER}.intersection(order := begun(wheel, module, SCHEDULER)) and module in order


MADE_UP = '''
"""For example:
from sglang.a import b
"""
from sglang.c import (  # d (e)
    f,
)
if TYPE_CHECKING:
    from sglang.g import h
    if True:
        import sglang.i
elif other:
    import sglang.j
else:
    import sglang.k
if other:
    import sglang.l as m, sglang.n
else:
    from ..o import p
try:
    from . import q
except ImportError:
    from sglang.r import s
class T:
    from sglang.u import v
    def f(self):
        import sglang.w
        if True:
            import sglang.x
async def y():
    import sglang.z
if __name__ == "__main__":
    from sglang.aa import bb
'''
COMPARED = set()


def test_the_lines_of_a_made_up_file():
    found = named(ast.parse(MADE_UP), "sglang.srt.of")
    assert of_sglang(MADE_UP, "sglang.srt.of") == found and len(found) == 12


@every_release(FIRST)
def test_the_lines_tell_what_the_syntax_tree_does(version, sglang_wheel):
    """Of one file in 64, where its text is not that of the release before."""
    wheel = sglang_wheel(version)
    for name in sorted(one for one in members(wheel) if one.startswith("sglang/srt/") and one.endswith(".py")):
        if zlib.crc32(name.encode()) % 64 == 0 and (text := content(wheel, name)) not in COMPARED:
            COMPARED.add(text)
            package = name.rpartition("/")[0].replace("/", ".")
            assert of_sglang(text, package) == named(ast.parse(text), package), name
    assert len(COMPARED) > 10


def names_from(parsed, module):
    """What a module takes from another one at its top."""
    taken = [node for node in parsed.body if isinstance(node, ast.ImportFrom) and node.module == module]
    return {alias.name for node in taken for alias in node.names}


@every_release(FIRST)
@pytest.mark.parametrize("name", ["tp_size", "disable_custom_all_reduce", "enable_deterministic_inference"])
def test_what_tells_whether_there_will_be_a_probe(name, version, sglang_wheel):
    """Read with a default, which a release without the argument would leave."""
    wheel = sglang_wheel(version)
    found = [
        node
        for module in (adapter.SERVER_ARGS, f"{FIELDS}.parallel", f"{FIELDS}.exec_")
        if WheelSources(wheel).path(module) is not None
        for node in ast.walk(tree(wheel, module))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    ]
    assert len(found) == 1


@every_release(FIRST)
def test_the_tensor_parallel_group_is_the_first_that_has_such_an_object(version, sglang_wheel):
    wheel = sglang_wheel(version)
    made = definition(wheel, "initialize_model_parallel", STATE)
    groups = [
        node
        for node in ast.walk(made)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("init_model_parallel_group(")
    ]
    groups.sort(key=lambda node: node.lineno)
    names = {keyword.arg: ast.unparse(keyword.value) for keyword in groups[0].value.keywords}
    assert ast.unparse(groups[0].targets[0]) == "_TP" and names["group_name"] == "'tp'"
    assert "use_custom_allreduce" not in names  # so that --disable-custom-all-reduce decides
    others = {ast.unparse(node.targets[0]) for node in groups[1:]}
    assert "_TP" not in others and {"_ATTN_TP", "_PP"} <= others
    assert "_TP is None" in ast.unparse(made)
    world = ast.unparse(definition(wheel, "init_world_group", STATE))
    assert "use_custom_allreduce=False" in world  # it is made before
    assert definition(wheel, "_TP", STATE) is not None and "_groups[group.unique_name] = weakref.ref(group)" in source(
        wheel, STATE
    )


@every_release(FIRST)
def test_what_tells_the_rows_of_a_step(version, sglang_wheel):
    """And that SGLang's own number of requests, with one drafted token each, is within."""
    wheel = sglang_wheel(version)
    if since(version, "0.5.18"):
        for name in ("max_speculative_num_draft_tokens", "get_schedule"):
            assert definition(wheel, name, adapter.CONTEXT) is not None
    else:
        if WheelSources(wheel).path(adapter.CONTEXT) is not None:
            assert definition(wheel, "max_speculative_num_draft_tokens", adapter.CONTEXT) is None
        assert definition(wheel, "get_global_server_args", adapter.SERVER_ARGS) is not None
        for name in ("max_speculative_num_draft_tokens", "max_running_requests"):
            assert definition(wheel, f"ServerArgs.{name}", adapter.SERVER_ARGS) is not None
    numbers = {node.value for node in ast.walk(tree(wheel, HOOK)) if isinstance(node, ast.Constant)}
    assert 256 in numbers and "max_running_requests" in source(wheel, HOOK) and op.MAX_ROWS >= 2 * 256


@every_release(FIRST)
def test_a_rank_keeps_the_others_waiting_in_a_step(version, sglang_wheel):
    """Where a step ends a profile ranks write theirs and meet; then the first one merges all of them, for minutes,
    while the others replay their graphs. So a call in a graph waits as long as SGLang's own watchdog."""
    profiler = tree(sglang_wheel(version), PROFILER)
    stop, merge = (definition(sglang_wheel(version), f"SchedulerProfilerManager.{name}", PROFILER) for name in STOP)
    assert ast.unparse(stop).rindex("barrier(") < ast.unparse(stop).index("self._merge_profile_traces()")
    assert "tp_rank != 0" in ast.unparse(merge) and "self._stop_profile(" in ast.unparse(profiler)
    run = ast.unparse(definition(sglang_wheel(version), "Scheduler.run_batch", SCHEDULER))
    assert run.index("_profile_batch_predicate(batch)") < run.index("forward_batch_generation(")
    assert op.PATIENCE_S >= WATCHDOG_S
