"""L23 over the whole engine: after the parameters change, everything is computed with the new
ones."""

from collections.abc import Mapping, Sequence

import attrs
import torch

from weft.proofs._laws.engine.completions import alone, check_nothing_is_left, run
from weft.proofs._strategies.engine.engines import Call, Load, adapters_of, small_model
from weft.proofs.checks.difference import LawViolation
from weft.stages.adapters.adapter import Adapter
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.requests.host_state import sample_seeds
from weft.values.donation import clone
from weft.values.trees import tree_leaves

# The ways to change an engine's parameters.
HOW = ("update", "in place", "in place, not announced")
# What is changed.
PARTS = ("parameters", "adapters", "parameters and adapters")


@attrs.frozen
class _Begins:
    """A mask that forces a completion to begin with these tokens."""

    tokens: tuple[int, ...]

    def __call__(self, said: Sequence[int]) -> list[int] | None:
        if len(said) < len(self.tokens):
            return [self.tokens[len(said)]]
        return None


def changed_parameters_compute_all(load: Load, step: int, how: str, parts: str) -> None:
    """L23: if the parameters or adapters change while requests run, announced or not, each request
    continues as it would alone in an engine with the new ones, given its tokens so far.

    At the end no page is held.

    Args:
        load: a load without masks.
        step: the step before which the parameters change.
        how: one of `HOW`.
        parts: one of `PARTS`.
    """
    weights = int("parameters" in parts)
    version = int("adapters" in parts)
    new = small_model(weights)
    # A copy: `small_model` is cached, and these parameters may be written in place.
    model = attrs.evolve(small_model(), params=clone(small_model().params))
    engine = load.engine(model=model)
    drawn: dict[tuple[int, int], tuple[int, int]] = {}

    def before(number: int) -> None:
        if number == step:
            drawn.update(_drawn_by_now(load, engine))
            _change(engine, new, adapters_of(new.config, version), how)

    said = run("L23 changed parameters compute all that follows", load, engine, before)
    check_nothing_is_left(engine)
    for (index, sample), (tokens, reason) in said.items():
        call = load.calls[index]
        # How many tokens the old parameters drew, if the completion was not running at the change:
        # all of them if it had ended, none if it had not begun.
        if call.step >= step:
            ended = 0
        else:
            ended = call.max_tokens
        least, most = drawn.get((index, sample), (ended, ended))
        seed = sample_seeds(call.sampling.seed or 0, call.sampling.n)[sample]
        call = attrs.evolve(call, sampling=attrs.evolve(call.sampling, seed=seed, n=1))
        # Steps in flight may see both versions if the engine was not told of the change.
        counts = [(n if how == "update" else least, n) for n in range(least, most + 1)]
        if not any(_agrees(call, tokens, reason, *both, weights, version) for both in counts):
            problem = f"{tokens}, {reason}; the old parameters drew {least} to {most} of them"
            raise LawViolation(f"L23 versions: completion {sample} of call {index} is {problem}")


def _drawn_by_now(load: Load, engine: Engine) -> dict[tuple[int, int], tuple[int, int]]:
    """For each running completion, the least and the greatest number of tokens that the old
    parameters drew: the tokens that the host has read, and these plus the steps in flight."""
    drawn = {}
    for index, call in enumerate(load.calls):
        names = [str(index), *(f"{index}[{sample}]" for sample in range(1, call.sampling.n))]
        for sample, name in enumerate(names):
            if (running := engine._host.find(name)) is not None:
                count = len(running.tokens) - len(call.prompt)
                drawn[index, sample] = count, count + running.max_unread
    return drawn


def _change(engine: Engine, new: Model, adapters: Mapping[str, Adapter], how: str) -> None:
    named = {name: adapters[name] for name in engine._weights.adapters}
    if how == "update":
        engine.update(new.params, adapters=named)
        return
    present = engine.model.params, [*engine._weights.adapters.values()]
    pairs = zip(tree_leaves(present), tree_leaves((new.params, [*named.values()])), strict=True)
    for current, other in pairs:
        if isinstance(current, torch.Tensor):
            # A direct `copy_` bumps torch's version counter, by which the engine detects a change
            # that is not announced. Writes to `.data` do not, so "in place" must be announced.
            (current.data if how == "in place" else current).copy_(other)
    if how == "in place":
        engine.update()


def _agrees(
    call: Call, tokens: list[int], reason: str, old: int, begun: int, weights: int, version: int
) -> bool:
    """Whether the first `old` tokens are those of the old parameters, and the tokens after the
    first `begun` are those of the new ones."""
    if old:
        by_old, ended = alone(call.prompt, call.sampling, call.max_tokens, call.adapter)
        if tokens[:old] != by_old[: len(tokens[:old])]:
            return False
        if begun == call.max_tokens:
            return reason in (ended, "abort")
    begins = _Begins(tuple(tokens[:begun]))
    expected, ended = alone(
        call.prompt, call.sampling, call.max_tokens, call.adapter, begins, weights, version
    )
    if reason == "abort" and call.aborted is not None:
        return tokens == expected[: len(tokens)]
    return (tokens, reason) == (expected, ended)
