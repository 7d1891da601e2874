"""Turns one checkpoint into a smaller one."""
