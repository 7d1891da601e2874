"""The bytes of cache pages: the pool, seals, the page check, the scrub, provenance."""
