"""The Python API: `LLM` in the process of its caller, `AsyncLLM` for asyncio programs."""

from bifolio.llm.async_llm import AsyncLLM
from bifolio.llm.offline import LLM
from bifolio.llm.results import CompletionOutput, RequestOutput

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput"]
