"""A whole program of the user's, every ``torch.compile`` in it checked.

`compile_calls` stands in the place of ``torch.compile``, here and in tests; `watch` does it for a program that was
started with ``CHECKED_BACKEND=1``, `folder` has what its processes leave, `summary` the page at the end.
"""
