"""`plan_splits`: predicts a decode loop for each way to spread a model over GPUs, as stages times
the ranks that share each stage."""

from typing import Any

import attrs

from weft.arguments.checks import COUNT, check_values
from weft.display.durations import duration
from weft.display.quantities import byte_size
from weft.display.tables import Table, Tabled
from weft.errors import ConfigError, ProgramError
from weft.stages.config import ModelConfig
from weft.stages.shares import share_config
from weft.transforms.pipelines.timing.prediction import Prediction, predict_decode

# The number of characters of the longest bar
_BAR = 8
# The bottleneck in one to three words, by the first word of `Prediction.bound`
_BOUNDS = {
    "memory": "memory",
    "transfers": "transfers",
    "collectives": "collectives",
    "kernels": "kernels",
    "the": "too few cohorts",
}


@attrs.frozen
class SplitPlan(Tabled):
    """The splits that were tried. It prints as a table that marks the best split, and the splits
    that do not fit into the devices' memory.

    Args:
        predictions: one for each split, ordered by the number of ranks that share a stage. At least
            one of them fits.
        left_out: the splits that the model does not allow, each with the reason.
    """

    predictions: tuple[Prediction, ...]
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction:
        """The prediction with the most tokens per second among those that fit into memory; of equal
        predictions, the one with the most stages, since its ranks communicate the least."""
        return max((one for one in self.predictions if one.fits), key=_rank)

    def _table(self) -> Table:
        """A table with one row per split."""
        header = ("--tp", "--pp", "cohorts", "step", "tokens/s", "", "each GPU", "bound by", "")
        most = max(one.chosen.tokens_per_second for one in self.predictions)
        return Table(header, tuple(self._cells(one, most) for one in self.predictions))

    def _cells(self, one: Prediction, most: float) -> tuple[str, ...]:
        chosen = one.chosen
        bar = "#" * max(1, round(_BAR * chosen.tokens_per_second / most))
        numbers = (
            str(one.load.num_shards),
            str(one.load.num_stages),
            str(chosen.cohorts),
            duration(chosen.step_time),
        )
        # The keys are the first words of the texts of `Prediction.bound`.
        bound = _BOUNDS[one.bound().split()[0].removesuffix(":")]
        if one is self.best:
            mark = "best"
        elif one.fits:
            mark = ""
        else:
            mark = "too large"
        return (
            *numbers,
            f"{chosen.tokens_per_second:,.0f}",
            bar,
            byte_size(one.fullest[1].total),
            bound,
            mark,
        )


def _rank(one: Prediction) -> tuple[float, int]:
    # Nine digits, as in `CohortPlan.best`: rounding must not decide between equal splits.
    return float(f"{one.chosen.tokens_per_second:.9g}"), one.load.num_stages


def plan_splits(config: ModelConfig, num_gpus: int, **options: Any) -> SplitPlan:
    """Predict a decode loop for each way to spread a model over GPUs: a number of pipeline stages
    times a number of ranks that share each stage.

    Args:
        config: the configuration of the whole model, from `weft.stages.load_config`.
        num_gpus: the number of GPUs; every split uses all of them.
        options: `requests`, `context`, `cohorts`, `steps` and `machine`, as for `predict_decode`.

    Raises:
        ProgramError: no split can use this number of GPUs, or none fits into their memory.

    >>> from weft.stages import DEMO, load_config
    >>> from weft.transforms.pipelines.timing.hardware import Machine
    >>> print(plan_splits(load_config(DEMO), 4, requests=8, machine=Machine(latency=2e-6)))
    --tp  --pp  cohorts     step  tokens/s            each GPU  bound by
       1     4        4  8.57 us   933,165  ########  590 MB    transfers    best
       2     2        2  34.4 us   232,758  ##        590 MB    collectives
       4     1        1  30.4 us   262,783  ##        591 MB    collectives
    """
    check_values(
        f"plan_splits(config, {num_gpus!r})",
        {"num_gpus": COUNT},
        {"num_gpus": num_gpus},
        ProgramError,
    )
    call = f"plan_splits(config, {num_gpus})"
    predictions = list[Prediction]()
    refused = dict[int, str]()
    for shards in (count for count in range(1, num_gpus + 1) if num_gpus % count == 0):
        try:
            share_config(config, shards)
        except ConfigError as error:
            refused[shards] = error.problem
            continue
        stages = num_gpus // shards
        if stages > config.num_layers:
            refused[shards] = f"{config.num_layers} layers for {stages} stages"
        else:
            predictions.append(predict_decode(config, stages, shards=shards, **options))
    left_out = tuple(
        f"--tp {n} --pp {num_gpus // n} is not possible: {why}" for n, why in refused.items()
    )
    if not predictions:
        raise ProgramError(call, "; ".join(left_out), "fewer GPUs")
    if not any(one.fits for one in predictions):
        least = min(predictions, key=lambda one: one.fullest[1].total)
        problem = (
            f"no split fits; the nearest, --tp {least.load.num_shards} --pp"
            f" {least.load.num_stages}, {least.memory()}"
        )
        raise ProgramError(
            call, problem, "more GPUs, fewer requests, less context, or GPUs with more memory"
        )
    return SplitPlan(tuple(predictions), left_out)
