"""How tests of `bifolio.llm` load the tiny model, and what its files recommend."""

from typing import Any

RECOMMENDED = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1}
OPTIONS: dict[str, Any] = {
    "plan": "bf16/bf16",
    "threads": 1,
    "cache_memory": "2MiB",
    "max_model_len": 256,
}
