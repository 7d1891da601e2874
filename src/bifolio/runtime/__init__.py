"""Holds pages in memory and runs one step of a model on them."""
