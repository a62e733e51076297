"""All that this package uses of torch's private names, a file for each subject; this file loads none of them.

Other modules import from the subject: ``from checked_backend._torch.inductor import warm_inductor``. So who needs trees
or tensors does not load Dynamo, and what only Inductor has is imported inside functions.

A subject imports torch, and other subjects where it builds on them, in no circle; nothing else of this package. No
other module names what is private to torch (``tests/test_torch.py``).

For a new torch release, run the tests: what torch moved or renamed fails here, mostly when a subject is imported. It is
mended in the subject, for all releases that the package supports: where they differ, the function asks for what is
there (``getattr``), with a comment that names the release. The callers are left as they are.
"""
