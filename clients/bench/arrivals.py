"""When requests are sent, in vLLM's terms: a rate, and how bursty it is."""

import math
import random


def arrival_times(count: int, rate: float, *, burstiness: float = 1.0, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent, ascending.

    The gaps are drawn from a gamma distribution with shape `burstiness`: 1 is a Poisson process, less is burstier,
    more is evener. They are scaled so that the load takes count / rate seconds, whatever was drawn.

    Args:
        rate: requests a second; infinite sends all at once.
        burstiness: above 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1.0)
        times.append(now)
    return [time * count / rate / now for time in times]
