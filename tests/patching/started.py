"""Pythons in which SGLang's real wheels are imported on two faked SM120 cards, with our folder on PYTHONPATH.

Fixtures of all files here: `places`, `loaded`, `run`, `python_with_ours`. Code that begins with RESOLVES runs in a fork
of a process that has run that much of it already, of the same release and with the same environment: what it sees is
what a process of its own would see there, and arguments are not resolved before.
"""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.loaded_python import Loaded
from tests.patching.wheels import packages, unpacked

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
CONFIG = json.loads((HERE.parent / "data/flash_config.json").read_text())
CONFIGURED = ("qwen2", "glm_ocr", "siglip", "deepseek_v3", "lfm2", "lfm2_moe", "lfm2_vl", "falcon_mamba", "mamba")
CONFIGURED += ("mamba2", "gpt_oss", "qwen3", "qwen3_moe", "gemma4", "whisper")
LOADED = (
    *("sm120_machine", "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "transformers"),
    *("transformers.modeling_layers", "transformers.models.llama", "requests", "pydantic", "PIL.Image", "zmq"),
    *("fastapi", "fastapi.responses", "msgspec", "setuptools", "fsspec.caching", "pydantic.types", "zmq.asyncio"),
    *("torch.utils.cpp_extension", "torch._inductor.compiler_bisector", "transformers.models.llama.modeling_llama"),
    *("transformers.models.auto.processing_auto", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl"),
    *(f"transformers.models.{name}.configuration_{name}" for name in CONFIGURED),
    *("einops", "pybase64", "zmq.auth.thread", "partial_json_parser", "numpy.typing", "huggingface_hub.hf_file_system"),
    *("logging.handlers", "multiprocessing.shared_memory", "triton.tools.tensor_descriptor", "pydantic.v1"),
)
RESOLVES = """
    import json, os, sys
    sys.path[1:1] = [MACHINE]
    import sm120_machine
    sys.path += [WHEEL, PACKAGES]
    from sglang.srt.server_args import ServerArgs
    import sglang.srt.configs.model_config  # as whoever starts a server has: most of what resolving imports
"""
OURS = ("__main__", "patching.engine", "sglang_patches.table", "sglang_patches.device_gate", "commands.models_table")
KEPT = 6  # processes that have run it: a tenth of a GB each


class Python:
    """Runs code in a new interpreter, started by `command`, whose PYTHONPATH is our folder and then `path`."""

    def __init__(self, *command: str):
        self.command = command

    def __call__(self, code, *, path=(), env=None, flags=(), check=True, ours=True, timeout=120, cwd=None):
        script = [code] if isinstance(code, Path) else ["-c", textwrap.dedent(code)]
        folders = ([str(REPO)] if ours else []) + [str(p) for p in path]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_SM120", "PYTHON"))}
        environ |= {"PYTHONPATH": os.pathsep.join(folders), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        options = {"capture_output": True, "text": True, "timeout": timeout, "cwd": cwd}
        done = subprocess.run([*self.command, *flags, *map(str, script)], env=environ, **options)
        if check and done.returncode:
            raise AssertionError(f"rc {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def json(self, code, **options):
        """The last line that the code printed, as JSON."""
        return json.loads(self(code, **options).stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    """The packages that the wheels need, and a model folder with nothing but the released configuration."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    return {"PACKAGES": str(packages()), "MODEL": str(model), "MACHINE": str(HERE)}


@pytest.fixture(scope="session")
def loaded(tmp_path_factory, places, torch_python):
    """A Python with the machine and with most of what the wheels import of others; itself a fork of one with torch."""
    offline = {"HF_HUB_OFFLINE": "1"}
    path = (places["MACHINE"], places["PACKAGES"])
    folder = tmp_path_factory.mktemp("loaded")
    loaded = Loaded(folder, *LOADED, path=path, environ=offline, start=torch_python())
    yield Python(*loaded.command)
    loaded.close()


@pytest.fixture(scope="session")
def python_with_ours(tmp_path_factory, torch_python):
    """With torch, and with our modules, none of which is installed or has looked at its environment."""
    modules = (f"deepseek_v4_sm120.{name}" for name in OURS)
    loaded = Loaded(tmp_path_factory.mktemp("ours"), *modules, path=(str(REPO),), start=torch_python())
    yield Python(*loaded.command)
    loaded.close()


@pytest.fixture(scope="session")
def resolving(tmp_path_factory, places, loaded):
    """resolving(version, environment) -> a Python that has run RESOLVES."""
    made: dict[tuple, Loaded] = {}

    def python(version, environment):
        key = (version, *sorted(environment.items()))
        if key in made:
            made[key] = made.pop(key)  # the last one
        else:
            if len(made) == KEPT:
                made.pop(next(iter(made))).close()
            path = (places["MACHINE"], str(unpacked(version)), places["PACKAGES"])
            environ = environment | {"PYTHONPATH": str(REPO)}
            modules = ("sm120_machine", "sglang.srt.server_args", "sglang.srt.configs.model_config")
            folder = tmp_path_factory.mktemp("resolving")
            made[key] = Loaded(folder, *modules, path=path, environ=environ, start=[*loaded.command])
        return Python(*made[key].command)

    yield python
    for one in made.values():
        one.close()


@pytest.fixture
def run(loaded, places, resolving):
    """run(code, more, version, variables) -> the last line that the code printed, as JSON"""

    def run(code, more="{}", version="0.5.12", **environment):
        own = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}  # the next import of that release is faster
        environment = own | environment
        python = resolving(version, environment) if code.startswith(RESOLVES) else loaded
        for name, value in {**places, "WHEEL": str(unpacked(version))}.items():
            code = code.replace(name, repr(value))
        return python.json(code.replace("MORE", more), env=environment)

    return run
