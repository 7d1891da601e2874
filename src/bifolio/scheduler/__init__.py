"""Plans each step: which tokens of which requests are computed. No tensors."""
