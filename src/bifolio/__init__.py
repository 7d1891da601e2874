"""bifolio: an LLM serving engine with a choice of formats for each phase and proven cache pages."""

__version__ = "0.1.0"
