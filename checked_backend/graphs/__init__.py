"""FX graphs and ATen operators: read facts from them, and rewrite graphs."""
