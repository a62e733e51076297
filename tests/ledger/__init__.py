"""The answers that the package gives, case by case: a change of its inside shows each answer that it changes.

``python -m tests.ledger`` runs the cases and compares them with ``answers.json``: verdict and findings, and where a
case is localized, operator, stage, line, and whether its repro shows the error. No texts, no numbers.
"""
