"""A clock that a test moves, so that monitors and watchdogs run without threads and without
waiting."""

from collections.abc import Callable

from weft.transforms.pipelines.transports.watching.failures import Clock


class FakeTime:
    """The time of a test.

    Args:
        tick: seconds that pass each time the clock is read.
    """

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.meanwhile: list[Callable[[], object]] = []
        self._tick = tick
        self.clock = Clock(self._look, self.sleep)

    def _look(self) -> float:
        self.now += self._tick
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let some time pass, during which `meanwhile` is called."""
        self.now += seconds
        for call in self.meanwhile:
            call()

    def run(self, seconds: float, step: float = 0.05) -> None:
        """Let some time pass in steps."""
        for _ in range(round(seconds / step)):
            self.sleep(step)
