"""Durations as text, and ticks for a time axis."""

import math


def unit_of(span: float) -> tuple[float, str]:
    """The unit in which to show times up to `span` seconds: its size in seconds, and its name.

    >>> unit_of(0.012)
    (0.001, 'ms')
    """
    return next(
        ((size, name) for size, name in ((1.0, "s"), (1e-3, "ms")) if span >= size), (1e-6, "us")
    )


def duration(seconds: float) -> str:
    """Seconds to three digits, in the unit of `unit_of`.

    >>> duration(0.0123456)
    '12.3 ms'
    """
    size, name = unit_of(seconds)
    return f"{float(f'{seconds / size:.3g}'):g} {name}"


def ticks(span: float, most: int) -> list[float]:
    """At most `most` round times from 0 to `span`: 1, 2 or 5 times a power of ten apart.

    >>> ticks(10.0, 6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not span:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(span))
    steps = (power * scale for scale in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10))
    whole = 1 + 1e-9  # a span of three ticks may be 2.9999999999999996 of them
    step = next(step for step in steps if int(span / step * whole) < most)
    return [float(f"{index * step:.12g}") for index in range(int(span / step * whole) + 1)]
