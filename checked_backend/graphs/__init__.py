"""Facts about FX graphs and ATen operators, and changes to graphs."""
