"""A call of the command line, and the assertion that it was refused: for the tests of all commands."""

from collections.abc import Callable

# A function from the arguments to the exit code, stdout and stderr.
Weft = Callable[..., tuple[int, str, str]]


def assert_refused(result: tuple[int, str, str], *texts: str) -> None:
    """Assert exit code 2, the error on stderr, and nothing on stdout."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert "error: " in err
    assert "Traceback" not in err
    for text in texts:
        assert text in err
