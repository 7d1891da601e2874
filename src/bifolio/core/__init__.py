"""Decides which tokens are computed when, and which page holds them, without any tensor."""
