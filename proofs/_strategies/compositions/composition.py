"""`compositions()`: a nest of transforms around a random function, and the occasions of its
calls."""

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.proofs._strategies.compositions.bodies import (
    COLUMNS,
    OPERATIONS,
    Body,
    Function,
    Kind,
    bodies,
)
from weft.proofs._strategies.compositions.layers import LAYERS, Layer
from weft.proofs._strategies.compositions.occasions import OCCASIONS, Subject

# The rows of an argument. Three layers may each halve them, and an innermost `all_to_all` halves
# once more.
ROWS = 16
MAX_DEPTH = 3

# How many times as often these kinds of layers are drawn as others, because they keep state between
# calls.
_WEIGHTS: dict[Kind | None, int] = {"graph": 5, "shard": 2, "loop": 2}
_QUICK = tuple(
    name
    for name, layer in LAYERS.items()
    if not layer.slow
    for _ in range(_WEIGHTS.get(layer.kind, 1))
)
_SLOW = tuple(name for name, layer in LAYERS.items() if layer.slow)
# One layer in so many is a slow one, which runs in threads or is compiled.
_SELDOM = 40
# How many times as often a plain call is drawn as another occasion: only a second call replays.
_PLAIN_CALLS = 6
_OCCASIONS = (*(["a call"] * (_PLAIN_CALLS - 1)), *OCCASIONS)


@attrs.frozen
class Composition:
    """A body, the layers around it, and its calls.

    Args:
        body: the function inside.
        layers: keys of `LAYERS`, outermost first.
        occasions: keys of `OCCASIONS`, in the order of the calls.
        seed: the seed of the arguments.
    """

    body: Body
    layers: tuple[str, ...]
    occasions: tuple[str, ...]
    seed: int = 0

    def __str__(self) -> str:
        nest = "".join(f"{name}(" for name in self.layers) + "f" + ")" * len(self.layers)
        return f"{nest} of {self.body}; {', then '.join(self.occasions)} (seed {self.seed})"

    @property
    def table(self) -> tuple[Layer, ...]:
        """The layers, outermost first."""
        return tuple(LAYERS[name] for name in self.layers)

    @property
    def keeps_draws(self) -> bool:
        """Whether the same random numbers are drawn as in the plain function."""
        return all(layer.keeps_draws for layer in self.table)

    @property
    def tolerance(self) -> float:
        """The tolerance of the results: the largest of any layer."""
        return max((layer.tolerance for layer in self.table), default=0.0)

    def may_be_refused(self, occasion: str) -> bool:
        """Whether weft may refuse a call, because an operation or a layer is inside a layer that
        does not promise to support it."""
        around = OCCASIONS[occasion].kind
        if around is None:
            kinds: set[Kind] = set()
        else:
            kinds = {around}
        for layer in self.table:
            if any(needed <= kinds for needed in layer.refused_in):
                return True
            if layer.kind == "graph" and "compile" in kinds:
                return True  # torch.compile may run a capture while it compiles
            if layer.kind is not None:
                kinds.add(layer.kind)
        if (
            "piecewise" in self.layers
            and "loop" in kinds
            and "a custom operator" in self.body.operations
        ):
            return True  # `piecewise` splits at this operator, but not inside a loop
        return any(OPERATIONS[name].refused_in & kinds for name in self.body.operations)

    def is_defined(self, occasion: str) -> bool:
        """Whether the meaning of a call is defined.

        It is not defined in three cases:

        - A function keeps a tensor inside a transform of torch.func, which the tensor outlives, or
          in a loop that may have no step, whose body is recorded all the same.
        - Several threads at once call something with one state for all of them: forward-mode
          derivatives, or borrowed results.
        - Torch itself fails: a view in inference mode, or compiled code, of a tensor that
          torch.func differentiates.
        """
        is_transformed = any(layer.kind == "func" for layer in self.table)
        is_followed = is_transformed or OCCASIONS[occasion].kind == "func"
        if is_followed and not {"inference_mode", "torch.compile"}.isdisjoint(self.layers):
            return False
        keeps = "remembers its first argument" in self.body.operations
        if keeps and (is_transformed or "while_loop, as long as data say" in self.layers):
            return False
        is_shared = "jvp" in self.layers or any(layer.lends for layer in self.table)
        return not (is_shared and occasion == "calls in threads at once")

    def argument(self, call: int, device: str) -> Tensor:
        """The argument of a call: [ROWS, COLUMNS], new values each time."""
        generator = torch.Generator().manual_seed(1000 * self.seed + call)
        return torch.randn(ROWS, COLUMNS, generator=generator).to(device)

    def weft(self, function: Function) -> Function:
        """Apply the layers as a user writes them."""
        for layer in reversed(self.table):
            function = layer.apply(function)
        return function

    def meaning(self, function: Function) -> Function:
        """Apply the layers' definitions in plain torch."""
        for layer in reversed(self.table):
            function = layer.meaning(function)
        return function

    def torch_alone(self, function: Function) -> Function:
        """Apply torch's own transforms where a layer has one, and definitions elsewhere."""
        for layer in reversed(self.table):
            function = (layer.torch_alone or layer.meaning)(function)
        return function

    def subject(self, device: str) -> Subject:
        """The composition as a user writes it."""
        return Subject.make(self.body, self.weft, device, is_meaning=False)

    def subject_of_meaning(self, device: str) -> Subject:
        """The composition by its definition in plain torch."""
        return Subject.make(self.body, self.meaning, device, is_meaning=True)

    def subject_of_torch(self, device: str) -> Subject:
        """The composition by torch's own transforms."""
        return Subject.make(self.body, self.torch_alone, device, is_meaning=True)


@st.composite
def compositions(
    draw: st.DrawFn, body: st.SearchStrategy[Body] | None = None, max_depth: int = MAX_DEPTH
) -> Composition:
    """One to `max_depth` transforms around a random function, called one to three times.

    Args:
        body: draws the function. None: `bodies()`.
        max_depth: at most 3.

    >>> from hypothesis import find
    >>> print(find(compositions(), lambda nest: "vmap" in nest.layers and "a call" in nest.occasions))
    vmap(f) of f: x * weight; a call (seed 0)
    """
    depth = draw(st.integers(1, max_depth))
    layers = []
    for _ in range(depth):
        if draw(st.integers(1, _SELDOM)) == _SELDOM:
            names = _SLOW
        else:
            names = _QUICK
        layers.append(draw(st.sampled_from(names)))
    occasions = draw(st.lists(st.sampled_from(_OCCASIONS), min_size=1, max_size=3))
    drawn = draw(bodies() if body is None else body)
    return Composition(drawn, tuple(layers), tuple(occasions), draw(st.integers(0, 99)))
