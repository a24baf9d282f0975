"""The solution of the exercise in loading_a_model.ipynb."""

import math

# ---- exercise 1 ----------------------------------------------------------------------
# Between 2**e and 2**(e + 1) the numbers are 2**(e - 7) apart. A sum is rounded up from
# half of that on, and 2**(e - 8) <= 1e-5 up to e = -9: for weights up to 2**-8. The
# error function is the share of a normal distribution in such a range.
share = math.erf(2**-8 / 0.02 / math.sqrt(2))
