"""Joins plan, bench and eval results into one HTML page."""
