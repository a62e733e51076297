"""Float64 copies of tensors, deterministic runs, and memory caches."""
