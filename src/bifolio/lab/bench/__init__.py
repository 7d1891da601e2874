"""Load generation and measurement of an engine or an endpoint."""
