"""Tiny models, scripted token sources and fault injection; only tests and tools use it."""
