"""Every number that the verdict rests on, and why it has that value.

The worst clean case and the smallest caught bug in a docstring are those of ``tests/calibration``. Its module
``constants`` shows what happens at other values.
"""

from __future__ import annotations

# -- Noise from control runs -------------------------------------------------------------------------------------------

NEIGHBOUR_BITS = 10
"""An element's noise includes that of elements up to ``2 ** NEIGHBOUR_BITS`` times as large: kernels mix elements."""

# -- Monte Carlo runs --------------------------------------------------------------------------------------------------

FIRST_RUNS = 3
"""Monte Carlo runs for the first look at a tensor that is not settled; runs of eager, to see how far it departs."""

FEW_RUNS = 2
"""Monte Carlo runs in float64 that a float64 twin is compared with; further runs of the candidate."""

OTHER_RUNS = 4
"""Runs at each magnitude, to see whether a shape changes."""

MORE_RUNS = 8
"""Further runs at each magnitude, for elements still unexplained."""

# -- Elements that noise does not explain ------------------------------------------------------------------------------

ENVELOPE_FACTOR = 8.0
"""A candidate may lie this many envelopes from the reference: its roundings are other draws, and more or fewer of them.

"Monte Carlo arithmetic, first look", as a share of that: worst clean case 1.05 in bfloat16 (``focal_loss``) and 4.1 in
float32 (the elementary functions of ``rotary``, which are always off by one unit); later steps settle both. Smallest
caught bug 1.37 in float32 (an eps outside of its root). In bfloat16 some bugs lie far below the noise (5e-4), so the
float64 twin must be asked.
"""

EAGER_FACTOR = 4.0
"""A candidate may be this many times further from float64 than eager is.

"Distance from float64 over eager's": worst clean case 2.6 (``lstm`` in bfloat16; 6.0 for ``rotary`` in float32, which
stronger Monte Carlo runs settle), smallest caught bug 8.0 in float32 (one element of a loss 1 % too large).
"""

CORRELATED_MAGNITUDE = 2.0
"""Size of the roundings, in unit roundoffs, in control runs whose sums are correlated."""

STRONG_MAGNITUDE = 16.0
"""Size of the roundings in the strong control runs, which look for elements that jump.

At a quarter of this size they miss bins of ``quantile`` that flip, and two clean cases are called wrong.
"""

TWIN_TOLERANCE = 1e-9
"""Relative difference between the float64 reference and the float64 twin that can only be wrong logic.

"float64 twin, relative": worst clean case 1.6e-14 (``rotary``), smallest caught bug 1e-8 (a scale of 1.001e-3 instead
of 1e-3, before a constant is added).
"""

TWIN_ENVELOPE_FACTOR = 256.0
"""A float64 twin may also lie this many envelopes from the float64 reference, for ill-conditioned programs.

"float64 twin, of what is allowed": worst clean case 0.0079 (``gpt_block`` in float64), smallest caught bug 5.0 in
floats. (Flipping integers of ``quantile`` are at 0.012; they are caught at their own precision.)
"""

CANCELLED_REST_BITS = 50
"""Terms that cancel inside a float64 kernel leave ``2 ** -CANCELLED_REST_BITS`` of themselves: a few roundoffs."""

CANCELLED_BITS = 60
"""Elements up to ``2 ** CANCELLED_BITS`` times as large show how large the terms were that cancelled."""

# -- Elements that jump where a choice flips ---------------------------------------------------------------------------

DRAW_FACTOR = 4.0
"""One draw of a noise may be this many times another draw: of a remembered scale, of strong control runs where they are
out of proportion."""

MISSED_JUMPS = 0.1
"""The candidate alone may flip further elements: up to this share of those that flip in single control runs."""

# -- Elements that have lost their digits ------------------------------------------------------------------------------

LOST_DIGITS = 1e-3
"""Relative error of an element that has lost its digits: fewer than three are right."""

LOST_DIGITS_ROUNDOFFS = 64.0
"""Relative error of an element that has lost its digits, in machine epsilons. The greater of both errors counts."""

LOST_DIGITS_EAGER_FACTOR = 20.0
"""The element's error must also be this many times the greatest relative error of eager in elements no smaller."""

LOST_DIGITS_CHANCE = 1e-4
"""Eager must be so near in these elements that chance does it this rarely, if its errors are alike in all elements."""

# -- Tensors that are nothing but rounding -----------------------------------------------------------------------------

FAR_SMALLER = 1e-3
"""A tensor is zero but for rounding if its float64 result is also at most this part of what was computed instead.

Eager's spread is rounding if in float64 it is at most this part of itself. From float32 to float64 rounding shrinks to
``2 ** -29`` of itself. The rest is room for a few elements that jump.
"""

VANISHING = 1e-6
"""A tensor is zero but for rounding if its float64 result is at most this part of its noise.

The gradient of a bias before a normalisation is such a tensor, and that of a key's bias under softmax: 1e-9 of their
noise in float32. A float64 reference repeats itself if its control runs spread by no more than this: rounding spreads
1e-16 times the condition of the program, junk in uninitialised memory spreads 1.
"""

# -- When the float64 twin is asked ------------------------------------------------------------------------------------

HIDING_ROUNDOFFS = 256.0
"""Noise of more than this many roundoffs of the tensor's size calls for the float64 twin."""

# -- The float64 twin --------------------------------------------------------------------------------------------------

TWIN_WOULD_SHOW = 2.0
"""An error of the twin this many times what the candidate is allowed would be seen in the candidate too."""

# -- What eager itself does not repeat ---------------------------------------------------------------------------------

SPREAD_ROUNDOFFS = 4.0
"""A spread between two runs is looked into if it is above this, in machine epsilons of the tensor's size."""

SPREAD_DWARFED = 100.0
"""Eager's spread does not explain a difference this many times as large, in root mean square and at its greatest."""

# -- What a finding is called ------------------------------------------------------------------------------------------

PRECISION_ENVELOPES = 64.0
"""Rounding in half precision, however it is done, never adds up to this many envelopes."""

FACTOR_ELEMENTS = 8
"""Fewer elements than this may be in proportion by chance."""

FACTOR_REMAINDER = 0.1
"""A tensor is eager's times one factor if at most this part of the difference is left without that factor."""

# -- One operator by itself --------------------------------------------------------------------------------------------

SPREAD_FACTOR = 4.0
"""The root mean square of the error that is always allowed, in units of each element's own noise."""

SPREAD_OF_FEW = 5.0
"""A tensor of n elements is allowed this much more, divided by the root of n."""

BIAS_ROUNDOFFS = 2.0
"""A common factor may be off by this many unit roundoffs, as for a function that is always one unit too large.

In 1,628 clean tensors of 150 programs a factor, of a row or column too, was at most 0.2 times what it may be.
"""

BIAS_FACTOR = 3.0
"""A common factor may also be off by this many times its error in the control runs.

And by this many times the share of the tensor's squares that is noise (regression dilution). The roundings of the
inputs move the right result, and a kernel that never rounds them has another part of that noise, or none. A gradient
that is zero in exact arithmetic is nothing else: all of it may be missing.
"""

BIAS_OF_PART = 2.0
"""A factor of one row or column may be off by this many times as much as one of the whole tensor.

The worst is chosen of many, and three control runs may all move the one row that rounding moves most by less than the
compiled program. Of 11,520 right results, made up to show that, 4 were off by up to 1.4 times as much.
"""

ROUNDING_RMS = 0.6
"""Root mean square of the error of rounding to nearest, in unit roundoffs of the result: at most 1 / sqrt(3)."""

OUTLIER = 16.0
"""A single element off by more than this many times its own noise is wrong, if no choice and no kink can make it jump.

The worst of 12,198 clean tensors of 279 programs was off by 10.2. An error of a tenth of one element is 28 in bfloat16,
300 in float16.
"""

OUTLIER_OF_TENSOR = 2.0
"""Such an element is also off by this many times what eager's kernel is off by in any element, beyond a rounding.

A small element is also off by this many times what rounding of the inputs does to any element. Of the gradient of
GELU's approximation by tanh far below 0, where the kernel cancels, single elements are 0 in eager and 1.6e-5 in a
compiled program; rounding of the inputs moves the others by 1.7e-5.
"""

SMALL_ELEMENT = 1 / 16
"""An element is small if it is below this share of the tensor's root mean square."""

FEW_ELEMENTS = 32
"""In a tensor, row or column of fewer elements no element is left out, and all may be zero by a lucky rounding."""

TRIMMED = 256
"""One element in this many is left out: a comparison or a tie that flips says nothing about an operator."""

TRIMMED_JUMPS = 16
"""One element in this many is left out for an operator that chooses by floating-point values."""
