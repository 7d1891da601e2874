"""Who holds which page: states, tags, the prefix tree. No tensors."""
