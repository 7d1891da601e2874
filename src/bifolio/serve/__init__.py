"""The OpenAI API over the engine."""
