"""Check many models, each in its own process: suites, rules, engines, the database of results, and comparisons.

Only `examine` and `suites` load torch. They run in the process of one case.
"""
