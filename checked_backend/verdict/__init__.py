"""Noise or bug: the decision about each tensor of the candidate that differs from the reference's.

`decide` looks once at each pair of tensors. For a pair that this does not settle it asks a `Runner` for more runs of
the program, by their recipes. A difference that no answer explains is wrong. `decide.STEPS` has the questions in order,
`steps` a file for each, and `thresholds` every number with its calibration. This room imports numbers, findings and
errors only. It knows no region and no graph.
"""
