"""The steps that decide about a difference, one question each. `checked_backend.verdict.decide` has their order."""
