"""Seeds, and the rule for GPU tests: they run or they fail, they are never skipped without a word.

Without a GPU the runner deselects them (`-m "not gpu"`); one that is selected anyway fails and says why. With a GPU a
test that skips itself fails the run, and deselected ones are counted in the summary.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import random
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("deepseek_v4_sm120") is None:  # `pytest` as a program does not put the checkout on the path
    sys.path.insert(0, str(REPO))

from tests.loaded_python import COLLECTOR  # noqa: E402

# Begun first, of each of the two kinds that forks.py keeps apart: one of them begun last would keep a single process
# busy while the others are done.
LONGEST = (
    *("patching/test_start.py", "patching/test_wheels.py", "emulator/test_kernels.py", "emulator/test_watch.py"),
    *("patching/test_wheel_slots.py", "emulator/test_weak_memory.py", "serving/test_compare.py"),
    *("emulator/test_rows_apart.py", "emulator/test_cards.py", "test_serve_ends.py", "test_structure.py"),
)
WAITING = (  # for servers and for time: of a minute less than half is a processor's
    *("quality/test_lies.py", "quality/test_gates.py", "e2e/test_serving_stage.py", "quality/test_honest.py"),
    *("e2e/test_faults_stage.py", "quality/test_state_gates.py", "ops/test_all_reduce_probe.py", "e2e/test_scripts.py"),
    *("e2e/test_halves_stage.py", "e2e/test_chain_stage.py", "e2e/test_products_stage.py"),
    *("serving/test_load_generator.py", "quality/test_gate_options.py", "e2e/test_accepted_stage.py"),
    *("e2e/test_interleaving.py", "e2e/test_shortage_stage.py", "ops/test_all_reduce_terms.py"),
    *("test_calibrate_workers.py", "e2e/test_drawn_stage.py", "e2e/test_features_stage.py", "e2e/test_router_stage.py"),
    *("e2e/test_shared_cards.py", "e2e/test_streams_stage.py", "test_calibrate_all_reduce.py"),
)

# In one process, for what one of them has started or found the others need as well: what is imported of a release, what
# is parsed and found in its files.
TOGETHER = (
    ("patching/test_start.py", "patching/test_several_servers.py", "patching/test_other_models.py"),
    (
        *("patching/test_wheels.py", "patching/test_known_files.py", "patching/test_host_version.py"),
        *("patching/test_ledger.py", "patching/test_reads.py", "patching/test_table.py"),
        *("patching/test_wheel_attributes.py", "patching/test_shared_reads.py", "patching/test_unparsable.py"),
    ),
)

# Syntax trees, and what torch and pytest hold, are millions of objects that live long: at the usual threshold, 700,
# most of the time in which a wheel is parsed goes to looking through them again and again, and at 200,000 a fifteenth.
gc.set_threshold(*COLLECTOR)

PROGRAM = (  # what tests' own programs import beside torch
    *("pytest", "tests.patching.test_wheel_wo_a", "tests.adapters.test_all_reduce"),
    *("tests.adapters.test_index_select_dealt", "tests.adapters.test_mhc_dealt_streams"),
)
_shared: dict = {}  # fixture -> a Loaded of all processes that run tests
_skipped_on_gpu: list[str] = []
_deselected_on_gpu: list[str] = []


@functools.cache
def cuda_problem() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def pytest_collection_modifyitems(items):
    first = {REPO / "tests" / name: REPO / "tests" / names[0] for names in TOGETHER for name in names}
    waiting = {REPO / "tests" / name for name in WAITING}
    places = {REPO / "tests" / name: at for at, name in enumerate(LONGEST + WAITING)}
    for item in items:
        item.together = first.get(item.path, item.path)  # for forks.py
        item.waits = item.path in waiting
    items.sort(key=lambda item: places.get(item.together, len(places)))


def pytest_collection_finish(session):
    """Of several processes that run tests all have one Python with torch, begun here in front of them, and one more."""
    if not session.config.option.collectonly and session.config.getoption("forks", 0):
        asked = {name for item in session.items for name in item.fixturenames}
        make_folder = session.config._tmp_path_factory.mktemp
        if "torch_python" in asked:
            _shared["torch_python"] = with_torch(make_folder("torch"))
        if "program_python" in asked:
            _shared["program_python"] = with_programs(make_folder("programs"), _shared["torch_python"].command)
    hand_on_logs()
    gc.freeze()


def hand_on_logs():
    """Three times a test pytest puts its handlers at each logger that hands nothing on to the root, and takes them away
    again. torch has fifty of these: they hand on, to the same handlers."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
            logger.propagate = True


def with_torch(folder):
    from tests.loaded_python import Loaded

    loaded = Loaded(folder, "torch")
    loaded.command  # noqa: B018 begins it
    return loaded


def with_programs(folder, torch_python):
    from tests.loaded_python import Loaded

    loaded = Loaded(folder, *PROGRAM, path=(str(REPO),), start=torch_python)
    loaded.command  # noqa: B018
    return loaded


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (problem := cuda_problem()):
        pytest.fail(f'a gpu test was selected, but {problem}; without a GPU run with -m "not gpu"', pytrace=False)


def pytest_runtest_logreport(report):
    if report.skipped and "gpu" in report.keywords and cuda_problem() is None:
        _skipped_on_gpu.append(report.nodeid)


def pytest_deselected(items):
    gpu_items = [item.nodeid for item in items if item.get_closest_marker("gpu")]
    if gpu_items and cuda_problem() is None:
        _deselected_on_gpu.extend(gpu_items)


def pytest_sessionfinish(session, exitstatus):
    while _shared:
        _shared.popitem()[1].close()  # the last one first
    gc.freeze()  # pytest, and Python at its end, would look through all that is left of it
    if _skipped_on_gpu and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _skipped_on_gpu:
        terminalreporter.write_line(f"FAILED: GPU tests skipped on a machine with a GPU: {_skipped_on_gpu}", red=True)
    if _deselected_on_gpu:
        count = len(_deselected_on_gpu)
        terminalreporter.write_line(f"{count} GPU tests were deselected on a machine with a GPU", yellow=True)


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every run and for every order of the tests."""
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # without a GPU torch.manual_seed keeps a traceback of each call, for a GPU that never comes
        (torch.default_generator.manual_seed if cuda_problem() else torch.manual_seed)(0)


@pytest.fixture(scope="session")
def torch_python(tmp_path_factory):
    """What starts a Python that has imported torch already: words in front of a script or -c and code."""
    if "torch_python" in _shared:
        yield lambda: _shared["torch_python"].command
        return
    loaded = with_torch(tmp_path_factory.mktemp("torch"))
    yield lambda: loaded.command
    loaded.close()


@pytest.fixture(scope="session")
def program_python(tmp_path_factory, torch_python):
    """As torch_python, with PROGRAM: for what imports tests, not for what asks how we start, or changes a module that
    others have names of."""
    if "program_python" in _shared:
        yield lambda: _shared["program_python"].command
        return
    loaded = with_programs(tmp_path_factory.mktemp("programs"), torch_python())
    yield lambda: loaded.command
    loaded.close()


@pytest.fixture(scope="session")
def device():
    """The CUDA device of GPU tests."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def bench(request, monkeypatch):
    """The module bench/NAME.py of a file test_bench_NAME.py."""
    name = request.path.stem.removeprefix("test_bench_")
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    spec = importlib.util.spec_from_file_location(f"bench_{name}", REPO / f"bench/{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
