"""`FreshProcesses`: calls a function in processes that have seen no other call of it.

A function may keep a value from its first call for later ones: a mean in a dict, a Python number in
an attribute, whatever `functools.cache` holds. From then on, it answers equal arguments equally, so
that only a process which has not seen the first call can show the difference. Therefore one process
is forked before the function is called, and it forks another one for each question.
"""

import contextlib
import gc
import io
import os
import pickle
import select
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.values.trees import tree_leaves

# Seconds to wait for an answer: the fork of a process with threads may wait for a lock forever.
TIMEOUT = 60.0
# The most bytes of tensors in a question, since they are copied twice on their way.
MOST_BYTES = 2**26
_LENGTH = struct.Struct("<q")


class FreshProcesses:
    """A context manager: on entry it forks a process, which forks another one for each question.

    Args:
        answer: returns the answer to a question, which is a pytree. Both are pickled.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self._questions = -1
        self._answers = -1
        self._process = 0

    def __enter__(self) -> "FreshProcesses":
        if sys.platform != "linux":
            return self  # other systems have no fork, or have libraries that do not survive one
        child_reads, self._questions = os.pipe()
        self._answers, child_writes = os.pipe()
        self._process = _fork()
        if self._process == 0:
            os.close(self._questions)
            os.close(self._answers)
            _serve(self._answer, child_reads, child_writes)
        os.close(child_reads)
        os.close(child_writes)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def are_there(self) -> bool:
        """Whether the process runs: this system can fork, and no question has failed so far."""
        return self._process != 0

    def ask(self, question: Any) -> Any:
        """The answer of a process that has seen no other question; None if there is no answer.

        That is so if the question or the answer cannot be pickled, if the question is large or on a
        GPU, and if the process has died or takes too long.
        """
        tensors = [x for x in tree_leaves(question) if isinstance(x, Tensor)]
        if not self.are_there or any(x.device.type != "cpu" for x in tensors):
            return None
        if sum(x.nbytes for x in tensors) > MOST_BYTES:
            return None
        try:
            text = pickle.dumps(question)
        except Exception:
            return None
        try:
            _write(self._questions, text)
            answer = self._read_answer()
        except (OSError, EOFError, TimeoutError):
            self._end()
            return None
        try:
            if answer:
                return pickle.loads(answer)
            return None
        except Exception:
            return None

    def _read_answer(self) -> bytes:
        ready, _, _ = select.select([self._answers], [], [], TIMEOUT)
        if not ready:
            raise TimeoutError
        return _read(self._answers)

    def _end(self) -> None:
        if self._process == 0:
            return
        process = self._process
        self._process = 0
        os.close(self._questions)
        os.close(self._answers)
        for kill in (os.killpg, os.kill):  # the process may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns that a fork of a multi-threaded process may deadlock: see TIMEOUT.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(answer: Callable[[Any], Any], questions: int, answers: int) -> None:
    """Answer each question in a new process, until the pipe is closed; never returns."""
    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the process that asks
        gc.disable()  # a collection would write to memory pages, and so copy them in each fork
        while True:
            question = _read(questions)
            own_end, child_end = os.pipe()
            child = _fork()
            if child == 0:
                _answer_and_exit(answer, question, child_end)
            os.close(child_end)
            with open(own_end, "rb") as pipe:
                text = pipe.read()
            os.waitpid(child, 0)
            _write(answers, text)
    finally:
        os._exit(0)


def _answer_and_exit(answer: Callable[[Any], Any], question: bytes, end: int) -> None:
    """Write an answer to a pipe, or nothing if it cannot be pickled; never returns."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(TIMEOUT))
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and would be waited for
        with _silenced():
            text = pickle.dumps(answer(pickle.loads(question)))
        with open(end, "wb") as pipe:
            pipe.write(text)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Within, print nothing: the asking process makes the same calls, and prints their output."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _write(end: int, text: bytes) -> None:
    view = memoryview(_LENGTH.pack(len(text)) + text)
    while view:
        view = view[os.write(end, view) :]


def _read(end: int) -> bytes:
    (length,) = _LENGTH.unpack(_read_exactly(end, _LENGTH.size))
    return _read_exactly(end, length)


def _read_exactly(end: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(end, min(count, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
