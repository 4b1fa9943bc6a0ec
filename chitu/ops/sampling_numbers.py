"""Constants that both implementations of sampling (`engine/sampling_ops.py`, `ops/kernels/sampling.py`) share, to agree
bit by bit, and the columns of a sampler's slot tables. No torch, no Triton.

A logit is divided by its row's *unit*, temperature times ln 2, so it counts bits: a token weighs `2^(40 + x - max)`.
That power uses only operations that IEEE 754 rounds in one way (add, subtract, multiply; no fused multiply-add), so
every device gets the same integer: `n = round(t)`, a polynomial in `t - n`, and n added to the exponent of that. The
logarithm that turns a uniform number into an exponential one is made in the same way, backwards.
"""

NO_TOKEN = -1
"""In place of a token: a logit of the row is NaN or infinity, or no token may be chosen."""
WEIGHT_BITS = 40
"""log2 of the weight of the most probable token. 2^22 such weights still fit an int64."""
SMALLEST_EXPONENT = -60.0
"""Lower bound to which smaller exponents are raised: below -40 the weight is 0 anyway."""
ROUND_TO_INTEGER = 1.5 * 2.0**23 + WEIGHT_BITS
"""Added to a small float32, it leaves the nearest integer plus 40 in the low bits of the sum."""
EXPONENT_SHIFT = 23
"""Bit at which the exponent of a float32 begins."""
EXP2 = (0.001326472731307149, 0.009671512991189957, 0.05550733581185341, 0.24022242426872253, 0.6931470036506653)
"""Coefficients of 2^f - 1 for -0.5 <= f <= 0.5, highest power first, each a float32; relative error 1e-7."""

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64 (Steele, Lea, Flood 2014), which turns seed and position into the 64 bit key of a draw."""
LOW_MIX_1, LOW_MIX_2 = 0x7FEB352D, 0x846CA68B
"""Constants of lowbias32 (Wellons 2018), which turns the key's halves and a token id into 32 bits."""

UNIFORM_BITS = 31
"""Bits of a token's uniform number, an odd multiple of 2^-31. A token of less than 2^-31 of the weight rarely wins."""
THREE_QUARTERS = 0x3F400000
"""0.75 as the bits of a float32: a logarithm's argument is a power of two times a number from 0.75 to 1.5."""
LN2 = 0.6931471824645996
"""A float32."""
LOG1P = (
    -0.07231374830007553,
    0.14437057077884674,
    -0.17265015840530396,
    0.20053167641162872,
    -0.24983157217502594,
    0.33332157135009766,
    -0.5000007748603821,
    1.0,
)
"""Coefficients of ln(1 + f) / f for -0.25 <= f <= 0.5, highest power first, each a float32. With these the exponential
of a uniform number has a relative error of 1e-6."""

UNIT, TOP_P, LOG_MIN_P = range(3)
"""First columns of the float64 table. The unit is 0 for greedy slots; min-p is stored as its log2, -inf for none."""
SEED, POSITION, TOP_K = range(3)
"""First columns of the int64 table. Position: tokens emitted so far."""
