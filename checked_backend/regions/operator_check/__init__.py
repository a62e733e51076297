"""Check each operator of a 16-bit region by itself, on the compiled program's own inputs."""
