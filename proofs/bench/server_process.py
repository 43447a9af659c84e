"""`serving`: `weft serve` as a process on a free port of this machine, for a benchmark."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_END_SECONDS = 30


@contextmanager
def serving(*flags: str, timeout: float = 300.0) -> Iterator[str]:
    """The address of a server, such as `http://127.0.0.1:40123/v1`, until the block ends.

    Args:
        flags: of `weft serve`, the model among them.
        timeout: seconds until it must listen.

    Raises:
        RuntimeError: it ended before, or was too late.
    """
    words = [sys.executable, "-m", "weft", "serve", *flags, "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    late = threading.Timer(timeout, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if " is served at " in line), "")
        late.cancel()
        if not line:
            raise RuntimeError(f"{' '.join(words)} does not serve; it ended with {process.wait()}")
        yield line.split()[-1]
    finally:
        late.cancel()
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
