"""One short module per model family: which checkpoint tensors make its weights."""
