"""Turns one checkpoint into a smaller one that other engines load too."""
