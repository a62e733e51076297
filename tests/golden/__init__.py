"""The golden outputs: what people and tools read of the package, kept as files, so that no change of it goes unnoticed.

``python -m tests.golden`` makes them anew and says what is different. ``python -m tests.golden --accept`` keeps what is
made now: only in a commit that means to change it, and that shows the difference.
"""
