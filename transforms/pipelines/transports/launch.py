"""`launch`: starts a process for each rank, waits for all of them, and ends them when one fails.

It does not use torch's launchers. `torch.distributed.elastic` ends the other ranks at once, so that
they cannot say whom they waited for; it raises ChildFailedError in place of the rank's own
exception, and listens on all interfaces. `torch.multiprocessing.start_processes` returns no
results, and does not say how a process ended to the other ranks.
"""

import atexit
import math
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import attrs
import torch
from tqdm import tqdm

from weft.arguments.checks import COUNT, Rule, check_values
from weft.donation import refuse_donated_in
from weft.errors import ProgramError, RankError
from weft.torchapi.distributed import host_store
from weft.transforms.pipelines.transports.messaging.network import LOOPBACK, SECRET, Secret
from weft.transforms.pipelines.transports.watching.failures import Failure, check_timeout, described
from weft.transforms.pipelines.transports.watching.records import Exit, write_exit

# Seconds beyond the time-out in which the other ranks may end by themselves after one failed.
_GRACE = 5.0
# Seconds in which a rank may end after all others have ended and blamed it: it may have stalled.
_BLAMED_GRACE = 2.0
_IMPORTED = [
    "weft.transforms.pipelines.transports.distributed",
    "weft.transforms.engine.generate",
    "torch.distributed.tensor",  # of torch's, at the first operator in a mode: with sympy over a second
]
_READ = "see what they printed: most likely importing the script failed"
_NEEDS_GUARD = 'in a script, call launch under `if __name__ == "__main__":`'
_RULES: dict[str, Rule] = {
    "fn": (callable, "a function: launch(function, 2, *arguments)"),
    "num_ranks": COUNT,
    "the place of fn": (
        lambda fn: (
            getattr(fn, "__module__", None) != "__main__"
            or _can_be_imported(sys.modules["__main__"])
        ),
        (
            "a function of a .py file, imported from there: other processes cannot import one of a"
            " notebook or a session"
        ),
    ),
}


@attrs.frozen(eq=False)
class RankResult:
    """The end of a rank: a result, or an error and its traceback, or the exit of its process
    without either (`exit`)."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""
    exit: str = ""


def launch(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Call `fn(*args)` in `num_ranks` processes, each a rank with torchrun's variables set, and
    return their results.

    Args:
        fn: a function of a module (it is pickled by name), which makes its own transport
            (`Distributed()`).
        num_ranks: the number of processes to start, on this machine.
        args: pickled for each.
        timeout: seconds in which ranks may end by themselves after one of them failed, before they
            are ended.

    Returns:
        The result of `fn` on each rank, in order.

    Raises:
        The exception of the first rank that failed; RankError for a rank that exited without one;
        ProgramError for a function or arguments that cannot be launched; DonatedError for an
        argument that was donated before.

    In a script, call it under `if __name__ == "__main__":`, as multiprocessing asks.
    """
    call = f"launch({getattr(fn, '__name__', fn)!s:.60}, {num_ranks!r:.60})"
    check_values(
        call, _RULES, {"fn": fn, "num_ranks": num_ranks, "the place of fn": fn}, ProgramError
    )
    check_timeout("launch", timeout)
    refuse_donated_in(call, args=args)  # the ranks get copies, which bear no mark
    store = host_store(LOOPBACK, max(timeout, _GRACE))
    secret = Secret.fresh()
    context = mp.get_context("forkserver")  # one process imports torch; the ranks are forks of it
    context.set_forkserver_preload(_IMPORTED)
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        with _explain_start_errors(call), _forkserver_running(started):
            for rank in range(num_ranks):
                started.append(
                    _start(context, _environment(rank, num_ranks, store.port, secret), fn, args)
                )
        ended = _await_results(started, timeout + _GRACE, partial(write_exit, store, secret=secret))
    finally:
        _end([process for process, _ in started])
    return _results(ended, started)


def _can_be_imported(main: Any) -> bool:
    return getattr(main, "__spec__", None) is not None or os.path.isfile(
        getattr(main, "__file__", None) or ""
    )


@contextmanager
def _forkserver_running(started: Sequence[Any]) -> Iterator[None]:
    """Start the process that the ranks are forked from, if it does not run. It and they ignore
    Ctrl-C; this process gets it and ends them. If that happens before the first rank has started,
    the server may still be importing, so it is ended too."""
    before = _server_pid()
    resource_tracker.ensure_running()  # here, since it would unblock the signal
    try:
        with _defer_ctrl_c():
            forkserver.ensure_running()
        yield
    except KeyboardInterrupt:
        if not started and (pid := _server_pid()) not in (None, before):
            os.kill(pid, signal.SIGTERM)
            vars(forkserver)[
                "_forkserver"
            ]._stop()  # waits for its end: a later launch starts another one
        raise


@contextmanager
def _defer_ctrl_c() -> Iterator[None]:
    """Within, Ctrl-C waits, and processes that are started never get it: they inherit the signals
    that this thread blocks. Another thread may get the signal, and Python raises in the main
    thread: there the handler waits too."""
    handler = signal.getsignal(signal.SIGINT)
    handles = threading.current_thread() is threading.main_thread() and handler is not None
    came: list[Any] = []
    if handles:
        signal.signal(signal.SIGINT, lambda *what: came.append(what))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handles:
            signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[0])


def _server_pid() -> int | None:
    return cast("int | None", vars(forkserver)["_forkserver"]._forkserver_pid)


@contextmanager
def _explain_start_errors(call: str) -> Iterator[None]:
    """Raise ProgramError for errors of multiprocessing about what it cannot start."""
    try:
        yield
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        instead = (
            "a function of a module or of the script itself, by its name, and arguments that can be"
            " pickled"
        )
        raise ProgramError(call, f"{error}", instead) from error
    except RuntimeError as error:
        if "bootstrapping" not in str(error):
            raise
        problem = "a rank that imports the script, and comes by the call that started it"
        raise ProgramError(call, problem, _NEEDS_GUARD) from None


def _start(
    context: Any, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[BaseProcess, Connection]:
    """A rank's process, and the pipe from which its result can be read."""
    ours, theirs = context.Pipe(duplex=False)
    name = f"weft rank {environment['RANK']}"
    process: BaseProcess = context.Process(
        target=_run_rank, args=(theirs, environment, fn, args), name=name
    )
    try:
        with _defer_ctrl_c():  # an interrupted request would end the server with a traceback
            process.start()
    except BaseException:
        ours.close()  # a rank that starts later ends when its pipe is closed
        raise
    theirs.close()
    return process, ours


def _environment(rank: int, num_ranks: int, port: int, secret: Secret) -> dict[str, str]:
    """The variables that torchrun sets, and the run's secret. The store is in this process, as it
    is in torchrun's agent."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        SECRET: secret.text,
    }


def _run_rank(
    pipe: Connection, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server may have been started by other code
    # Tqdm's own lock is a semaphore of the system, which a killed rank would leave
    tqdm.set_lock(threading.RLock())
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:  # ranks that each take all cores slow each other down
        torch.set_num_threads(
            max(1, torch.get_num_threads() // int(environment["LOCAL_WORLD_SIZE"]))
        )
    try:
        message = _pickled_result(fn, fn(*args))
        atexit._run_exitfuncs()  # transports close after what they sent has left; multiprocessing does not call these
    except SystemExit:
        raise
    except BaseException as error:
        message = _pickled_error(error)
    _send(pipe, message)


def _send(pipe: Connection, message: bytes) -> None:
    """Send a rank's last word. A launcher that was interrupted no longer reads it."""
    with suppress(BrokenPipeError):
        pipe.send_bytes(message)
    pipe.close()


def _end_with_parent(pipe: Connection) -> None:
    """End this rank when its launcher ends, or when nobody reads the pipe since the start was
    interrupted. `os._exit`, since only the main thread could end the process in an orderly way, and
    it may never return to Python."""
    parent = mp.parent_process()
    assert parent is not None, "a rank is started by a process"
    wait([parent.sentinel, pipe])
    os._exit(1)


def _pickled_result(fn: Callable[..., Any], result: Any) -> bytes:
    try:
        return pickle.dumps(RankResult(result))
    except Exception as error:
        call = f"launch({getattr(fn, '__name__', fn)!s:.60}, …)"
        problem = f"a result that cannot be pickled: {error}"
        raise ProgramError(
            call, problem, "return numbers, texts, tensors on the CPU, or containers of these"
        ) from error


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(RankResult(error=error, text=text))
        pickle.loads(message)
    except Exception:  # an error that cannot be pickled: send its text
        return pickle.dumps(RankResult(error=RuntimeError(described(error)), text=text))
    return message


def _await_results(
    started: list[tuple[BaseProcess, Connection]],
    grace: float,
    write_end: Callable[[int, Exit], None],
) -> dict[int, RankResult]:
    """The end of each rank; after a first failure the others have `grace` seconds. `write_end`
    tells all ranks of each."""
    ended: dict[int, RankResult] = {}
    deadline = math.inf
    pipes = {ours: rank for rank, (_, ours) in enumerate(started)}
    while pipes:
        if deadline == math.inf:
            left = None
        else:
            left = max(deadline - time.monotonic(), 0)
        ready = wait(list(pipes), left)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            ended[rank] = _read(pipe, started[rank][0])
            write_end(rank, _exit(ended[rank]))
        if any(result.error or result.exit for result in ended.values()):
            only_blamed = set(pipes.values()) <= {error.rank for error in _rank_errors(ended)}
            deadline = min(deadline, time.monotonic() + (_BLAMED_GRACE if only_blamed else grace))
    return ended


def _read(pipe: Connection, process: BaseProcess) -> RankResult:
    try:
        ended: RankResult = pickle.loads(pipe.recv_bytes())
        return ended
    except EOFError:
        process.join(1.0)
        code = process.exitcode
        return RankResult(
            exit=(
                signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            )
        )


def _exit(ended: RankResult) -> Exit:
    """The end of a rank, as the other ranks are told."""
    if ended.error is not None:
        return Exit(False, f"it raised {described(ended.error)}")
    if ended.exit:
        return Exit(False, ended.exit)
    return Exit(True, "its function returned")


def _rank_errors(ended: dict[int, RankResult]) -> list[RankError]:
    """The errors in which ranks blame each other."""
    return [
        result.error for _, result in sorted(ended.items()) if isinstance(result.error, RankError)
    ]


def _results(
    ended: dict[int, RankResult], started: list[tuple[BaseProcess, Connection]]
) -> list[Any]:
    """The results of all ranks; raises the error that says most: that of a rank that failed itself,
    or of one that was told of a failure."""
    silent = [rank for rank, result in sorted(ended.items()) if result.exit]
    failed = [rank for rank, result in sorted(ended.items()) if result.error is not None]
    if not failed and not silent:
        return [ended[rank].result for rank in range(len(started))]
    first = min(failed or silent, key=lambda rank: (isinstance(ended[rank].error, RankError), rank))
    error = ended[first].error
    cause = f"its process ended: {ended[first].exit}"
    if error is not None:
        error.add_note(f"on rank {first} of {len(started)}")
        if not isinstance(error, RankError):
            error.add_note(ended[first].text)
    elif [result.exit for result in ended.values()] == ["exit code 1"] * len(started):
        problem = f"{cause}, as that of every rank"
        instead = f"{_READ}; {_NEEDS_GUARD}"
        error = RankError("launch", problem, instead, 0, "its part", cause)
    else:
        error = Failure(first, "its part", cause).for_rank(first, "launch")
    raise error


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the processes that have not ended."""
    _join(processes, 0.1 * len(processes))
    for process in filter(_runs, processes):
        process.terminate()
        with suppress(ProcessLookupError):
            # A stopped process does not get SIGTERM before this
            os.kill(cast("int", process.pid), signal.SIGCONT)
    _join(processes, 2.0)
    for process in filter(_runs, processes):
        process.kill()
    _join(processes, 2.0)


def _runs(process: BaseProcess) -> bool:
    return process.exitcode is None


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait for the end of all, for at most so many seconds."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
