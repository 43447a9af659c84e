"""Quantities as text: a count with its noun, a number of bytes, and the size of an error."""


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def byte_size(count: float) -> str:
    """A number of bytes to three digits.

    >>> byte_size(31_457_280)
    '31.5 MB'
    """
    size, name = next(
        ((s, n) for s, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= s), (1.0, "B")
    )
    return f"{float(f'{count / size:.3g}'):g} {name}"


def error_size(difference: float) -> str:
    """A difference to two digits.

    >>> error_size(0.00123), error_size(0.0)
    ('1.2e-03', '0')
    """
    if difference:
        return f"{difference:.1e}"
    return "0"
