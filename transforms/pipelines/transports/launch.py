"""`launch`: start a process for each rank, wait for all, and end them all when one fails."""

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

from weft.arguments import is_int
from weft.errors import ProgramError, RankError
from weft.torchdist import host_store
from weft.transforms.pipelines.transports.board import Exit, note_exit
from weft.transforms.pipelines.transports.failures import Failure, check_timeout, described
from weft.transforms.pipelines.transports.network import LOOPBACK
from weft.transforms.pipelines.transports.secret import VARIABLE, Secret

_GRACE = 5.0
"""Seconds that the other ranks get, beyond the time-out, to end by themselves after one failed."""
_BLAMED = 2.0
"""Seconds that a rank gets to end once all others have, and blame it: it may have stalled."""
_READ = "see what they printed: most likely importing the script failed"
_GUARDED = 'in a script, call launch under `if __name__ == "__main__":`'


@attrs.frozen(eq=False)
class Ended:
    """How a rank ended: with a result, or an error and its traceback, or its process did without a word (`exit`)."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""
    exit: str = ""


def launch(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    """Call `fn(*args)` in `num_ranks` processes, each a rank with torchrun's variables set, and return their results.

    Args:
        fn: a function of a module (it is pickled by name); it makes its own transport (`Distributed()`).
        num_ranks: processes to start, on this machine.
        args: pickled for each.
        timeout: seconds that ranks get to end by themselves once one of them failed, before they are ended.

    Returns:
        What `fn` returned on each rank, in order.

    Raises:
        Whatever the first rank that failed raised; RankError for one that exited without a word; ProgramError for what
        cannot be launched.

    In a script, call it under `if __name__ == "__main__":`, as multiprocessing asks.
    """
    call = f"launch({getattr(fn, '__name__', fn)!s:.60}, {num_ranks!r:.60})"
    if not callable(fn) or not is_int(num_ranks, 1):
        raise ProgramError(call, "no function, or no number of ranks", "launch(function, 2, *arguments)")
    if getattr(fn, "__module__", None) == "__main__" and not _can_be_imported(sys.modules["__main__"]):
        seen = "a function of a notebook or of an interactive session, which another process cannot import"
        raise ProgramError(call, seen, "put it into a .py file, and import it from there")
    check_timeout("launch", timeout)
    store, secret = host_store(LOOPBACK, max(timeout, _GRACE)), Secret.fresh()
    context = mp.get_context("forkserver")  # one process imports torch; the ranks are forks of it
    context.set_forkserver_preload(
        ["weft.transforms.pipelines.transports.distributed", "weft.transforms.engine.generate"]
    )
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        with _named(call), _served(started):
            for rank in range(num_ranks):
                started.append(_start(context, _environment(rank, num_ranks, store.port, secret), fn, args))
        ended = _collect(started, timeout + _GRACE, partial(note_exit, store, secret=secret))
    finally:
        _end([process for process, _ in started])
    return _results(ended, started)


def _can_be_imported(main: Any) -> bool:
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


@contextmanager
def _served(started: Sequence[Any]) -> Iterator[None]:
    """Start the process that ranks are forks of, if it does not run. It and they are deaf to Ctrl-C, which this process
    hears: it ends them. Where that happens before the first rank has started, the server may still be importing, and
    would go on for seconds."""
    before = _server_pid()
    resource_tracker.ensure_running()  # here, for it would unblock the signal
    try:
        with _uninterrupted():
            forkserver.ensure_running()
        yield
    except KeyboardInterrupt:
        if not started and (pid := _server_pid()) not in (None, before):
            os.kill(pid, signal.SIGTERM)
            vars(forkserver)["_forkserver"]._stop()  # waits for its end: a later launch starts another one
        raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Within, Ctrl-C waits, and processes that are started never hear it: they inherit what this thread blocks. Another
    thread may get the signal, and Python raises in the main one: there, the handler waits too."""
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
def _named(call: str) -> Iterator[None]:
    """What a process cannot be started with, in weft's words."""
    try:
        yield
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        instead = "a function of a module or of the script itself, by its name, and arguments that can be pickled"
        raise ProgramError(call, f"{error}", instead) from error
    except RuntimeError as error:
        if "bootstrapping" not in str(error):
            raise
        seen = "a rank that imports the script, and comes by the call that started it"
        raise ProgramError(call, seen, _GUARDED) from None


def _start(
    context: Any, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[BaseProcess, Connection]:
    """A rank's process, and what it will write its result into."""
    ours, theirs = context.Pipe(duplex=False)
    name = f"weft rank {environment['RANK']}"
    process: BaseProcess = context.Process(target=_run_rank, args=(theirs, environment, fn, args), name=name)
    try:
        with _uninterrupted():  # the server would end with a traceback if it was asked by halves
            process.start()
    except BaseException:
        ours.close()  # a rank that was asked for, and comes later, ends
        raise
    theirs.close()
    return process, ours


def _environment(rank: int, num_ranks: int, port: int, secret: Secret) -> dict[str, str]:
    """torchrun's variables, and the run's secret; the store is hosted here, as its agent does."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        VARIABLE: secret.text,
    }


def _run_rank(pipe: Connection, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for a server of ranks that somebody else started
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which outlives a rank that is killed
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:  # ranks that each take all cores keep each other waiting
        torch.set_num_threads(max(1, torch.get_num_threads() // int(environment["LOCAL_WORLD_SIZE"])))
    try:
        message = _pickled_result(fn, fn(*args))
        atexit._run_exitfuncs()  # transports close, once what they sent has left; multiprocessing would not call them
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
    """A rank does not outlive its launcher, nor its start if that was interrupted: then nobody reads the pipe."""
    parent = mp.parent_process()
    assert parent is not None, "a rank is started by a process"
    wait([parent.sentinel, pipe])
    os._exit(1)


def _pickled_result(fn: Callable[..., Any], result: Any) -> bytes:
    try:
        return pickle.dumps(Ended(result))
    except Exception as error:
        call, seen = f"launch({getattr(fn, '__name__', fn)!s:.60}, …)", f"a result that cannot be pickled: {error}"
        raise ProgramError(call, seen, "return numbers, texts, tensors on the CPU, or what is made of these") from error


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(Ended(error=error, text=text))
        pickle.loads(message)
    except Exception:  # an error that cannot travel: its words can
        return pickle.dumps(Ended(error=RuntimeError(described(error)), text=text))
    return message


def _collect(
    started: list[tuple[BaseProcess, Connection]], grace: float, note: Callable[[int, Exit], None]
) -> dict[int, Ended]:
    """How each rank ended; after a first failure the others have `grace` seconds. `note` tells all ranks of each."""
    ended: dict[int, Ended] = {}
    deadline = math.inf
    pipes = {ours: rank for rank, (_, ours) in enumerate(started)}
    while pipes:
        left = None if deadline == math.inf else max(deadline - time.monotonic(), 0)
        ready = wait(list(pipes), left)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            ended[rank] = _read(pipe, started[rank][0])
            note(rank, _exit(ended[rank]))
        if any(found.error or found.exit for found in ended.values()):
            only_blamed = set(pipes.values()) <= {error.rank for error in _rank_errors(ended)}
            deadline = min(deadline, time.monotonic() + (_BLAMED if only_blamed else grace))
    return ended


def _read(pipe: Connection, process: BaseProcess) -> Ended:
    try:
        ended: Ended = pickle.loads(pipe.recv_bytes())
        return ended
    except EOFError:
        process.join(1.0)
        code = process.exitcode
        return Ended(exit=signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}")


def _exit(ended: Ended) -> Exit:
    """What the other ranks are told."""
    if ended.error is not None:
        return Exit(False, f"it raised {described(ended.error)}")
    return Exit(False, ended.exit) if ended.exit else Exit(True, "its function returned")


def _rank_errors(ended: dict[int, Ended]) -> list[RankError]:
    """What ranks say of each other."""
    return [found.error for _, found in sorted(ended.items()) if isinstance(found.error, RankError)]


def _results(ended: dict[int, Ended], started: list[tuple[BaseProcess, Connection]]) -> list[Any]:
    """What all returned, or the error that says most: of a rank that failed itself, then of one that heard of it."""
    silent = [rank for rank, found in sorted(ended.items()) if found.exit]
    failed = [rank for rank, found in sorted(ended.items()) if found.error is not None]
    if not failed and not silent:
        return [ended[rank].result for rank in range(len(started))]
    if not failed:
        cause = f"its process ended: {ended[silent[0]].exit}"
        if len(silent) == len(started) and {ended[rank].exit for rank in silent} == {"exit code 1"}:
            raise RankError("launch", f"{cause}, as that of every rank", f"{_READ}; {_GUARDED}", 0, "its part", cause)
        raise Failure(silent[0], "its part", cause).for_rank(silent[0], "launch")
    first = min(failed, key=lambda rank: (isinstance(ended[rank].error, RankError), rank))
    error = ended[first].error
    assert error is not None
    error.add_note(f"on rank {first} of {len(started)}")
    if not isinstance(error, RankError):
        error.add_note(ended[first].text)
    raise error


def _end(processes: Sequence[BaseProcess]) -> None:
    """End the processes that have not ended."""
    _join(processes, 0.1 * len(processes))
    for process in filter(_runs, processes):
        process.terminate()
        with suppress(ProcessLookupError):
            os.kill(cast("int", process.pid), signal.SIGCONT)  # one that was stopped does not hear it otherwise
    _join(processes, 2.0)
    for process in filter(_runs, processes):
        process.kill()
    _join(processes, 2.0)


def _runs(process: BaseProcess) -> bool:
    return process.exitcode is None


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait for the end of all, so long at most."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
