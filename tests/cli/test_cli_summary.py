from __future__ import annotations

import io
import json
import shlex
from dataclasses import asdict
from typing import Any

from msgspec import structs
from rich.console import Console

from bifolio.checkpoint.default_sampling import default_sampling_of
from bifolio.cli.summary import Summary, curl_line, show
from bifolio.config import ServerConfig, resolve
from bifolio.engine.messages import EngineInfo

HELLO = EngineInfo(
    model="/somewhere/model.gguf",
    vocab=100,
    max_model_len=2048,
    stop_ids=(2,),
    page_size=16,
    pages=1000,
    page_bytes=2**20,
    plan="int8/bf16 page=16",
    kernels="native avx2, 2 threads",
    boot_epoch=1,
)


SHORTENED = structs.replace(HELLO, model_positions=8192, model_bytes=181 * 2**20)


def summary_of(
    hello: EngineInfo = HELLO, generation_config: dict[str, Any] | None = None, **options: object
) -> Summary:
    config: ServerConfig = resolve({"model": "m", **options})
    sampling = default_sampling_of(generation_config or {})
    return Summary.of(config, hello, "http://127.0.0.1:8123", "it's", sampling, 1.23456)


def test_the_summary_counts_pages_tokens_and_bytes() -> None:
    summary = summary_of()
    assert asdict(summary) == {
        "url": "http://127.0.0.1:8123",
        "model": "it's",
        "plan": "int8/bf16 page=16",
        "kernels": "native avx2, 2 threads",
        "experts": "",
        "max_model_len": 2048,
        "shortened_from": 0,
        "cache_bytes_for_all": 0,
        "page_size": 16,
        "pages": 1000,
        "cache_tokens": 16_000,
        "cache_bytes": 1000 * 2**20,
        "integrity": True,
        "prefix_cache": True,
        "api_key_needed": False,
        "sampling": "",
        "start_seconds": 1.235,
    }


def test_recommended_sampling_is_shown_where_there_is_some() -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 1.0}
    summary = summary_of(generation_config=recommended)
    assert summary.sampling == "temperature 0.6, top_k 20 (generation_config.json)"
    assert summary.sampling in shown(summary)
    assert "sampling" not in shown(summary_of())


def test_the_curl_line_survives_a_shell_and_is_a_valid_request() -> None:
    words = shlex.split(curl_line(summary_of()))
    assert words[:2] == ["curl", "http://127.0.0.1:8123/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["messages"][0]["role"] == "user"


def test_the_curl_line_sends_a_key_only_where_one_is_needed_and_never_shows_it() -> None:
    assert "Authorization" not in curl_line(summary_of())
    line = curl_line(summary_of(api_keys=("secret",)))
    assert "Authorization: Bearer $BIFOLIO_API_KEY" in line
    assert "secret" not in line


def shown(summary: Summary) -> str:
    screen = io.StringIO()
    show(summary, Console(file=screen, width=100))
    return screen.getvalue()


def test_people_see_the_model_the_plan_the_cache_and_the_address() -> None:
    text = shown(summary_of())
    for words in (
        "it's",
        "int8/bf16 page=16",
        "native avx2, 2 threads",
        "1,000 pages of 16 tokens: 16,000 tokens in 1000.0 MiB",
        "pages before and after each step",
        "2,048 tokens",
        "http://127.0.0.1:8123/v1",
    ):
        assert words in text
    assert curl_line(summary_of()) in text  # on one line, whatever the width


def test_a_cache_that_is_not_checked_is_shouted() -> None:
    assert "PAGES NOT CHECKED" in shown(summary_of(integrity=False))


def test_a_context_that_the_cache_shortens_is_shown_beside_the_models_own() -> None:
    text = " ".join(shown(summary_of(SHORTENED)).split())
    assert "2,048 of the 8,192 tokens that the model knows" in text
    assert "--cache-memory 181MiB" in text


def test_a_context_that_was_asked_for_is_not_called_short() -> None:
    assert "2,048 tokens" in shown(summary_of(SHORTENED, max_model_len=2048))
