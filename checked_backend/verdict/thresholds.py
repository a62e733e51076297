"""Every number that the verdict rests on, and why it has that value.

The worst clean case and the smallest caught bug that a docstring names are those of ``tests/calibration``. Its module
``constants`` tells what happens at other values.
"""

from __future__ import annotations

import torch

# -- Noise from control runs -------------------------------------------------------------------------------------------

NEIGHBOUR_BITS = 10
"""Elements up to ``2 ** NEIGHBOUR_BITS`` times as large as another one make it noisy: kernels work on many at once."""

# -- Monte Carlo runs --------------------------------------------------------------------------------------------------

FIRST_RUNS = 3
"""Monte Carlo runs when a tensor is decided about for the first time."""

MORE_RUNS = 8
"""Further runs at each magnitude, for elements still unexplained."""

# -- Elements that noise does not explain ------------------------------------------------------------------------------

ENVELOPE_FACTOR = 8.0
"""A candidate may lie this many envelopes from the reference: its roundings are other draws, and more or fewer.

"Monte Carlo arithmetic, first look", as a share of that: worst clean case 1.05 in bfloat16 (``focal_loss``) and 4.1 in
float32 (the elementary functions of ``rotary`` off by one unit always), which later layers settle; smallest caught bug
1.37 in float32 (an eps outside of its root). In bfloat16 bugs lie far below the noise too (5e-4), so that the float64
twin must be asked.
"""

EAGER_FACTOR = 4.0
"""A candidate may be this many times further from float64 than eager is.

"Distance from float64 over eager's": worst clean case 2.6 (``lstm`` in bfloat16; 6.0 for ``rotary`` in float32, which
stronger Monte Carlo runs settle), smallest caught bug 8.0 in float32 (one element of a loss 1 % too large).
"""

CORRELATED_MAGNITUDE = 2.0
"""Size of the roundings, in unit roundoffs, in control runs whose sums are correlated."""

STRONG_MAGNITUDE = 16.0
"""The same in the strong control runs, which look for what jumps.

At a quarter of it they miss bins of ``quantile`` that flip, and two clean cases are called wrong.
"""

OUT_OF_PROPORTION = 2.0
"""A strong envelope is out of proportion if it is this many times what `STRONG_MAGNITUDE` makes of the other one."""

EXACT_ROUNDOFFS = 1.0
"""A difference of one rounding of the result itself (in unit roundoffs) is always allowed."""

SUBNORMAL = 1e-30
"""Below this, what is smaller than the least normal number counts as zero."""

TWIN_TOLERANCE = 1e-9
"""Relative difference between the float64 reference and the float64 twin that can only be wrong logic.

"float64 twin, relative": worst clean case 1.6e-14 (``rotary``), smallest caught bug 1e-8 (a scale of 1.001e-3 for
1e-3 on what a constant is added to).
"""

TWIN_ENVELOPE_FACTOR = 256.0
"""The same in envelopes of the float64 reference, for ill-conditioned programs.

"float64 twin, of what is allowed": worst clean case 0.0079 (``gpt_block`` in float64), smallest caught bug 5.0 in
floats (0.012 are integers that flip, ``quantile``, and are caught at their own precision).
"""

CANCELLED_REST_BITS = 50
"""Where terms cancel inside of a float64 kernel, ``2 ** -CANCELLED_REST_BITS`` of them is left: a few roundoffs."""

CANCELLED_BITS = 60
"""Elements up to ``2 ** CANCELLED_BITS`` times as large tell how large terms were that left so little."""

# -- Elements that jump where a choice flips ---------------------------------------------------------------------------

STRONG_FACTOR = 4.0
"""A candidate may lie this many strong envelopes from the reference, where they are out of proportion."""

MISSED_JUMPS = 0.1
"""Of the elements that flip in strong control runs, this share may flip in the candidate alone besides; so may of those
that turn into NaN or infinity."""

SAME_PLACE = 0.01
"""Relative: elements that are to be excused by others that turn into NaN are within this of one of them, or within what
those move."""

# -- Elements that have lost their digits ------------------------------------------------------------------------------

LOST_DIGITS = 1e-3
"""Relative error of an element that has lost its digits: fewer than three are right."""

LOST_DIGITS_ROUNDOFFS = 64.0
"""The same in machine epsilons, for dtypes that have few digits to lose."""

LOST_DIGITS_EAGER_FACTOR = 20.0
"""And it is this many times greater than the greatest relative error that eager has in elements no smaller."""

# -- Tensors of which nothing is left but rounding ---------------------------------------------------------------------

VANISHING = 1e-6
"""A tensor whose float64 result is this part of its noise is zero but for rounding.

Gradients of a bias before a normalisation, or of a key's bias under softmax, are: 1e-9 of their noise in float32.
"""

HIDDEN_SHARE = 0.5
"""A tensor counts as hidden from this part of its squares on."""

VANISHING_BESIDE_FOUND = 1e-3
"""And this part of what was computed instead."""

COARSE_NOISE = 1 / ENVELOPE_FACTOR
"""Relative noise in which an error of 100 % would be lost."""

FLOAT64_REPEATS = 1e-6
"""A float64 reference repeats itself if its control runs, with junk in uninitialised memory, spread less, relative.

Rounding in float64 spreads 1e-16 times the program's condition. Junk spreads 1.
"""

# -- What earlier calls taught -----------------------------------------------------------------------------------------

REMEMBERED_SLACK = 4.0
"""How much a remembered scale may be exceeded before a tensor is decided about again."""

# -- When the float64 twin is asked ------------------------------------------------------------------------------------

HIDING_ROUNDOFFS = 256.0
"""Noise of more than this many roundoffs of the tensor's size calls for the float64 twin."""

# -- The float64 twin --------------------------------------------------------------------------------------------------

TWIN_RUNS = 2
"""Monte Carlo runs in float64 that a float64 twin is held against; `MORE_RUNS` more before it is called wrong."""

TWIN_WOULD_SHOW = 2.0
"""A twin that is wrong by this many times what is allowed would be seen to be wrong in the candidate too."""

# -- What eager itself does not repeat ---------------------------------------------------------------------------------

ROUNDING_SHRINKS = 1e-3
"""From float32 to float64 rounding shrinks to ``2 ** -29`` of itself; the rest is room for a few elements that jump."""

SPREAD_ROUNDOFFS = 4.0
"""A spread between two runs is looked into from here on, in machine epsilons of the tensor's size."""

SPREAD_DWARFED = 100.0
"""A difference this many times eager's own spread, in root mean square and in the greatest element, is none of it."""

MORE_REPEATS = 3
"""Further runs of eager, to see how far from itself it goes."""

# -- Other random numbers ----------------------------------------------------------------------------------------------

CANDIDATE_RUNS = 2
"""Further runs of the candidate, to see how often a difference repeats."""

OTHER_SEEDS = range(4)
"""Eager is run on so many other streams, to see what other random numbers do to a tensor."""

OTHER_DRAWS_FACTOR = 4.0
"""A difference this many times what other random numbers make, in root mean square, is not theirs."""

# -- Kernels that round less often -------------------------------------------------------------------------------------

LEFT_BY_CHANCE = 64
"""So many elements are not all zero by a lucky rounding where eager has something in each."""

# -- Shapes that rounding changes --------------------------------------------------------------------------------------

SHAPE_RUNS = 4
"""Monte Carlo runs at each magnitude in which a shape may turn out to be another one."""

# -- What a finding is called ------------------------------------------------------------------------------------------

COARSEST_ROUNDOFF = torch.finfo(torch.bfloat16).eps
"""Programs round to nothing coarser than bfloat16: a difference beyond what that does is not one of precision."""

PRECISION_ENVELOPES = 64.0
"""This many envelopes are more than rounding in half precision, however it is done, adds up to."""

FACTOR_ELEMENTS = 8
"""Fewer elements than this are in proportion by chance."""

FACTOR_REMAINDER = 0.1
"""What is left of a difference beside one factor for all elements, as a part of that difference."""

# -- One operator by itself --------------------------------------------------------------------------------------------

SPREAD_FACTOR = 4.0
"""The root mean square of the error, in units of each element's own noise, that is always allowed."""

SPREAD_OF_FEW = 5.0
"""What is allowed more in a tensor of n elements, divided by the root of n."""

BIAS_ROUNDOFFS = 2.0
"""A common factor may be off by this many unit roundoffs: a function that is always one unit too large is."""

BIAS_FACTOR = 3.0
"""And by this many times what it is off in the control runs."""

ROUNDING_RMS = 0.6
"""Root mean square of the error of rounding to nearest, in unit roundoffs of the result, at most: 1 / sqrt(3)."""

OUTLIER = 16.0
"""A single element off by this many times its own noise is wrong, where no choice and no kink can make it jump.

The worst of 12,198 clean tensors of 279 programs was off by 10.2. A tenth of one element
is 28 in bfloat16, 300 in float16.
"""

TRIMMED = 256
"""One element in so many is left out: a comparison or a tie that flips says nothing about an operator."""

TRIMMED_JUMPS = 16
"""The same where the operator chooses by floating-point values."""

TRIMMED_FROM = 32
"""No element is left out of a tensor with fewer than this."""

GREATEST_RATIO = 1e4
"""Ratios are cut here, so that their squares can be added up."""
