"""Bytes, FLOPs, time and money of a deployment, from shapes alone."""
