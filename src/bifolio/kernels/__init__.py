"""One function per operation, in a readable reference and a native form."""
