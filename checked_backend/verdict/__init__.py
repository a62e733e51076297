"""Noise or bug: the decision about each tensor of the candidate that differs from the reference's.

`decide` looks once at each pair of tensors. For a pair that this does not settle it asks control runs:

1. Does eager itself repeat the value?
2. Is the difference within the noise that this program has at this precision (Monte Carlo arithmetic on eager)?
3. Is the candidate near the float64 reference, and does the candidate compiled in float64, the twin, compute the same?
4. Is the candidate no further from float64 than eager is?
5. Does another run of the candidate (on eager's random numbers, rounding wherever eager does) explain it?

A difference that no answer explains is wrong. `thresholds` has every number with its calibration. `steps` has a file
for each question. This room imports numbers, findings and errors only. It knows no region and no graph, and asks for
runs through `ControlRuns`.
"""
