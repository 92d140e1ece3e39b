"""What is known of releases' own files (known_files/): it is what parsing finds, and when it may stand for that."""

import errno
import json
from pathlib import Path

import pytest

from deepseek_v4_sm120.patching import contract, known_files
from deepseek_v4_sm120.patching.contract import ConsumedKeys, Parameters
from deepseek_v4_sm120.patching.engine import APPLIED, BROKEN, READY, Engine
from deepseek_v4_sm120.patching.known_files import KnownFiles
from deepseek_v4_sm120.patching.sources import digest as digest_of_file
from deepseek_v4_sm120.settings import Settings
from deepseek_v4_sm120.sglang_patches.table import KNOWN_FILES, TABLE
from tests.patching import review
from tests.patching.small_host import FUNCTION, HOST, digest, function_target, make, states
from tests.patching.wheels import RELEASES, every_release, unpacked

TARGET = function_target()
READ = {"eng_host.caller": HOST["eng_host/caller.py"], "eng_host.kernels": FUNCTION}
ANSWER = "0123456789abcdef"  # no digest of the function: who says it has not parsed


def known_of(files=READ, target=TARGET) -> KnownFiles:
    question = known_files.question(target.where, target.contract, target.caller)
    digests = {module: digest_of_file(text.encode()) for module, text in files.items()}
    return KnownFiles(digests, {question: f"{ANSWER} {' '.join(READ)}"})


@every_release()
def test_what_is_known_is_what_parsing_the_wheel_finds(version):
    """Stale: python3 tests/patching/review.py RELEASE --record"""
    found = json.loads((KNOWN_FILES / f"{version}.json").read_text())
    assert found == review.of_files(version)
    assert len(found["fits"]) > 40 and known_files.read(KNOWN_FILES, version).problem is None


def test_there_is_one_for_every_release_and_no_other():
    assert {path.name for path in KNOWN_FILES.iterdir()} == {f"{release}.json" for release in RELEASES}


def test_a_server_of_a_release_parses_nothing_of_it(monkeypatch):
    """The wheel as pip unpacks it: every row is reviewed, and no syntax tree was asked for."""
    monkeypatch.syspath_prepend(unpacked(RELEASES[-1]))
    engine = Engine(TABLE, host="sglang", settings=Settings())
    monkeypatch.setattr(engine.sources, "parse", lambda module: pytest.fail(f"{module} was parsed"))
    ready = [record for record in engine.survey() if record.state == READY]
    assert len(ready) > 60 and {record.review for record in ready} == {"reviewed"}


def test_a_known_file_is_not_parsed(host, monkeypatch):
    host()
    engine = make(known=known_of())
    monkeypatch.setattr(contract, "check", lambda *asked: pytest.fail("it was parsed"))
    from eng_host import caller

    assert caller.run() == ("ours", 1) and states(engine) == [APPLIED] and engine.records[0].digest == ANSWER


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"eng_host/kernels.py": FUNCTION + "# by a user\n"}, known_of()),
        ({"eng_host/caller.py": HOST["eng_host/caller.py"] + "\n"}, known_of()),
        ({}, known_of(target=function_target(contract=ConsumedKeys(("a",))))),
        ({}, known_of(target=function_target(contract=Parameters(("a", "b"))))),
        ({}, known_of(target=function_target(caller=None))),
        ({}, known_of(target=function_target(where="eng_host.kernels:g"))),
        ({}, KnownFiles()),
    ],
)
def test_whatever_differs_is_parsed(host, changes, known):
    host(changes)
    engine = make(known=known)
    import eng_host.kernels  # noqa: F401

    assert states(engine) == [APPLIED] and engine.records[0].digest == digest()


def test_what_does_not_fit_any_more_is_found(host, said):
    host({"eng_host/kernels.py": FUNCTION.replace("'b'", "'c'")})
    engine = make(known=known_of())
    import eng_host.main  # noqa: F401

    assert states(engine) == [BROKEN] and "missing b; unexpected c" in engine.records[0].reason


def test_a_file_that_is_gone_or_cannot_be_read_is_not_known(host, monkeypatch):
    host({"eng_host/caller.py": None})
    assert "there is no module eng_host.caller" in make(known=known_of(), start=False).survey()[0].reason
    host()

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    engine = make(known=known_of(), start=False)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert engine.sources.digest("eng_host.kernels") is None
    assert "eng_host.kernels cannot be read: Permission denied" in engine.survey()[0].reason


def test_each_file_is_read_once_until_it_is_forgotten(host, tmp_path):
    host()
    sources = make(start=False).sources
    first = sources.digest("eng_host.kernels")
    (tmp_path / "eng_host/kernels.py").write_text("another")
    assert sources.digest("eng_host.kernels") == first == digest_of_file(FUNCTION.encode())
    sources.forget()
    assert sources.digest("eng_host.kernels") == digest_of_file(b"another")


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"\xff\x00", b"[]", b'{"files": {}}', b'{"files": [], "fits": {}}', b'{"files": {}, "fits": {"q": 7}}'),
        *(b'{"files": {}, "fits": {"q": "digest m"}}', b'{"files": {"m": "d"}, "fits": {"q": "digest"}}'),
        b'{"files": {"m": "d"}, "fits": {"q": ""}}',
    ],
)
def test_a_damaged_one_is_told_and_nothing_is_known(host, said, tmp_path, content):
    (tmp_path / "1.2.0.json").write_bytes(content)
    known = known_files.read(tmp_path, "1.2.0")
    assert str(tmp_path / "1.2.0.json") in known.problem and (known.files, known.fits) == ({}, {})
    host()
    engine = make(known=known)
    import eng_host.main  # noqa: F401

    assert engine.survey()[0].digest == digest() and [known.problem in text for _, text in said] == [True]


def test_of_a_release_that_nobody_recorded_nothing_is_known(tmp_path):
    assert known_files.read(tmp_path, "9.9.9") == known_files.read(tmp_path, None) == KnownFiles()
