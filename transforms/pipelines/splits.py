"""`plan_splits`: the ways to spread a model over GPUs, stages by ranks that share each, and what each predicts."""

from typing import Any

import attrs

from weft.arguments.checks import COUNT, check_values
from weft.display.durations import duration
from weft.display.tables import Table, Tabled
from weft.errors import ConfigError, ProgramError
from weft.stages.config import ModelConfig
from weft.stages.shares import share_config
from weft.transforms.pipelines.prediction import Prediction, predict_decode

_BAR = 12
"""Characters of the longest bar."""
_BOUNDS = {
    "memory": "memory",
    "transfers": "transfers",
    "collectives": "collectives",
    "kernels": "kernels",
    "the": "too few cohorts",
}
"""The bottleneck in a word or two, by the first word of the answer."""


@attrs.frozen
class SplitPlan(Tabled):
    """The splits that were tried. It prints as a table, with the best one marked.

    Args:
        predictions: one for each split, by the number of ranks that share a stage.
    """

    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """The prediction with the most tokens per second; of equal ones, that with the most stages, whose ranks tell
        each other the least."""
        return max(self.predictions, key=_rank)

    def table(self) -> Table:
        """A table with one row per split."""
        header = ("--tp", "--pp", "cohorts", "step", "tokens/s", "", "bound by", "")
        most = self.best.chosen.tokens_per_second
        return Table(header, tuple(self._cells(one, most) for one in self.predictions))

    def _cells(self, one: Prediction, most: float) -> tuple[str, ...]:
        chosen = one.chosen
        bar = "#" * max(1, round(_BAR * chosen.tokens_per_second / most))
        numbers = str(one.load.num_shards), str(one.load.num_stages), str(chosen.cohorts), duration(chosen.step_time)
        bound = _BOUNDS[one.bound().split()[0].removesuffix(":")]
        return *numbers, f"{chosen.tokens_per_second:,.0f}", bar, bound, "best" if one is self.best else ""


def _rank(one: Prediction) -> tuple[float, int]:
    return float(f"{one.chosen.tokens_per_second:.9g}"), one.load.num_stages


def plan_splits(config: ModelConfig, num_gpus: int, **asked: Any) -> SplitPlan:
    """Predict a decode loop for each way to spread a model over GPUs: pipeline stages, times the ranks that share each.

    Args:
        config: the whole model's, from `weft.stages.load_config`.
        num_gpus: all of which every split uses.
        asked: `requests`, `context`, `cohorts`, `steps` and `machine`, as `predict_decode` takes them.

    Raises:
        ProgramError: no split uses so many GPUs.

    >>> from weft.stages import DEMO, load_config
    >>> from weft.transforms import Machine
    >>> print(plan_splits(load_config(DEMO), 4, requests=8, machine=Machine(latency=2e-6)))
    --tp  --pp  cohorts     step  tokens/s                bound by
       1     4        4  8.57 us   933,165  ############  transfers    best
       2     2        2  34.4 us   232,758  ###           collectives
       4     1        1  30.4 us   262,783  ###           collectives
    """
    check_values(f"plan_splits(config, {num_gpus!r})", {"num_gpus": COUNT}, {"num_gpus": num_gpus}, ProgramError)
    found, refused = list[Prediction](), ""
    for shards in (count for count in range(1, num_gpus + 1) if num_gpus % count == 0):
        try:
            share_config(config, shards)
        except ConfigError as error:
            refused = error.seen
            continue
        if num_gpus // shards <= config.num_layers:
            found.append(predict_decode(config, num_gpus // shards, shards=shards, **asked))
    if not found:
        seen = f"{config.num_layers} layers; {refused or 'no other number of ranks'}"
        raise ProgramError(f"plan_splits(config, {num_gpus})", seen, "fewer GPUs")
    return SplitPlan(tuple(found))
