"""The random numbers of sampling: a pure function of a sequence's seed and a position."""

import numpy as np
import numpy.typing as npt

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
    key = stream_key(seed)
    return (_mix((key + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def stream_key(seed: int) -> int:
    """What `uniforms` wants of a seed."""
    return _mix((seed + _GAMMA) & _MASK)


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`uniform` of many at once, bit for bit.

    Args:
        keys: [N] the `stream_key` of each seed.
        positions: [N] non-negative.
    """
    # Arrays of uint64 wrap around silently, which is the arithmetic wanted.
    mixed = _mix_all(keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_all(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix(z: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
