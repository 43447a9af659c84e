"""What a notebook shows of an error: the user's lines and the text, and of a bug everything."""

import os
import subprocess
import sys
import types

import pytest

import weft
from weft.errors import WeftError
from weft.tracebacks import of_user

SESSION = """
import contextlib, io, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("%colors nocolor")
shell.run_cell("import torch, weft, weft.batches.padding")
for cell in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        shell.run_cell(cell)
    print(out.getvalue(), end="\\x00")
"""
READS = "@weft.graphify\ndef f(x):\n    return x * x.sum().item()\nf(torch.ones(3))"
MISTAKE = "weft.SamplingParams(top_p=2)"
BUG = "weft.batches.padding.padded_shape(3, 4, 5)"


def shown(*cells: str, **environment: str) -> list[str]:
    """What IPython writes for each cell."""
    command = [sys.executable, "-c", SESSION, *cells]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return result.stdout.split("\0")[:-1]


@pytest.mark.slow
def test_the_users_lines_and_the_text_alone_are_shown() -> None:
    mistake, reads, bug = shown(MISTAKE, READS, BUG)
    assert mistake.splitlines()[2:] == [
        "Cell In[1], line 1",
        f"----> 1 {MISTAKE}",
        "",
        "RequestError: SamplingParams(top_p=2)",
        "  saw: top_p=2",
        "  instead: a number > 0 and <= 1; 1 keeps all",
        "(hidden: 3 frames inside weft; WEFT_FULL_TRACEBACKS=1 shows all)",
    ]
    assert "----> 4 f(torch.ones(3))" in reads
    assert "----> 3     return x * x.sum().item()" in reads, "the function is the user's too"
    assert "File " not in reads
    assert len(reads.splitlines()) < 20
    # A bug in weft is no WeftError.
    assert "in padded_shape(" in bug
    assert "hidden" not in bug


@pytest.mark.slow
def test_all_is_shown_if_the_environment_says_so() -> None:
    [mistake] = shown(MISTAKE, WEFT_FULL_TRACEBACKS="1")
    assert "hidden" not in mistake
    assert "in SamplingParams._" in mistake or "__attrs_post_init__" in mistake


def names(traceback: types.TracebackType | None) -> list[str]:
    functions = []
    while traceback is not None:
        functions.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return functions


def test_the_error_keeps_its_whole_traceback() -> None:
    def users() -> None:
        weft.SamplingParams(top_p=2)

    with pytest.raises(WeftError) as error:
        users()
    whole = names(error.value.__traceback__)
    assert names(of_user(error.value.__traceback__)) == whole[:2]
    assert whole[1] == "users"
    assert names(error.value.__traceback__) == whole
    assert len(whole) > 3


def test_a_traceback_without_frames_of_weft_stays() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        _ = 1 / 0
    assert of_user(error.value.__traceback__) is error.value.__traceback__
    assert of_user(None) is None
