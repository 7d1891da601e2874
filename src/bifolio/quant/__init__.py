"""Packs and unpacks number formats: tensors in, tensors out."""
