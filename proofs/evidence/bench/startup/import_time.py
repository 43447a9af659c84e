"""The time of `import weft` compared to `import torch`, in new processes.

    python -m weft.proofs.evidence.bench.startup.import_time

`weft` imports its names on first use, so there are two figures: the import alone, and with every
name of `weft.__all__`.
"""

import statistics
import subprocess
import sys
from collections.abc import Mapping

_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
# torch by itself, since weft cannot be faster than what it needs.
_CASES = {
    "import torch": "import torch",
    "import torch, weft": "import torch, weft",
    "import weft": "import weft",
    "every name of weft.__all__": "import weft; [getattr(weft, name) for name in weft.__all__]",
}


def seconds(code: str) -> float:
    """The seconds that a line of code takes in a new process."""
    done = subprocess.run(
        # A new process each time: a module is imported once.
        [sys.executable, "-c", _TIMED.format(code)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def measure(rounds: int) -> Mapping[str, float]:
    """The median seconds of each case. The cases take turns, so that other load on the machine
    affects all of them."""
    for code in _CASES.values():
        seconds(code)  # brings files into the page cache, and writes .pyc files
    times: dict[str, list[float]] = {name: [] for name in _CASES}
    for _ in range(rounds):
        for name, code in _CASES.items():
            times[name].append(seconds(code))
    return {name: statistics.median(samples) for name, samples in times.items()}


def report(medians: Mapping[str, float]) -> str:
    """One line per case, with its ratio to `import torch`.

    >>> print(report({"import torch": 2.0, "import weft": 0.5}))
    import torch                2.000 s  1.00 x
    import weft                 0.500 s  0.25 x
    """
    torch = medians["import torch"]
    return "\n".join(
        f"{name:<26} {time:6.3f} s  {time / torch:.2f} x" for name, time in medians.items()
    )


if __name__ == "__main__":
    print(report(measure(rounds=5)))
