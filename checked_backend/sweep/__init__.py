"""Many models, each in a process of its own: suites, rules, engines, the database of results and their comparison.

Nothing here loads torch but `worker` and `suites`, which run in the process of one case.
"""
