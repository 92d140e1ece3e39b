"""The fake server, and trees that hold the real bench_serving of a wheel over stand-ins of its dependencies."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO)]  # bench is no installed package

from bench.serving.endpoint import Endpoint  # noqa: E402
from tests.patching.wheels import fetch as wheel  # noqa: E402
from tests.serving.fake_server import FakeServer  # noqa: E402

THIRD_PARTY = Path(__file__).resolve().parent / "third_party"
VERSIONS = ("0.5.12", "0.5.14", "0.5.17", "0.5.20", "0.5.23")
REAL = (
    "bench_serving.py",
    "benchmark/serving.py",
    "benchmark/utils.py",
    "benchmark/goodput.py",
    "benchmark/datasets/common.py",
)
STAND_INS = {
    "__init__.py": "",
    "benchmark/__init__.py": "",
    "benchmark/datasets/__init__.py": "from .common import DatasetRow\n\nget_dataset = None\n",
    "benchmark/datasets/mooncake.py": "get_mooncake_request_over_time = None\n",
    "srt/__init__.py": "",
    "srt/disaggregation/__init__.py": "",
    "srt/disaggregation/utils.py": "FAKE_BOOTSTRAP_HOST = ''\n",
    "srt/utils/__init__.py": "",
    "srt/utils/network.py": "NetworkAddress = resolve_base_url = resolve_host_port = None\n",
}


def bench_serving_source(version: str) -> str:
    with zipfile.ZipFile(wheel(version)) as archive:
        names = archive.namelist()
        name = next(n for n in ("sglang/benchmark/serving.py", "sglang/bench_serving.py") if n in names)
        return archive.read(name).decode()


@pytest.fixture(scope="session")
def sglang_path(tmp_path_factory):
    """sglang_path(version) -> a PYTHONPATH on which that release's own bench_serving can be imported."""

    def make(version: str = "0.5.17") -> str:
        folder = tmp_path_factory.getbasetemp() / f"sglang-{version}"
        if not folder.exists():
            for name, text in STAND_INS.items():
                path = folder / "sglang" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            with zipfile.ZipFile(wheel(version)) as archive:
                for name in REAL:
                    if f"sglang/{name}" in archive.namelist():
                        (folder / "sglang" / name).write_bytes(archive.read(f"sglang/{name}"))
        return os.pathsep.join([str(folder), str(THIRD_PARTY)])

    return make


@pytest.fixture
def serve():
    """serve("fault", ..., option=value) -> a running FakeServer, stopped after the test."""
    running = []

    def start(*faults: str, **options) -> FakeServer:
        server = FakeServer(set(faults), **options)
        server.__enter__()
        running.append(server)
        return server

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture
def endpoint_of(serve):
    """endpoint_of("fault", ...) -> an Endpoint of a fresh server."""
    return lambda *faults, **options: Endpoint(serve(*faults, **options).url, timeout_s=5)
