"""Headers of safetensors files: what is read is what the package reads, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from bifolio.checkpoint.safetensors_folder import DTYPES, SafetensorsFolder
from bifolio.errors import CheckpointError, UnsupportedError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.int8),
    "empty": torch.empty(0, 3),
    "one": torch.tensor(7.0, dtype=torch.bfloat16),
}
SOUND = save(TENSORS, {"format": "pt", "shape": "text that is no shape"})


def written(folder: Path, data: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(data)
    return folder


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_every_type_of_the_package_is_read_as_it_reads_it(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(8, dtype=torch.uint8).view(torch.bool if name == "BOOL" else dtype)
        for name, dtype in DTYPES.items()
    }
    tensors["BOOL"] = torch.tensor([True, False])
    files = SafetensorsFolder(written(tmp_path, save(tensors)))
    assert files.dtypes == {name: name for name in DTYPES}
    for name, tensor in tensors.items():
        assert torch.equal(files.tensor(name).view(torch.uint8), tensor.view(torch.uint8))


ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        ({"t": ENTRY}, 7, "end at byte"),
        ({"t": ENTRY}, 9, "end at byte"),
        ({"t": ENTRY | {"data_offsets": [1, 9]}}, 9, "begins at byte"),
        ({"t": ENTRY, "u": ENTRY}, 8, "begins at byte"),
        ({"t": ENTRY | {"data_offsets": [8, 0]}}, 8, "of 8 bytes is at"),
        ({"t": ENTRY | {"data_offsets": [0, 8, 8]}}, 8, "of 8 bytes is at"),
        ({"t": ENTRY | {"shape": [-2]}}, 8, "for a shape or a place"),
        ({"t": ENTRY | {"shape": [2**62, 2**62]}}, 8, "bytes is at"),
        ({"t": ENTRY | {"shape": [1] * 5000}}, 8, "for a shape or a place"),
        ({"t": ENTRY | {"shape": "2"}}, 8, "for a shape or a place"),
        ({"t": ENTRY | {"shape": [True]}}, 8, "for a shape or a place"),
        ({"t": {"dtype": "F32"}}, 8, "is described by"),
        ({"t": [1]}, 8, "is described by"),
        ({"t\n": ENTRY}, 8, "printable"),
        ([1], 0, "not an object"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(
    header: Any, data: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        SafetensorsFolder(written(tmp_path, with_header(header, b"\0" * data)))


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    data = with_header({"t": ENTRY | {"dtype": "F3"}}, b"\0" * 8)
    with pytest.raises(UnsupportedError, match="t is stored as 'F3'"):
        SafetensorsFolder(written(tmp_path, data))


@pytest.mark.parametrize("size", [0, 1, 2**40, 2**64 - 1, 200_000_000])
def test_a_header_of_absurd_size_takes_no_memory(size: int, tmp_path: Path) -> None:
    folder = written(tmp_path, size.to_bytes(8, "little") + b"{}")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="its header would have"):
        SafetensorsFolder(folder)


@given(
    at=st.integers(0, len(SOUND) - 1),
    change=st.binary(min_size=0, max_size=3),
    removed=st.integers(0, 3),
)
def test_what_is_read_of_a_damaged_file_is_what_the_package_reads(
    at: int, change: bytes, removed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = SOUND[:at] + change + SOUND[at + removed :]
    folder = written(tmp_path_factory.mktemp("st"), data)
    try:
        files = SafetensorsFolder(folder)
    except (CheckpointError, UnsupportedError):
        return  # we refuse more: names twice or unprintable, many dimensions
    wanted = load_file(folder / "model.safetensors")
    assert wanted.keys() == files.shapes.keys()
    for name, tensor in wanted.items():
        found = files.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    files = SafetensorsFolder(written(tmp_path, SOUND))
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in TENSORS.items())
    with pytest.raises(SafetensorError):
        load_file(written(tmp_path, SOUND[:-1]) / "model.safetensors")
