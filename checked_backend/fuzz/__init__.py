"""Random programs against a compiler: generated, checked, confirmed, reduced, grouped."""
