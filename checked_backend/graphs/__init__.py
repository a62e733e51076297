"""What FX graphs and ATen operators are asked for."""
