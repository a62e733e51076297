"""Compare what a graph says about its tensors with what runs."""
