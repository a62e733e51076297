"""What holds on a GPU too. Each module is one part; `run.sh` runs them and prints a line for each."""
