"""`launch`: starts a process for each rank, waits for all of them, and ends them when one fails.

It does not use torch's launchers. `torch.distributed.elastic` ends the other ranks at once, so they
cannot report which rank they waited for. It also raises ChildFailedError instead of the rank's own
exception, and listens on all interfaces. `torch.multiprocessing.start_processes` returns no
results, and does not tell the other ranks how a process ended.
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
from weft.errors import ProgramError, RankError
from weft.torchapi.distributed import host_store
from weft.transforms.pipelines.transports.messaging.network import LOOPBACK, SECRET, Secret
from weft.transforms.pipelines.transports.watching.failures import Failure, check_timeout, described
from weft.transforms.pipelines.transports.watching.records import Exit, write_exit
from weft.values.donation import refuse_donated_in

# Seconds beyond the time-out that the other ranks have to end by themselves after one rank failed.
_GRACE = 5.0
# Seconds that a rank has to end after all others have ended and blamed it: it may have stalled.
_BLAMED_GRACE = 2.0
# Modules that the forkserver imports once for all ranks
_IMPORTED = [
    "weft.transforms.pipelines.transports.distributed",
    "weft.transforms.engine.generate",
    # torch imports it at the first operator in a mode; with sympy this takes more than a second.
    "torch.distributed.tensor",
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
    """How a rank ended: with a result; with an error and its traceback (`text`); or with neither,
    when its process exited (`exit`)."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""
    exit: str = ""


def launch(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Call `fn(*args)` in `num_ranks` processes, each a rank with torchrun's variables set, and
    return their results.

    Args:
        fn: a function of a module (it is pickled by name). It must make its own transport
            (`Distributed()`).
        num_ranks: the number of processes to start, on this machine.
        args: the arguments of `fn`, pickled for each process.
        timeout: seconds that the other ranks have to end by themselves after one failed, before
            they are terminated.

    Returns:
        The result of `fn` on each rank, in order.

    Raises:
        The exception of the first rank that failed; RankError for a rank that exited without an
        exception; ProgramError for a function or arguments that cannot be launched; DonatedError
        for an argument that was donated before.

    In a script, call it under `if __name__ == "__main__":`, as multiprocessing requires.
    """
    call = f"launch({getattr(fn, '__name__', fn)!s:.60}, {num_ranks!r:.60})"
    check_values(
        call, _RULES, {"fn": fn, "num_ranks": num_ranks, "the place of fn": fn}, ProgramError
    )
    check_timeout("launch", timeout)
    # Check here: the ranks get copies, which do not carry the mark of a donated tensor.
    refuse_donated_in(call, args=args)
    store = host_store(LOOPBACK, max(timeout, _GRACE))
    secret = Secret.fresh()
    # One process imports torch, and the ranks are forks of it.
    context = mp.get_context("forkserver")
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
    """Start the process that the ranks are forked from (the server), unless it is running. The
    server and the ranks ignore Ctrl-C; this process gets it and ends the ranks. If Ctrl-C comes
    before the first rank has started, the server may still be importing, so it is ended too."""
    before = _server_pid()
    # Before Ctrl-C is deferred, since this call would unblock the signal
    resource_tracker.ensure_running()
    try:
        with _defer_ctrl_c():
            forkserver.ensure_running()
        yield
    except KeyboardInterrupt:
        if not started and (pid := _server_pid()) not in (None, before):
            os.kill(pid, signal.SIGTERM)
            # Waits until the server has ended, so that a later launch starts a new one
            vars(forkserver)["_forkserver"]._stop()
        raise


@contextmanager
def _defer_ctrl_c() -> Iterator[None]:
    """Within this context, Ctrl-C is deferred, and processes that are started never get it, since
    they inherit the signals that this thread blocks. Another thread may still get the signal, for
    which Python calls the handler in the main thread, so the handler is deferred there too."""
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
    """Raise ProgramError for the errors by which multiprocessing refuses to start a process."""
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
        # An interrupted request would end the server with a traceback.
        with _defer_ctrl_c():
            process.start()
    except BaseException:
        # A rank that starts after this ends because its pipe is closed (`_end_with_parent`).
        ours.close()
        raise
    theirs.close()
    return process, ours


def _environment(rank: int, num_ranks: int, port: int, secret: Secret) -> dict[str, str]:
    """The variables that torchrun sets, and the run's secret. This process hosts the store, as
    torchrun's agent does."""
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
    # Other code may have started the server, without Ctrl-C blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's default lock is a system semaphore, which a killed rank would leak.
    tqdm.set_lock(threading.RLock())
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    # Ranks that each use all cores slow each other down.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(1, torch.get_num_threads() // int(environment["LOCAL_WORLD_SIZE"]))
        )
    try:
        message = _pickled_result(fn, fn(*args))
        # multiprocessing skips exit functions, but transports need them: they close only after
        # everything that they sent has left.
        atexit._run_exitfuncs()
    except SystemExit:
        raise
    except BaseException as error:
        message = _pickled_error(error)
    _send(pipe, message)


def _send(pipe: Connection, message: bytes) -> None:
    """Send a rank's result. A launcher that was interrupted no longer reads it."""
    with suppress(BrokenPipeError):
        pipe.send_bytes(message)
    pipe.close()


def _end_with_parent(pipe: Connection) -> None:
    """End this rank when its launcher ends, or when nobody reads the pipe because the start was
    interrupted. It calls `os._exit`, since only the main thread could end the process in an orderly
    way, and that thread may never return to Python."""
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
    except Exception:
        # The error cannot be pickled, or not be unpickled: send its text.
        return pickle.dumps(RankResult(error=RuntimeError(described(error)), text=text))
    return message


def _await_results(
    started: list[tuple[BaseProcess, Connection]],
    grace: float,
    write_end: Callable[[int, Exit], None],
) -> dict[int, RankResult]:
    """How each rank ended. After the first failure, the other ranks have `grace` seconds to end.
    `write_end` tells all ranks how each one ended."""
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
    """How a rank ended, in the form in which the other ranks are told."""
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
    """The results of all ranks. Otherwise raises the most informative error: preferably the error
    of a rank that failed itself, not of a rank that was told of a failure."""
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
    """Terminate the processes that are still running."""
    _join(processes, 0.1 * len(processes))
    for process in filter(_runs, processes):
        process.terminate()
        with suppress(ProcessLookupError):
            # A stopped process gets SIGTERM only once it continues.
            os.kill(cast("int", process.pid), signal.SIGCONT)
    _join(processes, 2.0)
    for process in filter(_runs, processes):
        process.kill()
    _join(processes, 2.0)


def _runs(process: BaseProcess) -> bool:
    return process.exitcode is None


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait until all processes have ended, for at most this many seconds."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
