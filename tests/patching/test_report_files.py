"""DSV4_SM120_REPORT: what lies in the folder stops and hangs nobody; nothing in it is followed or overwritten."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_v4_sm120.patching import json_file, lifetime, report, report_files
from deepseek_v4_sm120.settings import Settings
from tests.patching.small_host import make

REPO = Path(__file__).resolve().parents[2]
REPORT = {"deepseek_v4_sm120": "0", "pid": 7, "patches": [], "notes": [], "shadow_summary": []}
STRANGE = {
    "{": "is not JSON",
    "[" * 100_000: "is not JSON",
    "\xff": "is not JSON",
    "[]": "is none of our reports",
    "null": "is none of our reports",
    "{}": "is none of our reports",
    json.dumps({**REPORT, "pid": "7"}): "is none of our reports",
    json.dumps({**REPORT, "patches": [{"patch": 3, "state": "APPLIED"}]}): "is none of our reports",
    json.dumps({**REPORT, "devices_served": []}): "is none of our reports",
    json.dumps({**REPORT, "notes": [3]}): "is none of our reports",
}


def name() -> str:
    """Of this process's report; the one that collected may have been another."""
    return f"{os.getpid()}.json"


def in_time(call, seconds=20):
    """What the call gives, in a thread of its own: one that hangs fails."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def engine_with(folder):
    return make(settings=Settings(report=str(folder)))


def warning_of(said) -> str:
    (text,) = [text for level, text in said if level == "WARNING"]
    return text


def plant(path: Path, kind: str, elsewhere: Path) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "dangling link":
        path.symlink_to(elsewhere / "nowhere")
    else:
        path.write_text("somebody's notes")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fifo", "is no regular file"),
        ("folder", "is no regular file"),
        ("link", "is a symbolic link"),
        ("dangling link", "is a symbolic link"),
        ("file", "is not JSON"),
    ],
)
def test_nothing_that_is_not_ours_is_followed_overwritten_or_waited_for(host, said, tmp_path, kind, words):
    host()
    folder, elsewhere = tmp_path / "reports", tmp_path / "precious.json"
    folder.mkdir()
    elsewhere.write_text("precious")
    plant(folder / name(), kind, elsewhere)
    made = in_time(lambda: engine_with(folder))
    in_time(lambda: report.write(made))
    text = warning_of(said)
    assert f"DSV4_SM120_REPORT={folder}: {name()} {words}, and is left as it is; all else goes on" in text
    assert elsewhere.read_text() == "precious" and os.listdir(folder) == [name()]
    assert kind != "file" or (folder / name()).read_text() == "somebody's notes"
    reports, problems = in_time(lambda: report_files.read(folder))
    assert reports == [] and len(problems) == 1 and words in problems[0]


def test_what_a_power_failure_left_of_a_report_is_replaced(host, said, tmp_path):
    host()
    (tmp_path / name()).touch()
    report.write(engine_with(tmp_path))
    assert not said and json.loads((tmp_path / name()).read_text())["pid"] == os.getpid()


def test_a_link_under_the_name_of_a_draft_is_not_followed(host, said, tmp_path):
    """An earlier release wrote through <pid>.tmp."""
    host()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / name()).with_suffix(".tmp").symlink_to(precious)
    engine_with(folder)
    assert precious.read_text() == "precious" and json.loads((folder / name()).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/full", "/dev/null/below"])
def test_a_place_that_takes_no_files_is_told_once(host, said, place):
    host()
    made = engine_with(place)
    report.write(made)
    assert f"no reports in DSV4_SM120_REPORT={place}: " in warning_of(said)
    assert report_files.problem(place).startswith(place)


def test_a_full_disk_is_told_once_and_leaves_nothing_behind(host, said, tmp_path, monkeypatch):
    host()
    folder = tmp_path / "reports"
    real_open = open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(file, mode="r", *args, **kwargs):
        opened = real_open(file, mode, *args, **kwargs)
        return Full(opened) if "w" in mode else opened

    engine_with(folder)
    before = (folder / name()).read_text()
    monkeypatch.setattr(json_file, "open", full, raising=False)
    made = engine_with(folder)
    report.write(made)
    assert "No space left on device" in warning_of(said)
    assert os.listdir(folder) == [name()] and (folder / name()).read_text() == before, "the last whole report stays"
    assert report_files.problem(folder) == f"{folder}: No space left on device"


def test_a_report_of_an_earlier_process_of_that_number_is_replaced(host, said, tmp_path):
    host()
    (tmp_path / name()).write_text(json.dumps(REPORT))
    engine_with(tmp_path)
    assert json.loads((tmp_path / name()).read_text())["pid"] == os.getpid() and said == []


@pytest.mark.parametrize("has_our_number", [False, True])
def test_what_is_planted_over_our_own_report_later_stays(has_our_number, host, said, tmp_path, monkeypatch):
    """Also where it got the inode's number that our report had."""
    host()
    folder, precious = tmp_path / "reports", tmp_path / "precious"
    precious.write_text("precious")
    made = engine_with(folder)
    report.write(made)
    assert said == []
    real = os.lstat
    ours = real(folder / name())
    (folder / name()).unlink()
    (folder / name()).symlink_to(precious)
    if has_our_number:
        kept = ("st_mode", "st_size", "st_mtime_ns")
        found = {part: getattr(os.lstat(folder / name()), part) for part in kept}
        found = SimpleNamespace(st_dev=ours.st_dev, st_ino=ours.st_ino, **found)
        monkeypatch.setattr(os, "lstat", lambda path: found if Path(path) == folder / name() else real(path))
    report.write(made)
    monkeypatch.setattr(os, "lstat", real)
    assert precious.read_text() == "precious" and (folder / name()).is_symlink() and "is a symbolic link" in said[0][1]


@pytest.mark.parametrize("text", STRANGE)
def test_strange_files_are_named_and_the_others_read(tmp_path, text):
    (tmp_path / "1.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "7.json").write_text(json.dumps(REPORT))
    (tmp_path / "notes.txt").write_text("not looked at")
    reports, problems = in_time(lambda: report_files.read(tmp_path))
    assert reports == [REPORT] and problems == [f"{tmp_path / '1.json'}: {STRANGE[text]}"]


def test_a_huge_file_is_not_read_to_its_end(tmp_path, monkeypatch):
    with open(tmp_path / "1.json", "wb") as file:
        file.truncate(report_files.LIMIT_BYTES * 1000)
    assert "has more than" in report_files.read(tmp_path)[1][0]


def test_no_folder_a_file_and_too_many(tmp_path, monkeypatch):
    assert report_files.read(tmp_path / "none") == ([], [])
    (tmp_path / "file").write_text("")
    assert report_files.read(tmp_path / "file")[1] == [f"{tmp_path / 'file'}: Not a directory"]
    monkeypatch.setattr(report_files, "MOST_REPORTS", 2)
    for pid in (lifetime.MOST + 9, lifetime.MOST + 10, lifetime.MOST + 11):  # numbers that no process has
        (tmp_path / f"{pid}.json").write_text(json.dumps({**REPORT, "pid": pid}))
    reports, problems = report_files.read(tmp_path)
    assert len(reports) == 2 and "only the last 2 of 3 files" in problems[0]


def test_of_too_many_reports_those_of_who_runs_are_read_then_the_newest(tmp_path, monkeypatch):
    """Weeks of restarts in one folder: numbers begin anew with the machine, and a server that runs wrote long ago."""
    monkeypatch.setattr(report_files, "MOST_REPORTS", 3)
    ended = [lifetime.MOST + n for n in range(1, 6)]
    for age, pid in enumerate([*reversed(ended), os.getpid()]):  # the greatest numbers are the oldest but for this one
        (tmp_path / f"{pid}.json").write_text(json.dumps({**REPORT, "pid": pid}))
        at = 0 if pid == os.getpid() else 1_000 + age
        os.utime(tmp_path / f"{pid}.json", (at, at))
    reports, _ = report_files.read(tmp_path)
    assert [one["pid"] for one in reports] == [os.getpid(), *ended[:2]]


def test_a_folder_that_can_be_made_is_no_problem_and_is_not_made(tmp_path):
    assert report_files.problem(tmp_path / "new" / "deep") is None
    assert report_files.problem(tmp_path) is None and os.listdir(tmp_path) == []


WRITES = """
import sys
from pathlib import Path
from deepseek_v4_sm120.patching import report_files
for folder, word in ((sys.argv[1], sys.argv[2]), (sys.argv[1], "later")):
    text = '{"deepseek_v4_sm120": "%s", "pid": 88, "patches": [], "notes": [], "shadow_summary": []}' % word
    report_files.replace(Path(folder), 88, text)
    print(flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def same_number(tmp_path):
    """Each a process that is number 88, as those of containers are, with one folder for all; it writes twice."""
    started = []

    def start(word):
        words = [sys.executable, "-c", WRITES, str(tmp_path), word]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO))
        assert started[-1].stdout.readline() == "\n"
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def written(folder):
    return {path.name: json.loads(path.read_text())["deepseek_v4_sm120"] for path in folder.iterdir()}


def test_containers_that_share_the_folder_keep_their_reports(tmp_path, same_number):
    first, second = same_number("first"), same_number("second")
    assert written(tmp_path) == {"88.json": "first", "88-2.json": "second"}
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "\n"
    assert written(tmp_path) == {"88.json": "later", "88-2.json": "second"}
    first.kill()
    first.wait()
    same_number("restarted")  # nobody runs who has the first one's: a crash loop leaves no more than one
    assert written(tmp_path) == {"88.json": "restarted", "88-2.json": "second"}
    assert second.poll() is None and len(report_files.read(tmp_path)[0]) == 2


def test_the_second_of_a_number_is_of_that_process(tmp_path, monkeypatch):
    monkeypatch.setattr(report_files, "MOST_REPORTS", 1)
    mine, other = f"{os.getpid()}-2.json", f"{lifetime.MOST + 1}.json"
    for name, at in ((mine, 0), (other, 1000)):
        (tmp_path / name).write_text(json.dumps({**REPORT, "deepseek_v4_sm120": name}))
        os.utime(tmp_path / name, (at, at))
    assert [one["deepseek_v4_sm120"] for one in report_files.read(tmp_path)[0]] == [mine]


def test_where_files_have_no_locks_reports_are_written(tmp_path, monkeypatch):
    def none(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(report_files.fcntl, "flock", none)
    for _ in range(3):
        report_files.replace(tmp_path, 88, json.dumps(REPORT))
    assert os.listdir(tmp_path) == ["88.json"]


def test_a_process_keeps_one_file_open(tmp_path):
    report_files.replace(tmp_path, 88, json.dumps(REPORT))
    before = os.listdir("/proc/self/fd")
    for _ in range(20):
        report_files.replace(tmp_path, 88, json.dumps(REPORT))
    assert len(os.listdir("/proc/self/fd")) == len(before) and os.listdir(tmp_path) == ["88.json"]
