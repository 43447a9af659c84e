"""The laws as a table: each with the strategy that draws its cases, so that CI, a GPU and the mutants run the same
checks."""

from collections.abc import Callable

import attrs
import torch
from hypothesis import strategies as st

from weft.proofs import laws, strategies
from weft.transforms.ladder import MODES


@attrs.frozen
class Law:
    """A law and how one case of it is drawn and checked.

    Args:
        number: as in `L1`.
        name: what must hold.
        check: `(data, device)`: draws a case and raises LawViolation if it breaks the law.
    """

    number: str
    name: str
    check: Callable[[st.DataObject, str], None]

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def _with_ladder(law: Callable[..., None], min_layers: int = 1) -> Callable[[st.DataObject, str], None]:
    def check(data: st.DataObject, device: str) -> None:
        scenario = data.draw(strategies.scenarios(min_layers=min_layers))
        law(scenario, data.draw(strategies.ladders(scenario.batches(), covered=data.draw(st.booleans()))), device)

    return check


def _on_functions(law: Callable[..., None]) -> Callable[[st.DataObject, str], None]:
    return lambda data, device: law(data.draw(strategies.pure_functions()), device)


def _pipelined(data: st.DataObject, device: str) -> None:
    scenario = data.draw(strategies.scenarios())
    num_stages = data.draw(st.integers(1, scenario.config.num_layers))
    ladder = data.draw(st.one_of(st.none(), strategies.ladders(scenario.batches())))
    laws.pipeline_is_composition(scenario, num_stages, data.draw(st.integers(1, 3)), ladder, device)


def _pipelined_functions(data: st.DataObject, device: str) -> None:
    functions = data.draw(strategies.stage_lists())
    rows = data.draw(st.integers(1, 6))
    x = torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4).cos()
    laws.pipeline_is_composition_on_functions(functions, x, data.draw(st.integers(1, 3)), device)


def _microbatched(data: st.DataObject, device: str) -> None:
    laws.microbatches_are_one(data.draw(strategies.scenarios()), data.draw(st.integers(1, 4)), device)


def _padded_functions(data: st.DataObject, device: str) -> None:
    function = data.draw(strategies.pure_functions())
    rungs = data.draw(st.sets(st.integers(1, 8), min_size=1, max_size=3))
    laws.graph_is_eager_on_padded_functions(function, rungs, device)


def _dispatched(data: st.DataObject, device: str) -> None:
    own, limits = data.draw(strategies.descriptors()), data.draw(strategies.limits())
    laws.dispatch_is_least(own, limits, data.draw(st.sampled_from(MODES)))


def _started(data: st.DataObject, device: str) -> None:
    mode = data.draw(st.sampled_from(MODES))
    laws.nothing_is_captured_after_start(data.draw(strategies.scenarios(max_layers=2)), mode, device)


LAWS = (
    Law("L1", "graph is eager, on models", _with_ladder(laws.graph_is_eager)),
    Law("L1", "graph is eager, on pure functions", _on_functions(laws.graph_is_eager_on_functions)),
    Law("L1", "graph is eager, on functions under a ladder", _padded_functions),
    Law("L2", "padding is inert", _with_ladder(laws.padding_is_inert)),
    Law("L2", "padding is inert, between stages", _with_ladder(laws.stage_padding_is_inert, min_layers=2)),
    Law("L3", "pipeline is composition, on models", _pipelined),
    Law("L3", "pipeline is composition, on pure functions", _pipelined_functions),
    Law("L5", "pieces are the whole, on models", _with_ladder(laws.pieces_are_the_whole)),
    Law("L5", "pieces are the whole, on pure functions", _on_functions(laws.pieces_are_the_whole_on_functions)),
    Law("L6", "dispatch is least", _dispatched),
    Law("L6", "nothing is captured after start", _started),
    Law("L7", "class is kept", _with_ladder(laws.class_is_kept)),
    Law("L8", "capture leaves no trace, on models", _with_ladder(laws.capture_leaves_no_trace)),
    Law("L8", "capture leaves no trace, on pure functions", _on_functions(laws.capture_leaves_no_trace_on_functions)),
    Law("L9", "ownership is kept", _with_ladder(laws.ownership_is_kept)),
    Law("L13", "micro-batches are one", _microbatched),
)


def find(number: str, part: str = "") -> Law:
    """The first law of that number whose name contains `part`."""
    return next(law for law in LAWS if law.number == number and part in law.name)
