"""The GGUF reader on sound files of every kind of entry, and on every way of being damaged."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.checkpoint.gguf import GGUFFile
from bifolio.errors import CheckpointError, UnsupportedError

VALUES: dict[str, tuple[int, bytes, Any]] = {
    "a.u8": (0, struct.pack("<B", 250), 250),
    "a.i8": (1, struct.pack("<b", -5), -5),
    "a.u16": (2, struct.pack("<H", 65000), 65000),
    "a.i16": (3, struct.pack("<h", -300), -300),
    "a.u32": (4, struct.pack("<I", 4_000_000_000), 4_000_000_000),
    "a.i32": (5, struct.pack("<i", -70_000), -70_000),
    "a.f32": (6, struct.pack("<f", 0.5), 0.5),
    "a.bool": (7, b"\x01", True),
    "a.text": (8, struct.pack("<Q", 5) + "Č é".encode(), "Č é"),
    "a.u64": (10, struct.pack("<Q", 2**63), 2**63),
    "a.i64": (11, struct.pack("<q", -(2**40)), -(2**40)),
    "a.f64": (12, struct.pack("<d", 1e-300), 1e-300),
    "a.ints": (9, struct.pack("<IQ3i", 5, 3, 1, -2, 3), [1, -2, 3]),
    "a.texts": (9, struct.pack("<IQQcQ2s", 8, 2, 1, b"x", 2, b"yz"), ["x", "yz"]),
    "a.empty": (9, struct.pack("<IQ", 8, 0), []),
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor_entry(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    sides = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sides + struct.pack("<IQ", kind, offset)


def build(
    entries: list[tuple[str, int, bytes]],
    tensors: list[bytes],
    data: bytes,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    for name, kind, payload in entries:
        head += text(name) + struct.pack("<I", kind) + payload
    head += b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


MATRIX = np.arange(6, dtype=np.float32)
SOUND_ENTRIES = [(name, kind, payload) for name, (kind, payload, _) in VALUES.items()]
SOUND_TENSORS = [tensor_entry("m", [3, 2], 0, 0), tensor_entry("v", [4], 1, 32)]
SOUND_DATA = MATRIX.tobytes() + b"\0" * 8 + np.arange(4, dtype=np.float16).tobytes()
SOUND = build(SOUND_ENTRIES, SOUND_TENSORS, SOUND_DATA)


def opened(tmp_path: Path, data: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return GGUFFile(path)


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_and_the_tensors_are_read(version: int, tmp_path: Path) -> None:
    data = build(SOUND_ENTRIES, SOUND_TENSORS, SOUND_DATA, version=version)
    file = opened(tmp_path, data)
    assert file.metadata == {name: value for name, (_, _, value) in VALUES.items()}
    assert {n: (t.shape, t.nbytes) for n, t in file.tensors.items()} == {
        "m": ((2, 3), 24),
        "v": ((4,), 8),
    }
    assert np.array_equal(np.frombuffer(file.raw("m"), np.float32), MATRIX)
    assert np.frombuffer(file.raw("v"), np.float16).tolist() == [0, 1, 2, 3]


def test_the_alignment_of_the_file_is_kept(tmp_path: Path) -> None:
    entries = [("general.alignment", 4, struct.pack("<I", 128))]
    tensors = [tensor_entry("a", [1], 0, 0), tensor_entry("b", [1], 0, 128)]
    data = struct.pack("<f124xf", 1.5, 2.5)
    file = opened(tmp_path, build(entries, tensors, data, alignment=128))
    assert struct.unpack("<f", file.raw("b")) == (2.5,)


def test_a_file_cut_at_any_byte_is_refused_by_name(tmp_path: Path) -> None:
    """Whatever the length, it is a CheckpointError that names the file; nothing else, no crash."""
    path = tmp_path / "cut.gguf"
    for length in range(len(SOUND)):
        path.write_bytes(SOUND[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_a_file_with_any_byte_changed_is_read_or_refused_but_never_crashes(tmp_path: Path) -> None:
    path = tmp_path / "changed.gguf"
    head = SOUND.index(MATRIX.tobytes())
    for at in range(head):
        for flip in (0x01, 0x80):
            path.write_bytes(SOUND[:at] + bytes([SOUND[at] ^ flip]) + SOUND[at + 1 :])
            try:
                file = GGUFFile(path)
            except (CheckpointError, UnsupportedError):
                continue
            for name, tensor in file.tensors.items():
                assert len(file.raw(name)) == tensor.nbytes


U8_ONE = (0, b"\x01")
DAMAGE: dict[str, tuple[bytes, str]] = {
    "not GGUF": (b"GGML" + SOUND[4:], "GGUF"),
    "a key twice": (build([("k", *U8_ONE), ("k", *U8_ONE)], [], b""), "k stands there twice"),
    "a tensor twice": (
        build([], [tensor_entry("t", [1], 0, 0), tensor_entry("t", [1], 0, 32)], b"\0" * 64),
        "t stands there twice",
    ),
    "an unknown value type": (build([("k", 13, b"\0" * 16)], [], b""), "unknown metadata type 13"),
    "no dimensions": (build([], [tensor_entry("t", [], 0, 0)], b"\0" * 32), "0 dimensions"),
    "an empty side": (build([], [tensor_entry("t", [0, 2], 0, 0)], b"\0" * 32), "does not fit"),
    "half a block": (build([], [tensor_entry("t", [16], 8, 0)], b"\0" * 34), "blocks of 32"),
    "data beyond the end": (build([], [tensor_entry("t", [9], 0, 0)], b"\0" * 32), "reaches from"),
    "a crooked offset": (build([], [tensor_entry("t", [1], 0, 4)], b"\0" * 32), "reaches from"),
    "overlap": (
        build([], [tensor_entry("t", [16], 0, 0), tensor_entry("u", [1], 0, 32)], b"\0" * 64),
        "t and u overlap",
    ),
    "a crooked alignment": (
        build([("general.alignment", 4, struct.pack("<I", 24))], [], b""),
        "general.alignment 24",
    ),
    "text that is none": (build([("k", 8, struct.pack("<Q", 1) + b"\xff")], [], b""), "UTF-8"),
    "more entries than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "ends within"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_with_its_cause(kind: str, tmp_path: Path) -> None:
    data, cause = DAMAGE[kind]
    with pytest.raises(CheckpointError, match=cause):
        opened(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (build([], [], b"", version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + SOUND[8:], "little-endian"),
        (build([], [tensor_entry("t", [256], 16, 0)], b"\0" * 66), "t has type IQ2_XXS"),
        (build([], [tensor_entry("t", [256], 77, 0)], b"\0" * 66), "t has type 77"),
        (build([("k", 9, struct.pack("<IQ", 9, 1))], [], b""), "arrays of arrays"),
    ],
)
def test_what_cannot_be_read_is_named(data: bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=named):
        opened(tmp_path, data)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf"):
        GGUFFile(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        opened(tmp_path, b"")
