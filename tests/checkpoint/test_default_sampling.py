"""The sampling that a model's files recommend, read or refused at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from bifolio.checkpoint.default_sampling import default_sampling_of
from bifolio.checkpoint.source import ModelSource
from bifolio.errors import CheckpointError
from bifolio.request import DEFAULTED, SamplingParams

PLAIN = {name: getattr(SamplingParams(), name) for name in DEFAULTED}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "max_length": 5, "temperature": None}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, "as it is"),
        ({"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1}, "as it is"),
        ({"top_k": -1, "top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 0, "top_p": 0}, {"top_p": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"temperature": 0.0}),
        (
            {"do_sample": False, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
    ],
)
def test_generation_config_gives_defaults_for_what_it_names(
    config: dict[str, Any], changes: dict[str, Any] | str
) -> None:
    if isinstance(changes, str):
        changes = {name: value for name, value in config.items() if name in DEFAULTED}
    found = default_sampling_of(config)
    assert found.as_dict() == PLAIN | changes
    assert bool(str(found)) == bool(changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", [0.6]),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_k", 2**70),
        ("top_p", 1.2),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_key_and_option(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}.*hint") as error:
        default_sampling_of({key: value})
    assert "--generation-config none" in str(error.value)


def test_settings_that_are_not_applied_are_named() -> None:
    off = {"typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": []}
    assert default_sampling_of(off).not_applied == ()
    on = {"typical_p": 0.9, "num_beams": 4, "bad_words_ids": [[1]]}
    assert set(default_sampling_of(on).not_applied) == set(on)


def test_gguf_metadata_says_the_same_in_its_own_names(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.95)
    writer.add_sampling_min_p(0.01)
    writer.add_sampling_penalty_repeat(1.1)
    writer.add_sampling_mirostat(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = ModelSource("m", path).default_sampling
    assert found.as_dict() == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
    }
    assert str(found).endswith("repetition_penalty 1.1 (GGUF metadata)")
    assert found.not_applied == ("mirostat",)
    with pytest.raises(CheckpointError, match=r"GGUF metadata: top_p: value 2\.0 must be"):
        default_sampling_of({}, {"general.sampling.top_p": 2.0})


def test_a_folder_is_read_from_its_generation_config(tmp_path: Path) -> None:
    assert ModelSource("m", tmp_path).default_sampling.as_dict() == PLAIN
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    assert ModelSource("m", tmp_path).default_sampling.params.top_k == 7
