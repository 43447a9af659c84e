"""The command line in this process, for the tests of its commands."""

from typing import Any

import pytest
from cli_calls import Weft

from weft.transforms.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Weft:
    """`weft ARGS` in this process, 80 columns wide: its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()  # the output of other code, before the call
        try:
            code: Any = main(argv)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return call
