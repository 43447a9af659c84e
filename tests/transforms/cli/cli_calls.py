"""What the tests of the command line share: how a call is made, and what is said of a wrong one."""

from collections.abc import Callable

Weft = Callable[..., tuple[int, str, str]]
"""Of the arguments: the exit code, stdout and stderr."""


def assert_refused(result: tuple[int, str, str], *texts: str) -> None:
    """Exit code 2, the error on stderr, nothing on stdout."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert "error: " in err
    assert "Traceback" not in err
    for text in texts:
        assert text in err
