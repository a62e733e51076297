"""Every sample of torch's own operator database, ``op_db``, through this package.

    python -m tests.op_db metadata results.jsonl [--seconds 600] [--samples N] [--every K]
    python -m tests.op_db check results.jsonl [--seconds 600] [--samples N] [--every K]

``metadata`` runs the metadata checks over each operator's traced graph, ``check`` holds each operator under the ``nop``
compiler against eager. Results are kept, and a later run goes on. With ``--write FILE`` what was found is written as
the list that the tests go by.
"""
