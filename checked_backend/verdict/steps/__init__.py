"""The steps by which a difference is decided, one question each; `checked_backend.verdict.decide` has their order."""
