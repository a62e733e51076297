"""Check every ``torch.compile`` of a whole program.

`compile_calls` replaces ``torch.compile``, for programs and for tests. `watch` does so in a program that was started
with ``CHECKED_BACKEND=1``. `folder` keeps the reports of the program's processes. `summary` makes the page at the end.
"""
