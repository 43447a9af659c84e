"""The functions that ranks run in separate processes, and the pipelines for which every transport
must equal Local."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from own_batches import OWN_BATCHES, WHOLE_BATCHES, Data
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.outputs import IntermediateTensors
from weft.errors import WeftError
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import scan
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.values.trees import tree_map

_FOLDERS = Path(__file__).parent, Path(__file__).parents[3]
# For processes that import this module.
PYTHONPATH = os.pathsep.join([*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])])


def scale(p: Tensor, s: Tensor, batch: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiplies by its parameter, and sums its inputs in its state."""
    y = (batch if x is None else x) * p
    return s + y.sin().sum(), y


def advance(s: Tensor, batch: Tensor, out: Tensor | None) -> Tensor:
    return s * 1.5 + batch.sum() - (0 if out is None else out.cos().sum())


class Hidden(NamedTuple):
    """A value of many kinds of leaves."""

    wide: Tensor
    few: Tensor
    none: Tensor
    name: str


def mixed(p: Tensor, s: Tensor, batch: Tensor, x: Hidden | None) -> tuple[Tensor, Hidden]:
    """Sends tensors that are not contiguous, have other dtypes, or are empty, and values that are
    not tensors."""
    wide = torch.stack([batch, batch * p]).t() if x is None else x.wide * p
    few = (wide[:, 0] > 1).clone() if x is None else ~x.few
    return s + wide.contiguous().sum(), Hidden(wide, few, wide[:, :0], "hidden")


def hidden(p: Tensor, s: Tensor, batch: Batch, x: Any) -> tuple[Tensor, IntermediateTensors]:
    """A stage over batches of requests."""
    values = batch.rows.float()[:, None].expand(-1, 4) if x is None else x.hidden_states
    return s + values.sum(), IntermediateTensors(values * p)


Scenario = Callable[[int, Transport], Any]


def _values(num_ranks: int, transport: Transport) -> tuple[list[Tensor], list[Tensor]]:
    """Params and states of the ranks in this process."""
    here = transport.ranks(num_ranks)
    return [torch.tensor(1.1 + r) for r in here], [torch.tensor(0.1 * r) for r in here]


def calls(num_ranks: int, transport: Transport) -> Any:
    step = pipeline([scale] * num_ranks, transport=transport)
    params, state = _values(num_ranks, transport)
    outs = []
    for size in (3, 3, 1):
        state, out = step(params, state, torch.linspace(-2, 2, size))
        outs.append(out)
    return state, outs


def microbatches(num_ranks: int, transport: Transport) -> Any:
    step = pipeline([scale] * num_ranks, microbatches=3, advance=advance, transport=transport)
    params, state = _values(num_ranks, transport)
    outs = []
    for size in (5, 2, 7, 5):
        state, out = step(params, state, torch.linspace(-2, 2, size))
        outs.append(out)
    return state, outs


def stream(num_ranks: int, transport: Transport) -> Any:
    step = pipeline([scale] * num_ranks, advance=advance, transport=transport)
    params, state = _values(num_ranks, transport)
    batches = [torch.full((1 + i % 3,), float(i)) for i in range(6)]
    jobs = [Job(), Job(feeds=False), Job(after=0), Job(), Job(feeds=False), Job(after=2)]
    plain = step.stream(params, state, batches)
    return plain, step.stream(params, state, batches, jobs)


def scanned(num_ranks: int, transport: Transport) -> Any:
    step = scan(
        pipeline([scale] * num_ranks, microbatches=2, advance=advance, transport=transport), 3
    )
    params, state = _values(num_ranks, transport)
    return step(params, state, torch.linspace(-1, 3, 4))


def graphified(num_ranks: int, transport: Transport) -> Any:
    return _graphs(num_ranks, transport, "safe")


def lending(num_ranks: int, transport: Transport) -> Any:
    return _graphs(num_ranks, transport, "borrow")


def _graphs(num_ranks: int, transport: Transport, outputs: Any) -> Any:
    stages = [graphify(scale, outputs=outputs) for _ in range(num_ranks)]
    step = pipeline(stages, microbatches=2, advance=advance, transport=transport)
    params, state = _values(num_ranks, transport)
    outs = []
    for i in range(4):
        state, out = step(params, state, torch.linspace(-2, i, 4))
        outs.append(out.clone())
    here = transport.ranks(num_ranks)
    return state, outs, [stages[r].cache_info().captures for r in here]


def sessions(num_ranks: int, transport: Transport) -> Any:
    return _sessions([scale] * num_ranks, transport)


def lent_sessions(num_ranks: int, transport: Transport) -> Any:
    return _sessions([graphify(scale, outputs="borrow") for _ in range(num_ranks)], transport)


def _sessions(stages: list[Any], transport: Transport) -> Any:
    """Submissions of many sizes, one after another; returned outputs are received some submissions
    later."""
    step = pipeline(stages, advance=advance, transport=transport)
    params, state = _values(len(stages), transport)
    outs: list[Any] = []
    for sizes in ([1] * 7, [5, 1, 2], [8]):
        session = step.session(params, state)
        start = 0
        for size in sizes:
            numbers = range(start, start + size)
            jobs = [
                Job(feeds=n % 4 != 3, after=n - 3 if n >= 3 and n % 4 != 2 else None)
                for n in numbers
            ]
            outs += session.submit([torch.full((2,), float(n)) for n in numbers], jobs)
            start += size
        state, rest = session.close()
        outs += rest
    return state, outs


def trees(num_ranks: int, transport: Transport) -> Any:
    step = pipeline([mixed] * num_ranks, transport=transport)
    params, state = _values(num_ranks, transport)
    return step(params, state, torch.linspace(-2, 2, 5))


def requests(num_ranks: int, transport: Transport) -> Any:
    step = pipeline([hidden] * num_ranks, microbatches=2, transport=transport)
    params, state = _values(num_ranks, transport)
    outs = []
    for rows in ([0, 1, 2, 3], [2], [4, 5, 6]):
        state, out = step(params, state, Batch.decode(rows))
        outs.append(out.hidden_states)
    return state, outs


def own_batches(num_ranks: int, transport: Transport) -> Any:
    """Custom batch classes, in one to three micro-batches; one unknown class in two sizes."""
    params, state = _values(num_ranks, transport)
    outs = []
    for batches, most in ((OWN_BATCHES, 3), (WHOLE_BATCHES, 1)):
        for batch, first in batches.values():
            for parts in range(1, most + 1):
                step = pipeline(
                    _stages_from(first, num_ranks), microbatches=parts, transport=transport
                )
                state, out = step(params, state, batch)
                outs.append(out)
    step = pipeline(_stages_from(lambda batch: batch.x + batch.y, num_ranks), transport=transport)
    for size in (3, 5):
        state, out = step(params, state, Data(torch.ones(size), torch.ones(size)))
        outs.append(out)
    return state, outs


def _stages_from(first: Callable[[Any], Any], num_ranks: int) -> list[Any]:
    def stage(p: Tensor, s: Tensor, batch: Any, x: Any) -> tuple[Tensor, Any]:
        return s + p, tree_map(lambda leaf: leaf * 2, first(batch) if x is None else x)

    return [stage] * num_ranks


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        calls,
        microbatches,
        stream,
        scanned,
        graphified,
        lending,
        sessions,
        lent_sessions,
        trees,
        requests,
        own_batches,
    )
}


def run_scenario(name: str, num_ranks: int) -> Any:
    """A rank's part of a scenario."""
    torch.set_num_threads(1)
    return SCENARIOS[name](num_ranks, Distributed(timeout=20))


def run_all(num_ranks: int) -> Any:
    """All scenarios with one transport, and some with a second one."""
    torch.set_num_threads(1)
    one = Distributed(timeout=20)
    two = Distributed(timeout=20)
    return (
        [scenario(num_ranks, one) for scenario in SCENARIOS.values()],
        calls(num_ranks, two),
        calls(num_ranks, one),
    )


def told(fn: Callable[[], Any]) -> str:
    """The text of the error that `fn` raises, or a text that says it raised none."""
    try:
        fn()
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
