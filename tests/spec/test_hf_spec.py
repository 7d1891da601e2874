"""`config.json` is read with types; what is not computed is refused with the name of its key."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from bifolio.errors import CheckpointError, UnsupportedError
from bifolio.spec.hf import read_spec
from bifolio.spec.model import ModelSpec, RopeSpec
from support.tiny import LLAMA3_ROPE, YARN_ROPE, tiny_config

L, G = "sliding_attention", "full_attention"


def test_every_number_of_a_llama_arrives() -> None:
    config = tiny_config(
        "llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    )
    assert read_spec(config, {"eos_token_id": [2, 0]}) == ModelSpec(
        architecture="llama",
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        vocab=320,
        max_position=512,
        rms_eps=1e-5,
        rope=RopeSpec(theta=10_000.0, dim=16),
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        windows=(None, None),
        stop_ids=(2, 0),
        bos_id=0,
    )


def test_families_differ_in_biases_and_norms() -> None:
    flags = {
        family: (spec.qkv_bias, spec.output_bias, spec.qk_norm)
        for family in ("llama", "qwen2", "qwen3")
        for spec in (read_spec(tiny_config(family)),)
    }
    assert flags == {
        "llama": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (False, False, True),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config: dict[str, Any] = {key: tiny_config(family)[key] for key in (*sizes, "vocab_size")}
    config |= {"model_type": family, "num_key_value_heads": 2}
    spec = read_spec(config)
    judge = transformers.AutoConfig.for_model(**config)
    assert spec.max_position == judge.max_position_embeddings
    assert spec.rms_eps == judge.rms_norm_eps
    assert spec.tie_embeddings == judge.tie_word_embeddings
    assert spec.rope.theta == judge.rope_parameters["rope_theta"]
    assert spec.head_dim == getattr(judge, "head_dim", 16)


@pytest.mark.parametrize(
    ("eos", "generation", "wanted"),
    [
        (2, None, (2,)),
        (2, 7, (2, 7)),
        ([2, 3], [3, 4], (2, 3, 4)),
        (None, [5], (5,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_end_tokens_are_joined(eos: Any, generation: Any, wanted: tuple[int, ...]) -> None:
    config = tiny_config("llama", eos_token_id=eos)
    assert read_spec(config, {"eos_token_id": generation}).stop_ids == wanted
    if generation is None:
        assert read_spec(config).stop_ids == wanted


# Rotation


def test_older_and_newer_spellings_of_rope_mean_the_same() -> None:
    newer = tiny_config("llama", rope_parameters=LLAMA3_ROPE)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    older = tiny_config("llama", rope_scaling=scaling, rope_theta=10_000.0)
    del older["rope_parameters"]
    assert read_spec(older) == read_spec(newer)
    scaling["type"] = scaling.pop("rope_type")
    assert read_spec(older) == read_spec(newer)
    assert read_spec(newer).rope == RopeSpec(
        theta=10_000.0,
        dim=16,
        kind="llama3",
        factor=8.0,
        original_max_position=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("places", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_scaling": YARN, "rope_theta": 5e5}, 5e5),
        ({"rope_scaling": YARN | {"rope_theta": 5e5}}, 5e5),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_scaling": YARN | {"rope_type": "yarn"}, "rope_theta": 5e5}, 5e5),
        ({"rope_scaling": None, "rope_parameters": {}}, 1e4),
    ],
)
def test_theta_is_found_wherever_it_stands(places: dict[str, Any], theta: float) -> None:
    rope = read_spec(tiny_config("llama", **({"rope_parameters": None} | places))).rope
    assert rope.theta == theta
    scaled = places.get("rope_scaling") is not None
    assert (rope.kind, rope.factor) == (("yarn", 4.0) if scaled else ("default", 1.0))


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
        (
            {"rope_scaling": YARN | {"rope_theta": 1e4}, "rope_theta": 5e5},
            "rope_scaling.rope_theta",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            "rope_parameters.rope_type is 'default' and rope_scaling.type is 'yarn'",
        ),
        ({"rope_scaling": YARN | {"rope_type": "llama3"}}, "rope_scaling.type is 'yarn'"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 128},
            "rope_scaling.original_max_position_embeddings is 64",
        ),
    ],
)
def test_places_that_contradict_each_other_about_rotation_are_named(
    places: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_spec(tiny_config("llama", **({"rope_parameters": None} | places)))


@pytest.mark.parametrize(
    "key", ["rope_params", "rope", "rotary", "rotary_emb_base", "ropeScaling", "yarn", "rope_ratio"]
)
def test_a_section_about_rotation_under_another_name_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedError, match=f"unknown key '{key}' about rotation"):
        read_spec(tiny_config("llama", **{key: {"rope_theta": 1e6}}))


def test_keys_that_only_sound_like_rotation_are_not_its_matter() -> None:
    plain = read_spec(tiny_config("llama"))
    assert read_spec(tiny_config("llama", properties={"a": 1}, europe=1, rope_new=None)) == plain


def test_defaults_that_no_tensor_could_contradict_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_spec(tiny_config("llama"))
    assert not caplog.messages
    config = tiny_config(
        "llama", rope_parameters=None, rms_norm_eps=None, max_position_embeddings=None
    )
    read_spec(config)
    assert len(caplog.messages) == 1
    said = "of llama in transformers: max_position_embeddings=2048, rms_norm_eps=1e-06, "
    assert f"{said}rope_theta=10000.0" in caplog.messages[0]


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        (LLAMA3_ROPE | {"low_freq_factor": 4.0}, "low_freq_factor is 4"),
        (YARN_ROPE | {"factor": 0}, "factor"),
        (YARN_ROPE | {"mscale": 1e200}, "mscale"),
        (YARN_ROPE | {"beta_fast": float("inf")}, "beta_fast"),
    ],
)
def test_numbers_that_make_no_rotation_are_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_spec(tiny_config("llama", rope_parameters=rope))


def test_yarn_fills_in_what_is_absent() -> None:
    rope = read_spec(tiny_config("llama", rope_parameters=YARN_ROPE)).rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor is None
    bare = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    assert read_spec(tiny_config("llama", rope_parameters=bare)).rope.factor == 4.0


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "proportional", "su"])
def test_an_unknown_rope_type_is_named(kind: str) -> None:
    config = tiny_config("llama", rope_parameters={"rope_type": kind, "factor": 2.0})
    with pytest.raises(UnsupportedError, match=f"rope_type='{kind}'"):
        read_spec(config)


@pytest.mark.parametrize(
    "change",
    [{"mrope_section": [1, 2]}, {"partial_rotary_factor": 0.5}, {L: {"rope_theta": 1.0}}],
)
def test_an_unknown_key_of_rope_is_named(change: dict[str, Any]) -> None:
    config = tiny_config("qwen2", rope_parameters={"rope_type": "default"} | change)
    with pytest.raises(UnsupportedError, match=next(iter(change))):
        read_spec(config)


# Windows


@pytest.mark.parametrize(
    ("family", "change", "wanted"),
    [
        ("qwen2", {"sliding_window": 8}, (None,) * 4),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, (None,) * 4),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [L, L, L, G]},
            (8, 8, 8, None),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [G] * 4},
            (None,) * 4,
        ),
        ("llama", {"sliding_window": 8, "layer_types": [L, G, L, G]}, (8, None, 8, None)),
        ("llama", {"sliding_window": 8, "layer_types": [G] * 4}, (None,) * 4),
        ("llama", {"sliding_window": None}, (None,) * 4),
    ],
)
def test_layer_types_decide_which_layers_have_a_window(
    family: str, change: dict[str, Any], wanted: tuple[int | None, ...]
) -> None:
    assert read_spec(tiny_config(family, **change)).windows == wanted


@pytest.mark.parametrize(
    ("family", "change", "error", "named"),
    [
        ("llama", {"sliding_window": 8}, UnsupportedError, "layer_types"),
        ("qwen2", {"use_sliding_window": True}, CheckpointError, "sliding_window is not set"),
        ("qwen2", {"layer_types": [L] * 4, "sliding_window": 8}, CheckpointError, "not set"),
        ("qwen3", {"layer_types": [G] * 3}, CheckpointError, "3 layers of 4"),
        ("qwen3", {"layer_types": [G] * 3 + ["linear"]}, UnsupportedError, "'linear'"),
        ("qwen3", {"sliding_window_pattern": 6}, UnsupportedError, "sliding_window_pattern"),
    ],
)
def test_contradictory_windows_are_refused(
    family: str, change: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_spec(tiny_config(family, **change))


# Refusals


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mamba"),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("num_experts", 8),
        ("final_logit_softcapping", 30.0),
        ("logits_scaling", 8.0),
    ],
)
def test_an_unsupported_value_is_refused_by_the_name_of_its_key(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=key):
        read_spec(tiny_config("llama", **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", 10**90),
        ("rms_norm_eps", 10**90 * 10**300),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 0),
        ("vocab_size", None),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [2, -1]),
        ("layer_types", "full_attention"),
        ("rope_parameters", [1]),
        ("model_type", 3),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
    ],
)
def test_a_wrong_or_missing_value_is_refused_by_the_name_of_its_key(key: str, value: Any) -> None:
    named = {"num_key_value_heads": "key-value heads", "rope_parameters": "rope"}
    with pytest.raises(CheckpointError, match=named.get(key, key)):
        read_spec(tiny_config("llama", **{key: value}))


def test_a_hidden_size_that_heads_do_not_divide_needs_head_dim() -> None:
    config = tiny_config("llama", num_attention_heads=6, num_key_value_heads=2, head_dim=None)
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        read_spec(config)
