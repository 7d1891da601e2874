"""What `import bifolio` offers, and what it costs."""

import subprocess
import sys
import time

import pytest

import bifolio
import bifolio.errors

NAMES = {
    "AnswerPiece",
    "AsyncLLM",
    "BifolioError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "GenerationError",
    "IntegrityError",
    "LLM",
    "OverloadedError",
    "PairError",
    "PrecisionPlan",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedError",
    "__version__",
}


def test_the_public_names_are_these_and_all_of_them_exist() -> None:
    assert set(bifolio.__all__) == NAMES == set(dir(bifolio))
    for name in NAMES - {"__version__"}:
        value = getattr(bifolio, name)
        assert value.__name__ == name
        assert value.__module__.startswith("bifolio.")
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = bifolio.Engine


def test_every_error_of_the_tree_is_public() -> None:
    tree = {name for name, value in vars(bifolio.errors).items() if isinstance(value, type)}
    assert tree == {name for name in NAMES if name.endswith("Error")}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_the_public_names_import_neither_torch_nor_the_server() -> None:
    code = "import sys; from bifolio import *; print(*sorted(sys.modules))"
    modules = set(run(code).split())
    assert "bifolio.llm.offline" in modules
    assert not modules & {"torch", "numpy", "fastapi", "bifolio.server", "bifolio.engine.engine"}


def test_import_bifolio_alone_imports_nothing_of_it_and_takes_less_than_200_ms() -> None:
    code = "import sys, bifolio; print(*[m for m in sys.modules if m.startswith('bifolio.')])"
    assert run(code).split() == []
    times = []
    for code in ["pass", "import bifolio"] * 3:
        began = time.perf_counter()
        run(code)
        times.append(time.perf_counter() - began)
    assert min(times[1::2]) - min(times[::2]) < 0.2
