"""Configuration resolves once into frozen values, or is refused with the key and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from bifolio.config import EngineConfig, parse_bytes, resolve, size_text
from bifolio.errors import ConfigError
from bifolio.formats import PrecisionPlan


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("256MiB", 256 * 2**20),
        ("2GB", 2 * 10**9),
        ("2TB", 2 * 10**12),
        ("1.5TiB", 3 * 2**39),
        ("1.5g", 3 * 2**29),
        ("64k", 64 * 2**10),
        ("10 kb", 10_000),
        ("2.01GB", 2_010_000_000),
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes_are_read_with_their_units(text: str | int, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    "text",
    ["1GiB", "1.5GiB", "64MiB", "5000MiB", "900GiB", "2TB", "2GB", "500MB", "16KiB", "100kB", "9"],
)
def test_sizes_are_written_as_they_were_read(text: str) -> None:
    assert size_text(parse_bytes(text)) == text


@pytest.mark.parametrize("count", [0, 1, 1023, 46592, 10**9 + 1, 2**40 - 1, 3 * 2**28, 5 * 10**10])
def test_what_is_written_of_a_size_is_read_as_the_same_size(count: int) -> None:
    assert parse_bytes(size_text(count)) == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1.5.2g", "1 parsec", "1e9", -1, 1.5, True, None]
)
def test_a_size_that_cannot_be_read_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ConfigError, match="write 256MiB"):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 400 + "GiB", "8388608TiB", 2**63])
def test_a_size_beyond_all_machines_is_refused_and_cut(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"more than any machine has|as a size") as raised:
        parse_bytes(text)
    assert len(str(raised.value)) < 200


def test_a_wrong_value_of_an_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"threads: .* \(got 5000\)"):
        EngineConfig.of(model="m", threads=5000)
    with pytest.raises(ConfigError, match=r"max_step_tokens: .*1048576"):
        resolve({"model": "m", "max_step_tokens": 10**11})
    with pytest.raises(ConfigError, match=r"drain_seconds: .*finite"):
        resolve({"model": "m", "drain_seconds": float("inf")})


def test_options_go_where_they_belong() -> None:
    config = resolve({"model": "m", "port": 9000, "cache_memory": "64MiB", "plan": "int8/fp8"})
    assert (config.port, config.engine.model, config.engine.cache_memory) == (9000, "m", 2**26)
    assert config.engine.plan == PrecisionPlan.parse("int8/fp8")


def test_options_win_over_the_file_and_absent_ones_do_not(tmp_path: Path) -> None:
    file = tmp_path / "bifolio.toml"
    file.write_text('model = "from-file"\nport = 1234\nprefill = "fp8/bf16"\n')
    config = resolve({"model": "from-option", "port": None, "host": "::"}, file)
    assert (config.engine.model, config.port, config.host) == ("from-option", 1234, "::")
    assert str(config.engine.plan.prefill) == "fp8/bf16"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"model": "m", "zzz": 1},
            r"unknown configuration key 'zzz'; known keys: .*decode, .*prefill",
        ),
        ({}, r"no model given.*bifolio serve smollm2-135m.*model = "),
        ({"model": ""}, r"no model given"),
        ({"model": "m", "port": 70_000}, r"port: .*65535.*got 70000"),
        ({"model": "m", "port": "web"}, r"port: .*integer.*got 'web'"),
        ({"model": "m", "max_num_seqs": 0}, r"max_num_seqs: .*greater than or equal to 1"),
        ({"model": "m", "threads": 1025}, r"threads: .*less than or equal to 1024"),
        ({"model": "m", "kernels": "fast"}, r"kernels: .*'auto', 'native' or 'reference'"),
        ({"model": "m", "cache_memory": "much"}, r"^cache_memory: cannot read 'much' as a size"),
        ({"model": "m", "served_name": ""}, r"^served_name: it is empty; give a value, or leave"),
        ({"model": "m", "chat_template": ""}, r"^chat_template: it is empty"),
        ({"model": "m", "host": " "}, r"^host: it is empty"),
        ({"model": "m", "api_keys": ["a", ""]}, r"^api_keys: an empty key lets everybody in"),
        ({"model": "m", "api_key": ""}, r"^api_keys: an empty key lets everybody in"),
        (
            {"model": "m", "cors_origin": "localhost:3000"},
            r"^cors_origins: 'localhost:3000': expected \* or SCHEME://HOST\[:PORT\]",
        ),
        ({"model": "m", "cors_origins": ["http://a/b"]}, r"^cors_origins: 'http://a/b': expected"),
        ({"model": "m", "cors_origins": ["null"]}, r"^cors_origins: 'null': expected"),
        (
            {"model": "m", "allowed_host": "box:80"},
            r"^allowed_hosts: 'box:80': expected \* or a na",
        ),
        ({"model": "m", "max_connections": -1}, r"^max_connections: .*greater than or equal to 0"),
        ({"model": "m", "plan": 8}, r"plan.*8.*text"),
        ({"model": "m", "plan": "int3/bf16"}, r"unknown weight format 'int3'"),
        ({"model": "m", "decode": "bf16/fp8"}, r"one cache pool.*bf16.*fp8.*give both the same"),
    ],
)
def test_what_cannot_work_is_refused_by_key_and_value(
    options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(options)


def test_a_wrong_key_is_named_before_a_missing_model_and_without_our_own_objects() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"thread": 2})
    assert str(caught.value) == "unknown configuration key 'thread' (did you mean 'threads'?)"


def test_several_wrong_keys_are_one_line_with_one_list() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"model": "m", "prot": 1, "zzz": 2, "api-key": "s"})
    text = str(caught.value)
    assert text.startswith("unknown configuration keys 'prot' (did you mean 'port'?), 'zzz', ")
    assert text.count("known keys:") == 1


def test_a_table_that_lacks_something_is_not_shown() -> None:
    tls = {"cert": "/private/cert.pem", "key": "/private/key.pem"}
    with pytest.raises(ConfigError, match=r"^tls\.ca: Field required$"):
        resolve({"model": "m", "pools": "1p1d", "transport": "tcp", "tls": tls})


def test_options_that_may_be_repeated_are_known_by_their_singular_too(tmp_path: Path) -> None:
    file = tmp_path / "bifolio.toml"
    file.write_text('model = "m"\napi_key = "a"\n')
    assert resolve({}, file).api_keys == ("a",)
    assert resolve({"api_keys": ("b",)}, file).api_keys == ("b",)
    lists = resolve({"model": "m", "cors_origin": "http://A.b:3/", "allowed_host": "C.d"})
    assert (lists.cors_origins, lists.allowed_hosts) == (("http://a.b:3",), ("c.d",))
    with pytest.raises(ConfigError, match="api_key and api_keys: give one of them"):
        resolve({"model": "m", "api_key": "a-secret", "api_keys": ["b"]})


def test_a_single_key_that_is_no_text_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="api_keys") as caught:
        resolve({"model": "m", "api_key": {"a-secret": 5}})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("keys", ["a-secret", ["a-secret", 5], {"a-secret": 5}])
def test_an_error_does_not_show_the_keys(keys: object) -> None:
    with pytest.raises(ConfigError, match="api_keys") as caught:
        resolve({"model": "m", "api_keys": keys})
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    with pytest.raises(ConfigError) as caught:
        resolve({"model": "m"}, absent)
    assert str(caught.value).endswith(f"file {absent}: No such file or directory")
    broken = tmp_path / "broken.toml"
    broken.write_text("model = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        resolve({}, broken)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        resolve({}, binary)


def test_a_configuration_does_not_change() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(ValidationError, match="frozen"):
        config.model = "other"  # type: ignore[misc]
