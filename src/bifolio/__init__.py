"""bifolio: an LLM serving engine with a choice of formats for each phase and proven cache pages.

The public names. Each is imported when it is first used, so `import bifolio` is quick; torch is
imported when a model is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bifolio.errors import (
        BifolioError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        GenerationError,
        IntegrityError,
        OverloadedError,
        PairError,
        RequestError,
        UnsupportedError,
    )
    from bifolio.formats import PrecisionPlan
    from bifolio.llm import LLM, AsyncLLM, CompletionOutput, RequestOutput
    from bifolio.request import SamplingParams
    from bifolio.text.answer_text import AnswerPiece

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AnswerPiece",
    "AsyncLLM",
    "BifolioError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "GenerationError",
    "IntegrityError",
    "OverloadedError",
    "PairError",
    "PrecisionPlan",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedError",
    "__version__",
]

_HOMES = {
    "AnswerPiece": "bifolio.text.answer_text",
    "AsyncLLM": "bifolio.llm",
    "CompletionOutput": "bifolio.llm",
    "LLM": "bifolio.llm",
    "PrecisionPlan": "bifolio.formats",
    "RequestOutput": "bifolio.llm",
    "SamplingParams": "bifolio.request",
}
"""Modules of the public names; those that are not here are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'bifolio' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "bifolio.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
