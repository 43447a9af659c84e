"""The engine: continuous batching, which turns a step over batches into a function over requests.

`Engine` drives it. Its parts are functions over a `HostState`: `add` puts a request into the queue,
`schedule` decides the next step's `Work`, `observe` reads the tokens that the step sampled,
`finish` ends a request, and `outdate` notes that the parameters have changed. The path of a
request: `requests/inputs.py` checks it, `scheduler.py` admits it, `requests/prefix_cache.py` gives
it pages (`requests/pages.py`), `steps/executor.py` runs its steps, `steps/results.py` copies its
tokens to the host, and `outputs.py` turns them into text.

`evaluation` measures a model: `score` computes its perplexity and its accuracy; `trace_run` and
`compare_runs` show how its results differ between splits and graph modes.
"""

from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.comparison import (
    RunComparison,
    RunTrace,
    Way,
    compare_runs,
    trace_run,
)
from weft.transforms.engine.evaluation.scoring import Score, Task, read_tasks, score
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests.host_state import Budget, HostState, Request
from weft.transforms.engine.scheduler import add, finish, observe, outdate, schedule
from weft.transforms.engine.stats import Stats
from weft.transforms.engine.steps.step import Work

__all__ = [
    "Budget",
    "Engine",
    "EngineLimits",
    "HostState",
    "Request",
    "RequestOutput",
    "RunComparison",
    "RunTrace",
    "Score",
    "Speculation",
    "Stats",
    "Task",
    "Way",
    "Work",
    "add",
    "compare_runs",
    "finish",
    "observe",
    "outdate",
    "read_tasks",
    "schedule",
    "score",
    "trace_run",
]
