"""Storage of full KV pages outside the pool: host memory, and slower stores behind it."""
