"""launch: results in order; errors name the rank, the place and the cause; no process is left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import PYTHONPATH, scale, told
from tqdm import tqdm

from weft.errors import ProgramError, RankError
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import _send, launch


def place(a: int, b: str) -> tuple[Any, ...]:
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], a, b


def test_results_in_order_of_ranks() -> None:
    assert launch(place, 3, 7, "b") == [(str(r), str(r), "3", 7, "b") for r in range(3)]


def step(how: str, rank: int) -> str:
    """Steps of a pipeline over all ranks; one rank fails in the second step."""
    torch.set_num_threads(1)
    transport = Distributed(timeout=60)
    count = [0]

    def stage(p: Any, s: Any, batch: Any, x: Any) -> Any:
        count[0] += 1
        if count[0] == 2 and transport.rank == rank:
            fail(how)
        return scale(p, s, batch, x)

    pipelined_step = pipeline([stage] * transport.num_ranks, transport=transport)
    state: Any = [torch.zeros(())]
    for _ in range(4):
        state, _ = pipelined_step([torch.ones(())], state, torch.ones(2))
    return "done"


class Odd(Exception):
    """An error that cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.trap = lambda: None


def fail(how: str) -> None:
    match how:
        case "raise":
            raise KeyError("mine")
        case "odd":
            raise Odd(1, 2)
        case "exit":
            os._exit(3)
        case "sys.exit":
            raise SystemExit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.one_of(3, 2)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_a_rank_raised_is_raised_with_its_traceback(rank: int) -> None:
    with pytest.raises(KeyError, match="mine") as error:
        launch(step, 3, "raise", rank)
    notes = "\n".join(error.value.__notes__)
    assert f"on rank {rank} of 3" in notes
    assert f"in stage {rank} (stage)" in notes
    assert "in fail" in notes


@pytest.mark.slow
def test_an_error_that_cannot_travel_is_told() -> None:
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        launch(step, 2, "odd", 1)


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause"),
    [("exit", "exit code 3"), ("sys.exit", "exit code 0"), ("kill", "SIGKILL")],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_ends_is_named_with_its_instruction_and_how(
    how: str, cause: str, rank: int
) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(step, 3, how, rank)
    assert (error.value.rank, error.value.instruction) == (rank, f"run stage {rank} [mb 0]")
    assert error.value.cause == (
        "SystemExit: 0" if how == "sys.exit" else f"its process ended: {cause}"
    )
    assert time.monotonic() - began < 20


def leave(rank: int) -> str:
    """A function that makes a transport on all ranks except `rank`."""
    if int(os.environ["RANK"]) == rank:
        return "early"
    return told(lambda: Distributed(timeout=5))


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named() -> None:
    said = launch(leave, 3, 1)
    assert said[1] == "early"
    for rank in (0, 2):
        assert said[rank].startswith(
            f"RankError: rank {rank}: 'its start'\n  saw: rank 1 failed at 'its start': its process"
            " ended: its function returned"
        )


def stop_after(steps: int) -> str:
    transport = Distributed(timeout=5)
    pipelined_step = pipeline([scale] * 2, transport=transport)
    state: Any = [torch.zeros(())]
    for _ in range(steps if transport.rank else 3):
        state, _ = pipelined_step([torch.ones(())], state, torch.ones(2))
    return (
        told(lambda: pipelined_step([torch.ones(())], state, torch.ones(2)))
        if transport.rank == 0
        else "early"
    )


@pytest.mark.slow
def test_a_rank_that_takes_fewer_steps_is_named() -> None:
    with pytest.raises(RankError) as error:
        launch(stop_after, 2, 2)
    assert (error.value.rank, error.value.instruction) == (1, "its end")
    assert error.value.cause == "its process ended: its function returned"


def both_fail() -> None:
    raise ValueError(f"on {os.environ['RANK']}")


@pytest.mark.slow
def test_of_several_errors_the_first_ranks_is_raised() -> None:
    with pytest.raises(ValueError, match="on 0"):
        launch(both_fail, 2)


KEPT: list[Distributed] = []


def send_much_and_leave() -> float:
    """Rank 0 ends long before rank 1 receives its message."""
    transport = Distributed(timeout=10)
    KEPT.append(transport)

    def stage(p: Any, s: Any, batch: Any, x: Any) -> Any:
        return (s, torch.ones(10_000_000)) if x is None else (x.sum(), x[:1])

    pipelined_step = pipeline([stage, stage], transport=transport)
    if transport.rank == 1:
        time.sleep(0.7)
    (total,), _ = pipelined_step.stream(
        [None], [torch.zeros(())], [torch.ones(1)], [Job(feeds=False)]
    )
    return float(total)


@pytest.mark.slow
def test_what_a_rank_sent_arrives_though_it_has_returned() -> None:
    assert launch(send_much_and_leave, 2) == [0.0, 1e7]


def load_slowly(seconds: float, timeout: float) -> list[float]:
    """Rank 1 reaches its first step late; rank 0 could be several steps ahead by then."""
    transport = Distributed(timeout=timeout)
    shared = transport.share(2.0)
    if transport.rank == 1:
        time.sleep(seconds)
    pipelined_step = pipeline([scale] * 2, microbatches=4, transport=transport)
    _, out = pipelined_step([torch.tensor(shared)], [torch.zeros(())], torch.ones(4))
    return [float(x) for x in out]


@pytest.mark.slow
def test_a_rank_that_loads_for_longer_than_the_time_out_is_waited_for() -> None:
    assert launch(load_slowly, 2, 2.5, 1.0) == [[4.0] * 4] * 2


def silent() -> None:
    os._exit(7)


@pytest.mark.slow
def test_ranks_that_end_without_a_word() -> None:
    with pytest.raises(
        RankError, match="rank 0 failed at 'its part': its process ended: exit code 7"
    ):
        launch(silent, 2)


@pytest.mark.parametrize(
    ("fn", "num_ranks"), [(silent, 0), (2, silent), (silent, "2"), (silent, True)]
)
def test_what_is_no_function_or_no_number_of_ranks_is_refused(fn: Any, num_ranks: Any) -> None:
    with pytest.raises(ProgramError) as error:
        launch(fn, num_ranks)
    assert error.value.instead in (
        "a function: launch(function, 2, *arguments)",
        "a whole number >= 1",
    )


@pytest.mark.parametrize(("fn", "args"), [(lambda: 1, ()), (silent, (lambda: 1,))])
def test_what_cannot_be_pickled_is_refused(fn: Any, args: Any) -> None:
    with pytest.raises(ProgramError) as error:
        launch(fn, 2, *args)
    assert "pickle" in error.value.problem
    assert error.value.instead.startswith(
        "a function of a module or of the script itself, by its name"
    )


@pytest.mark.parametrize("timeout", [0, 1e18, "5"])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(
        ProgramError,
        match=r"launch\(timeout=.*\)\n  saw: timeout=.*\n  instead: a number of seconds",
    ):
        launch(silent, 2, timeout=timeout)


def returns_a_function() -> Any:
    return lambda: 1


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_told() -> None:
    with pytest.raises(ProgramError) as error:
        launch(returns_a_function, 2)
    assert error.value.call == "launch(returns_a_function, …)"
    assert error.value.problem.startswith("a result that cannot be pickled: ")


@pytest.mark.slow
def test_a_function_of_an_interactive_session_is_refused_before_a_process_starts() -> None:
    code = (
        "from weft.transforms import launch\ndef f(): return 1\ntry:\n    launch(f, 2)\n"
        "except Exception as e:\n    print(type(e).__name__, e.instead)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(
        "ProgramError a function of a .py file, imported from there: other processes cannot"
    )
    assert done.stderr == ""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from weft.transforms import launch\ndef f(): return 1\nlaunch(f, 2)\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    ranks, _, last = done.stderr.rpartition("weft.errors.")
    # The ranks' output may be mixed, even within a line
    assert "weft.errors.ProgramError: launch(f, 2)" in ranks
    assert "saw: a rank that imports the script" in ranks
    assert last.startswith(
        "RankError: launch\n  saw: its process ended: exit code 1, as that of every rank\n"
    )
    assert last.endswith('in a script, call launch under `if __name__ == "__main__":`\n')


def hang(folder: str) -> None:
    with tqdm(disable=True):  # as `weft.load` makes one
        pass
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_ranks_do_not_outlive_their_launcher_and_leave_no_semaphores(tmp_path: Path) -> None:
    code = (
        "from test_launch import hang\nfrom weft.transforms.pipelines.transports.launch import"
        f" launch\nif __name__ == '__main__':\n    launch(hang, 2, {str(tmp_path)!r})\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not all(
            (tmp_path / str(r)).exists() and (tmp_path / str(r)).read_text() for r in range(2)
        ):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        pids = [int((tmp_path / str(r)).read_text()) for r in range(2)]
    finally:
        process.kill()
        # Returns once all have ended; the resource tracker would report leaks
        _, err = process.communicate()
    assert err == ""
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(gone, pids))


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_while_a_rank_is_asked_for_waits_until_it_has_been(
    tmp_path: Path, rank: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from multiprocessing import reduction\n"
        "from test_launch import place\n"
        "from weft.transforms.pipelines.transports.launch import launch\n\n"
        "if __name__ == '__main__':\n"
        "    send, asked = reduction.sendfds, []\n"
        "    def interrupted(*args):\n"
        "        asked.append(args)\n"
        f"        if len(asked) == {rank + 1}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        send(*args)\n"
        "    reduction.sendfds = interrupted\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    try:\n"
        "        launch(place, 2, 7, 'b')\n"
        "    except KeyboardInterrupt:\n"
        "        print(len(launch(place, 2, 7, 'b')), 'ranks afterwards')\n"
    )
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr, done.returncode) == ("2 ranks afterwards\n", "", 0)


def test_a_rank_that_nobody_listens_to_any_more_ends_in_silence() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    ours.close()
    _send(theirs, b"the result")
    assert theirs.closed
