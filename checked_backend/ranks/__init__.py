"""Collectives: what the compiled program exchanges with other ranks is recorded, and every other run receives that."""
