"""Places workers on machines through Ray, and restarts them there."""
