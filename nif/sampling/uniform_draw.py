"""The random numbers of sampling: a pure function of a sequence's seed and a position."""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment, 2**64 / golden ratio


def uniform(seed: int, position: int) -> float:
    """Returns the draw of `seed` at `position`, uniform over the multiples of 2**-53 in [0, 1).

    It is element `position` of the splitmix64 stream that starts at the mixed seed. The first mix
    keeps neighbouring seeds apart: without it, seed and position would only enter as their sum.

    Args:
        seed: 0 <= seed < 2**64.
        position: any non-negative integer, used once per sequence.
    """
    key = _mix((seed + _GAMMA) & _MASK)
    return (_mix((key + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
