"""The demonstration: two vLLM servers that share one pool, measured against one without a pool."""
