"""Every private name of torch that this package uses, one file for each subject. This file imports none of them.

Other modules import from the subject: ``from checked_backend._torch.inductor import warm_inductor``. A module that
needs only trees or tensors then does not load Dynamo. Inductor's names are imported inside functions, because Inductor
is slow to import.

A subject may import torch and other subjects, without import cycles, and nothing else of this package. No module
outside of this folder uses a private name of torch (``tests/test_torch.py``).

For a new torch release, run the tests. A name that torch moved or renamed fails here, mostly when its subject is
imported. Change the subject so that it works with all releases that the package supports. Where releases differ, the
function looks for the name (``getattr``), with a comment that gives the release. The callers stay as they are.
"""
