"""What users are told to mount: with a folder that is missing, empty or another nothing may start without us."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_v4_sm120.commands.doctor import facts
from deepseek_v4_sm120.commands.plan import command, launch, models
from deepseek_v4_sm120.settings import Settings, read_choices
from tests.test_build_artifact import ENGINE
from tests.test_plan import arguments, request

REPO = Path(__file__).resolve().parents[1]
OURS = launch.mount(launch.BUILT, launch.MOUNT)
SETTINGS = Settings()


def sources(line: str, folder: Path) -> list[str]:
    """Of the mounts of a command that a shell reads in this folder, as Docker gets them."""
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], cwd=folder, text=True, capture_output=True).stdout
    found = [
        dict(p.partition("=")[::2] for p in w.split(",")) for w in words.splitlines() if w.startswith("type=bind,")
    ]
    assert all("readonly" in mount for mount in found)
    return [mount["source"] for mount in found]


def test_all_that_is_printed_mounts_the_folder_so_that_another_is_refused(tmp_path):
    """Docker asks whether the source exists, and a path that leads through what is missing does not."""
    readme = (REPO / "README.md").read_text()
    assert readme.count(f"  {OURS} \\\n") == 2 == readme.count("--mount type=bind")
    assert f" {facts.volumes(facts.cache_folders({}, launch.HOME))} \\\n" in readme  # a second start compiles nothing
    for name, exists in (("build/deepseek_v4_sm120", True), ("empty/build", False), ("missing", False)):
        folder = tmp_path / name.partition("/")[0] if not exists else tmp_path
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (source,) = sources(launch.docker_line(launch.make(request())), folder)
        assert os.path.exists(source) is exists
        assert not exists or os.path.samefile(source, tmp_path / "build")


@pytest.mark.parametrize("is_download", [False, True])
@pytest.mark.parametrize("in_container", [False, True])
def test_weights_of_this_machine_are_mounted(tmp_path, monkeypatch, is_download, in_container):
    """With what a download's links lead to, and where SGLang is told to look for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "is_container", lambda root: in_container)
    folder = tmp_path / "a model/snapshots/0123"
    folder.mkdir(parents=True)
    config = (REPO / "tests/data/flash_config.json").read_text()
    if is_download:
        (tmp_path / "a model/blobs").mkdir()
        (tmp_path / "a model/blobs/abc").write_text(config)
        (folder / "config.json").symlink_to("../../blobs/abc")
    else:
        (folder / "config.json").write_text(config)
    plan = launch.make(request(model=models.find("a model/snapshots/0123", None)))
    line = launch.docker_line(plan)
    assert sources(line, tmp_path)[1:] == [str(tmp_path / "a model" if is_download else folder)]
    words = shlex.split(line)
    assert words[words.index("--model-path") + 1] == str(folder)
    assert any("wants its path on the host" in note for note in plan.notes) is in_container


def test_a_name_is_not_mounted():
    assert len(sources(launch.docker_line(launch.make(request())), REPO)) == 1
    assert launch.local_model(launch.make(request())) is None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("reproducible=on,all_reduce=host", "reproducible=on,all_reduce=host,prefill_graphs=on,dealt_products=on"),
        (
            "draft_head=on,mhc=off,unpadded_heads=off",
            "mhc=off,draft_head=on,unpadded_heads=off,prefill_graphs=on,dealt_products=on",
        ),
        ("prefill_graphs=off", "prefill_graphs=off,dealt_products=on"),
    ],
)
def test_a_plan_repeats_all_that_is_set(monkeypatch, given, wanted):
    """Where `plan` is asked under DSV4_SM120_SET, its command lines say the same."""
    monkeypatch.setattr(command, "settings", lambda: replace(SETTINGS, choices=read_choices(given)))
    plan = launch.make(command.request_of(arguments(sglang="0.5.23")))
    assert f" DSV4_SM120_SET={wanted} " in launch.launch_line(plan)
    assert f" -e DSV4_SM120_SET={wanted} " in launch.docker_line(plan)


@pytest.mark.parametrize("mode", ["1", "ours"])
def test_a_plan_reckons_with_shadow_mode(monkeypatch, mode):
    monkeypatch.setattr(command, "settings", lambda: replace(SETTINGS, shadow=mode))
    assert command.request_of(arguments()).shadow == mode
    monkeypatch.setattr(command, "settings", lambda: replace(SETTINGS, shadow=mode, off=True))
    assert command.request_of(arguments()).shadow is None


def test_the_users_own_interval_is_not_overruled(monkeypatch):
    monkeypatch.setattr(command, "settings", lambda: replace(SETTINGS, choices={"prefill_decode_interval": "off"}))
    plan = launch.make(command.request_of(arguments(sglang="0.5.23")))
    assert "--prefill-decode-interval" not in launch.docker_line(plan)
    assert "prefill_decode_interval=off" in launch.docker_line(plan)


def test_the_package_in_place_of_its_folder_ends_every_python(tmp_path):
    """One level too deep: nothing of ours would be found, and a server would run as without us."""
    package = tmp_path / "dsv4"
    shutil.copytree(REPO / "deepseek_v4_sm120", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))

    def python(*path, **env):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
        return subprocess.run([sys.executable, "-c", "print(1)"], env=env, text=True, capture_output=True)

    for path in ([package], [package, REPO]):
        done = python(*path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"deepseek_v4_sm120: {package} on PYTHONPATH is the package itself; mount ")
    assert python(package, DSV4_SM120="off").stdout == python(REPO, package).stdout == "1\n"


DOCKERS = {
    "none": (None, "there is no docker"),
    "no daemon": ("#!/bin/sh\necho 'permission denied: docker.sock' >&2\nexit 1\n", "permission denied: docker.sock"),
    "no BuildKit": ("#!/bin/sh\n", "docker build needs docker-buildx-plugin; Debian and Ubuntu call it docker-buildx"),
    "one that builds": (ENGINE, None),
}


@pytest.mark.parametrize("abi", ["311", "312"])
@pytest.mark.parametrize("docker", DOCKERS)
def test_a_build_says_where_and_for_what(tmp_path, docker, abi):
    """Why not in Docker; that SGLang's images cannot load it; how it is mounted."""
    tools, out = tmp_path / "bin", tmp_path / "a build"
    tools.mkdir()
    used = "bash dirname realpath tail grep ls git mkdir mktemp basename chmod rm mv touch"
    for name in used.split():
        (tools / name).symlink_to(shutil.which(name))
    script, why = DOCKERS[docker]
    made = f'mkdir -p "$3/deepseek_v4_sm120"; touch "$3/deepseek_v4_sm120/_C.cpython-{abi}-x.so"'
    texts = {"docker": script, "python3": f'#!{tools}/bash\n[ "$1" = -c ] || {{ {made}; }}\n'}
    for name, text in texts.items():
        if text is not None:
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    done = subprocess.run(
        [REPO / "build_docker.sh", "--out", out], env={"PATH": str(tools)}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert (f"not in Docker ({why}): building with this" in done.stdout) is (why is not None)
    assert ("not for Python 3.12" in done.stderr) is (why is not None and abi == "311")
    told = re.search(r'docker run (--mount \S+"[^"]*"\S*)', done.stdout)[1]
    assert told == launch.mount(f'"{out}/deepseek_v4_sm120/.."', launch.MOUNT)
