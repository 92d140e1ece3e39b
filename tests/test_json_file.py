"""Files that a user names as JSON and that are something else: none hangs, fills the memory or goes untold."""

import os

import pytest

from deepseek_v4_sm120.patching import json_file


def test_what_is_json_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": [1, null, "\\u00e9"]}')
    assert json_file.load(path) == {"a": [1, None, "é"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b"9" * 5000, "is not JSON"),
        (b"[" * 100_000, "too many levels"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "too many levels"),
        (b" " * (1 << 20) + b"1", "more than 1 MiB"),
    ],
)
def test_what_is_none_is_said(tmp_path, content, words):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(json_file.JsonFileError, match=words):
        json_file.load(path, 1 << 20)


@pytest.mark.parametrize("path", ["/dev/null", "/", "", "/nowhere", "/x" * 3000])
def test_what_is_no_file_is_not_read(path):
    with pytest.raises(json_file.JsonFileError, match="^cannot be read: "):
        json_file.load(path)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(json_file.JsonFileError, match="a FIFO, not a file"):
        json_file.load(tmp_path / "fifo")
