"""Quality measured: one plan against another, on the same tokens."""
