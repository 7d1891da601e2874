"""Prepares and measures: capacity plans, benchmarks, evaluation, compression, reports."""
