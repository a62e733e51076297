"""A run of many cases is a folder of results, kept as they come, merged, compared and shown. Torch is not loaded."""
