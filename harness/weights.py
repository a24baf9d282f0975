"""How far two files of weights are apart."""

from common.weights import load


def max_abs_diff(one, other):
    """Return the largest absolute difference between the weights in two files.

    Raises ValueError if a file cannot be read, or if the names in them differ.
    """
    one, other = load(one), load(other)
    if one.keys() != other.keys():
        raise ValueError(f"different names: {sorted(one.keys() ^ other.keys())}")
    return max(
        (one[name].double() - other[name].double()).abs().max().item() for name in one
    )
