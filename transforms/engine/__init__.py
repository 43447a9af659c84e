"""The engine, the outermost transform: continuous batching turns a step over batches into a function over requests.

`Engine` drives it; the pieces are functions over values: a `HostState` that requests `add` to, that `schedule` takes a
step's work from, that `observe`s what the step drew, that `finish`es requests, and that changed parameters `outdate`.
"""

from weft.transforms.engine.engine import Engine
from weft.transforms.engine.host import Budget, HostState
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests import Request
from weft.transforms.engine.scheduler import add, finish, observe, outdate, schedule
from weft.transforms.engine.setup import EngineLimits
from weft.transforms.engine.speculation import Speculation
from weft.transforms.engine.stats import Stats
from weft.transforms.engine.work import Work

__all__ = [
    "Budget",
    "Engine",
    "EngineLimits",
    "HostState",
    "Request",
    "RequestOutput",
    "Speculation",
    "Stats",
    "Work",
    "add",
    "finish",
    "observe",
    "outdate",
    "schedule",
]
