"""`launch`: start a process for each rank, wait for all, and end them all when one fails."""

import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import attrs

from weft.errors import RankError
from weft.torchapi import host_store
from weft.transforms.transports.failures import Failure

HOST = "127.0.0.1"
_GRACE = 5.0
"""Seconds that the other ranks get, beyond the time-out, to end by themselves after one failed."""


@attrs.frozen(eq=False)
class Ended:
    """How a rank ended: with a result, or an error and its traceback."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""


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
        Whatever the first rank that failed raised; RankError for one that exited without a word.

    In a script, call it under `if __name__ == "__main__":`, as multiprocessing asks.
    """
    store = host_store(HOST, timeout)
    context = mp.get_context("forkserver")  # one process imports torch; the ranks are forks of it
    context.set_forkserver_preload(["weft.transforms.transports.distributed", "weft.transforms.generate"])
    started: list[tuple[BaseProcess, Connection]] = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        environment = _environment(rank, num_ranks, store.port)
        process: BaseProcess = context.Process(
            target=_run_rank, args=(theirs, environment, fn, args), name=f"weft rank {rank}"
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        ended = _collect(started, timeout + _GRACE)
    finally:
        for process, _ in started:
            _end(process)
    return _results(ended, started)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables; the store is hosted here, as its agent does."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _run_rank(pipe: Connection, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    try:
        message = pickle.dumps(Ended(fn(*args)))
    except BaseException as error:
        message = _pickled_error(error)
    pipe.send_bytes(message)
    pipe.close()


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(Ended(error=error, text=text))
        pickle.loads(message)
    except Exception:  # an error that cannot travel: its words can
        return pickle.dumps(Ended(error=RuntimeError(f"{type(error).__name__}: {error}"), text=text))
    return message


def _collect(started: list[tuple[BaseProcess, Connection]], grace: float) -> dict[int, Ended]:
    """How each rank ended; after a first failure the others have `grace` seconds."""
    ended: dict[int, Ended] = {}
    deadline: float | None = None
    pipes = {ours: rank for rank, (_, ours) in enumerate(started)}
    while pipes:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        ready = wait(list(pipes), left)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            ended[rank] = _read(pipe, started[rank][0], rank)
            if ended[rank].error is not None and deadline is None:
                deadline = time.monotonic() + grace
    return ended


def _read(pipe: Connection, process: BaseProcess, rank: int) -> Ended:
    try:
        return pickle.loads(pipe.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        process.join(1.0)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return Ended(error=Failure(rank, "its part", f"its process ended: {how}").for_rank(rank, "launch"))


def _results(ended: dict[int, Ended], started: list[tuple[BaseProcess, Connection]]) -> list[Any]:
    failed = {rank: found for rank, found in ended.items() if found.error is not None}
    if not failed:
        return [ended[rank].result for rank in range(len(started))]
    # The one who failed itself knows best; the others only heard of it.
    first = min(failed, key=lambda rank: (isinstance(failed[rank].error, RankError), rank))
    error = failed[first].error
    assert error is not None
    error.add_note(f"on rank {first} of {len(started)}")
    if failed[first].text and not isinstance(error, RankError):
        error.add_note(failed[first].text)
    raise error


def _end(process: BaseProcess) -> None:
    """End a process that we started, if it has not ended."""
    process.join(0.1 if process.exitcode is None else 0)
    for stop in (process.terminate, process.kill):
        if process.exitcode is None:
            stop()
            process.join(2.0)
