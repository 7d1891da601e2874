"""Joins plan, bench and eval of a deployment into one page that stands for itself."""
