"""How checkpoints lay out quantized matrices: one module per layout."""
