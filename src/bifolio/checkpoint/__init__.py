"""Reads checkpoints (safetensors, GGUF) into weights that the kernels can run."""
