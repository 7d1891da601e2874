"""Bytes, operations and money of a deployment, computed from shapes; knows no tensors."""
