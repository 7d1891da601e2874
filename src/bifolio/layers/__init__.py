"""The blocks that models are made of, aware of the format of their weights."""
