from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bifolio.cli import launch
from bifolio.cli.main import app, load
from bifolio.config import EngineConfig, PoolsConfig, ServerConfig


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, dict[str, Any]]]:
    calls: list[tuple[ServerConfig, dict[str, Any]]] = []
    monkeypatch.setattr(launch, "launch", lambda config, **rest: calls.append((config, rest)))
    return calls


def serve(*arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], **options)


EVERY_OPTION = {
    "--kernels": ("reference", "engine.kernels", "reference"),
    "--threads": ("3", "engine.threads", 3),
    "--experts": ("mapped", "engine.experts", "mapped"),
    "--expert-memory": ("1GiB", "engine.expert_memory", 2**30),
    "--cache-memory": ("256MiB", "engine.cache_memory", 256 * 2**20),
    "--max-model-len": ("512", "engine.max_model_len", 512),
    "--max-num-seqs": ("8", "engine.max_num_seqs", 8),
    "--max-step-tokens": ("128", "engine.max_step_tokens", 128),
    "--max-waiting": ("9", "engine.max_waiting", 9),
    "--no-integrity": (None, "engine.integrity", False),
    "--share-prefix-cache": (None, "share_prefix_cache", True),
    "--no-prefix-cache": (None, "engine.prefix_cache", False),
    "--log-level": ("error", "engine.log_level", "error"),
    "--host": ("::1", "host", "::1"),
    "--port": ("0", "port", 0),
    "--max-request-bytes": ("1MiB", "max_request_bytes", 2**20),
    "--api-key": ("k", "api_keys", ("k",)),
    "--allowed-host": ("Box.lan", "allowed_hosts", ("box.lan",)),
    "--cors-origin": ("https://App.example/", "cors_origins", ("https://app.example",)),
    "--max-connections": ("40", "max_connections", 40),
    "--max-connections-per-address": ("9", "max_connections_per_address", 9),
    "--admin-key": ("k", "admin_key", "k"),
    "--served-name": ("n", "served_name", "n"),
    "--chat-template": ("t.jinja", "chat_template", "t.jinja"),
    "--generation-config": ("none", "generation_config", "none"),
    "--drain-seconds": ("1.5", "drain_seconds", 1.5),
    "--request-timeout": ("9.5", "request_timeout", 9.5),
}


def value(config: ServerConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("option", EVERY_OPTION)
def test_each_option_sets_its_value_and_only_that(
    launched: list[tuple[ServerConfig, dict[str, Any]]], option: str
) -> None:
    text, path, expected = EVERY_OPTION[option]
    result = serve("m", option, *([] if text is None else [text]))
    assert result.exit_code == 0, result.stderr
    config, _ = launched[0]
    assert value(config, path) == expected
    plain = ServerConfig(engine=EngineConfig(model="m"))
    others = [p for _, p, _ in EVERY_OPTION.values() if p != path]
    assert [value(config, p) for p in others] == [value(plain, p) for p in others]


@pytest.mark.parametrize("option", EVERY_OPTION)
def test_each_option_may_stand_in_the_environment(
    launched: list[tuple[ServerConfig, dict[str, Any]]], option: str
) -> None:
    text, path, expected = EVERY_OPTION[option]
    name = option.removeprefix("--").removeprefix("no-").replace("-", "_").upper()
    variable = "BIFOLIO_PORT_NUMBER" if name == "PORT" else f"BIFOLIO_{name}"
    result = serve("m", env={variable: ("0", "1")[bool(expected)] if text is None else text})
    assert result.exit_code == 0, result.stderr
    assert value(launched[0][0], path) == expected


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    launched: list[tuple[ServerConfig, dict[str, Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('model = "m"\nthreads = 1\nmax_waiting = 1\nmax_num_seqs = 1\n')
    environment = {"BIFOLIO_THREADS": "2", "BIFOLIO_MAX_WAITING": "2", "BIFOLIO_INTEGRITY": ""}
    result = serve("--config", str(file), "--threads", "3", env=environment)
    assert result.exit_code == 0, result.stderr
    engine = launched[0][0].engine
    assert (engine.threads, engine.max_waiting, engine.max_num_seqs) == (3, 2, 1)
    assert engine.integrity


def test_an_address_that_kubernetes_sets_for_a_service_is_not_taken_for_the_port(
    launched: list[tuple[ServerConfig, dict[str, Any]]],
) -> None:
    assert serve("m", env={"BIFOLIO_PORT": "tcp://10.0.0.1:80"}).exit_code == 0
    assert launched[0][0].port == 8000


def test_every_value_of_the_configuration_has_an_option() -> None:
    fields = {f"engine.{name}" for name in EngineConfig.model_fields}
    fields |= set(ServerConfig.model_fields) - {"engine"}
    covered = {path for _, path, _ in EVERY_OPTION.values()}
    assert fields - covered == {"engine.model", "engine.plan", "pools"}


def test_two_pools_give_each_phase_its_workers_and_its_formats(
    launched: list[tuple[ServerConfig, dict[str, Any]]],
) -> None:
    options = ["--pools", "2p1d", "--prefill", "fp8/bf16", "--decode", "int4:g32/fp8"]
    options += ["--on-worker-loss", "fail", "--transport", "tcp", "--threads", "3"]
    assert serve("m", *options).exit_code == 0
    config, pools = launched[0][0], launched[0][0].pools
    assert pools is not None
    assert (pools.prefill_workers, pools.decode_workers) == (2, 1)
    assert (str(config.engine.plan), str(pools.decode.plan)) == (
        "fp8/bf16 page=16",
        "int4:g32/fp8 page=16",
    )
    assert (pools.on_worker_loss, pools.transport) == ("fail", "tcp")
    assert config.engine.threads == pools.decode.threads == 3
    assert (config.engine.max_step_tokens, pools.decode.max_step_tokens) == (256, 2048)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pools", "p1d"], "not like 1p1d"),
        (["--pools", "0p1d"], "pools: '0p1d' is not like 1p1d (1 to 64"),
        (["--pools", "1p65d"], "pools: '1p65d' is not like 1p1d (1 to 64"),
        (["--on-worker-loss", "fail"], "give pools=1p1d"),
    ],
)
def test_pools_that_cannot_be_are_refused(options: list[str], words: str) -> None:
    result = serve("m", *options)
    assert result.exit_code != 0
    assert words in result.stderr


def test_plans_of_both_phases_are_read(
    launched: list[tuple[ServerConfig, dict[str, Any]]],
) -> None:
    serve("m", "--plan", "fp8/bf16", "--decode", "int4:g32:a8/bf16", "--until-stdin-closes")
    config, rest = launched[0]
    assert str(config.engine.plan) == "fp8/bf16 → int4:g32:a8/bf16 page=16"
    assert rest == {"until_stdin_closes": True}


def test_keys_may_be_repeated_or_stand_in_the_environment(
    launched: list[tuple[ServerConfig, dict[str, Any]]],
) -> None:
    serve("m", "--api-key", "a", "--api-key", "b")
    serve("m", env={"BIFOLIO_API_KEY": "c d"})
    assert [config.api_keys for config, _ in launched] == [("a", "b"), ("c", "d")]


def test_the_command_line_wins_over_the_file(
    launched: list[tuple[ServerConfig, dict[str, Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('model = "m"\nport = 1\nhost = "::1"\nintegrity = false\napi_keys = ["k"]\n')
    assert serve("--config", str(file), "--port", "2", "--integrity").exit_code == 0
    config, _ = launched[0]
    assert (config.engine.model, config.port, config.host) == ("m", 2, "::1")
    assert (config.engine.integrity, config.api_keys) == (True, ("k",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model given; name one on the command line (`bifolio serve smollm2-135m`)"),
        (["m", "--plan", "int3/bf16"], "unknown weight format 'int3'"),
        (["m", "--prefill", "bf16/bf16", "--decode", "bf16/fp8"], "cannot differ"),
        (["m", "--cache-memory", "much"], "cannot read 'much' as a size"),
        (["m", "--port", "70000"], "port"),
        (["m", "--max-num-seqs", "0"], "max_num_seqs"),
        (["m", "--served-name", ""], "served_name: it is empty"),
        (["m", "--api-key", ""], "api_keys: an empty key lets everybody in"),
        (["m", "--config", "no-such-file.toml"], "no-such-file.toml"),
    ],
)
def test_wishes_that_cannot_work_are_one_line_and_status_2(
    launched: list[tuple[ServerConfig, dict[str, Any]]], arguments: list[str], words: str
) -> None:
    result = serve(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("bifolio: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert launched == []


def test_an_unknown_key_of_the_file_is_named(
    launched: list[tuple[ServerConfig, dict[str, Any]]], tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('model = "m"\nprot = 1\n')
    result = serve("--config", str(file))
    assert result.exit_code == 2
    assert "unknown configuration key 'prot'" in result.stderr


def test_the_defaults_that_help_shows_are_those_of_the_configuration() -> None:
    shown = {
        parameter.name: parameter.show_default
        for parameter in load("serve").params
        if isinstance(parameter.show_default, str)
    }
    config = ServerConfig(engine=EngineConfig(model="m"))
    real = config.engine.model_dump() | config.model_dump()
    for name, text in shown.items():
        match name:
            case "plan":
                assert str(config.engine.plan).split()[0] == text
            case "cache_memory":
                assert real[name] == 2**30
                assert text == "1GiB"
            case "max_request_bytes":
                assert (real[name], text) == (8 * 2**20, "8MiB")
            case "integrity" | "prefix_cache":
                assert (real[name], text) == (True, "on")
            case "request_timeout":
                assert (real[name], text) == (None, "no limit")
            case "share_prefix_cache":
                assert (real[name], text) == (False, "off")
            case "allowed_hosts" | "cors_origins":
                assert real[name] == ()
            case "prefill" | "decode" | "served_name" | "chat_template" | "pools" | "admin_key":
                assert not real.get(name)
            case "on_worker_loss" | "transport":
                assert PoolsConfig.model_fields[name].default == text
            case _:
                assert str(real[name]).removesuffix(".0") == text
