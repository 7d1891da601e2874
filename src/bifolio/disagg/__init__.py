"""Moves a request and its pages from a prefill engine to a decode engine (`docs/handoff.md`)."""
