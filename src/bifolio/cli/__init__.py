"""Turns commands into calls."""
