"""Host memory: the shared region, and the cache that gives out its slots."""
