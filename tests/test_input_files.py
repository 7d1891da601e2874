"""Files that others wrote are read whole or refused in a line: no hang, no signal, no traceback."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from bifolio.errors import CheckpointError
from bifolio.input_files import (
    MOST_DEPTH,
    described,
    parse_json,
    parse_toml,
    read_bytes,
    read_object,
    read_text,
    visible,
)

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10)
    assert read_bytes(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="it has 10 bytes than the 9 that are read"):
        read_bytes(path, 9)


def test_a_file_of_gigabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"config\.json: it has 1,099,511,627,776 bytes"):
        read_object(path)


def test_what_is_no_regular_file_is_named_at_once(tmp_path: Path) -> None:
    """A pipe without a writer would block for ever, a device would never end."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
    for name, what in {
        "folder": "it is a folder, not a file",
        "pipe": "it is a pipe, not a file",
        "zeros": "it is a device, not a file",
        "gone": "it is a link to a file that is not there",
        "loop": "symbolic links",
        "socket": "it is a socket, not a file",
    }.items():
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}: .*{what}"):
            read_object(tmp_path / name)
    assert read_object(tmp_path / "absent") is None


def test_pipes_and_devices_of_the_command_line_are_read_up_to_the_limit(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, "č".encode())
    os.close(write)
    assert read_text(Path(f"/dev/fd/{read}"), pipe=True) == "č"
    os.close(read)
    with pytest.raises(OSError, match="it has more bytes than the 1,000"):
        read_bytes(Path("/dev/zero"), 1000, pipe=True)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "f") == "{}"
    (tmp_path / "f").write_bytes(b"\xff\xfe{\0}\0")
    with pytest.raises(ValueError, match="not UTF-8 text"):
        read_text(tmp_path / "f")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (POINTER, "git lfs pull"),
        (b"# xet version 0\nfilesize = 1\n", "hf download"),
        (b"/annex/objects/SHA256E-s1--00\n", "git annex get"),
    ],
)
def test_a_pointer_in_place_of_a_file_is_named_with_what_to_run(
    head: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "f.json").write_bytes(head)
    with pytest.raises(CheckpointError, match=said):
        read_object(tmp_path / "f.json")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"  <!DOCTYPE html><title>Log in</title>", "HTML page"),
        (b"<html lang=en>", "HTML page"),
        (b"PK\x03\x04rest", "ZIP archive"),
        (b"\x80\x02}q\x00", "pickle"),
        (b"\x1f\x8b\x08", "compressed"),
        (b"\0\x05\x16\x07\0\x02\0\0Mac OS X", "AppleDouble"),
        (b"\0" * 100, "zeros"),
        (b"", "empty"),
        (b"x" * 257 + b"ustar", "archive"),
    ],
)
def test_other_kinds_of_file_are_known_by_their_first_bytes(head: bytes, said: str) -> None:
    assert said in described(head)


def test_nothing_is_said_of_bytes_that_could_be_anything() -> None:
    assert described(b"{}") == described(b"\x07\x00\x00\x00\x00\x00\x00\x00{") == ""


DEEP = MOST_DEPTH + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("", "empty"),
        ("[" * DEEP + "]" * DEEP, "nested more than 64 deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 64 deep"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands there twice"),
        (f'{{"a": {"9" * 5000}}}', "a number of 5,000 digits"),
        (r'{"a": ["\ud83d\ude00", "x\udc00"]}', r"'\\udc00', half of a surrogate pair"),
        (r'{"\ud800": 1}', "half of a surrogate pair"),
        ("[" + "[]," * 5_000_000 + "[]]", "more than 8,000,000 values"),
    ],
)
def test_json_that_no_reader_wants_is_a_value_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_json_at_the_limits_is_read() -> None:
    nested = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json.dumps(parse_json(nested)) == nested
    assert parse_json(r'["\ud83d\ude00", 5, null]') == ["😀", 5, None]
    assert parse_json("9" * 100) == 10**100 - 1


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, "a = " + "9" * 5000, "a ="])
def test_toml_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_toml(text)


def test_names_that_begin_with_a_dot_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "in").mkdir()
    for name in ("b.json", "a.json", "._a.json", ".DS_Store", ".git/c.json", "in/d.json"):
        (tmp_path / name).write_text("")
    assert visible(tmp_path, "*.json") == [tmp_path / "a.json", tmp_path / "b.json"]
    assert visible(tmp_path, "*/*.json") == [tmp_path / "in" / "d.json"]
    assert visible(tmp_path / "nowhere", "*") == []
