"""The states of a graphified call, as in JAX: `Graphified` is lowered, a `Lowered` is compiled, a `Compiled` runs."""

from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor

from weft.errors import CacheMissError, CaptureError
from weft.torchapi import signal_capture
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import Entry, audit_of, prepare
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.listing import Listing, Writer
from weft.transforms.graphs.memory import MemoryAnalysis, analysis_of
from weft.transforms.graphs.misses import Miss
from weft.transforms.graphs.options import Graphable
from weft.trees import TreeSpec, leaves_with_names, tree_structure, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen(eq=False, repr=False)
class Lowered(Generic[R]):
    """What a function does for calls of one signature, written down from one run of it.

    Args:
        name: of the function.
        decision: the mode and the class that its calls run under.
        in_tree: the structure of the arguments by name, but for the static ones.
        out_tree: the structure of the result.
        listing: its operators.
    """

    name: str
    decision: Decision[Any]
    in_tree: TreeSpec
    out_tree: TreeSpec
    listing: Listing
    _compile: Callable[["Lowered[R]"], "Compiled[R]"]

    def compile(self) -> "Compiled[R]":
        """Capture the graph for calls of this signature, or take it if it is there."""
        return self._compile(self)

    def as_text(self, form: str = "text") -> str:
        """The listing of its operators; `form="dot"` as a graph for Graphviz."""
        if form not in ("text", "dot"):
            raise CaptureError(f"{self.name}.lower(...).as_text({form!r})", "no such form", "'text' or 'dot'")
        return str(self.listing) if form == "text" else self.listing.as_dot()

    def refuse(self, miss: Miss) -> NoReturn:
        """Raise the error for a call of another signature."""
        instead = f"call {self.name} itself, which captures what it needs; or arguments like the lowered ones: of what "
        instead += "is captured by reference those very tensors, or what a call returned in their place"
        call = f"{self.name}.lower(...).compile()(...)"
        raise CacheMissError(call, f"arguments unlike the lowered ones: {miss.differs}", instead)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<Lowered {self.name}: {len(self.listing.lines)} operators, {self.decision.mode}>"


@attrs.frozen(eq=False, repr=False)
class Compiled(Generic[R]):
    """A captured graph, and the way to call it. It takes calls of the lowered signature only, with what is captured by
    reference (donated arguments, params) where the lowered call had it; where the graphified function would run inline
    (under autograd, torch.func, another capture) it does too. In the other grad mode, in which a function may compute
    something else, it has a graph of its own, captured at the first such call."""

    lowered: Lowered[R]
    _entry: Entry
    _run: Callable[[tuple[Any, ...], dict[str, Any]], R]

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self._run(args, kwargs)

    @property
    def in_tree(self) -> TreeSpec:
        """The structure of the arguments by name, but for the static ones."""
        return self.lowered.in_tree

    @property
    def out_tree(self) -> TreeSpec:
        """The structure of the result."""
        return self.lowered.out_tree

    def as_text(self, form: str = "text") -> str:
        """The listing of its operators; `form="dot"` as a graph for Graphviz."""
        return self.lowered.as_text(form)

    def memory_analysis(self) -> MemoryAnalysis:
        """What the graph takes, as measured at its capture."""
        return analysis_of([self._entry])

    def __repr__(self) -> str:
        return (
            f"<Compiled {self.lowered.name}: {self._entry.recording.num_pieces} graphs, {self.lowered.decision.mode}>"
        )


def lower(
    of: Graphable,
    call: Call,
    decision: Decision[Any],
    device: torch.device,
    compile: Callable[[Lowered[R]], Compiled[R]],
) -> Lowered[R]:
    """Run a function once on input buffers of its own, and write down what it does.

    Raises:
        CaptureError: what it does could not be captured.
    """
    prepared = prepare(of, call, decision.descriptor, InputBufferPool())
    given = zip(prepared.given, prepared.names, (*prepared.references, *prepared.buffers), strict=True)
    donated = {id(x) for x in prepared.donated}
    own = {id(x) for x in prepared.references}
    inputs = [(x, _origin(name, leaf, donated, own)) for x, name, leaf in given if isinstance(x, Tensor)]
    writer = Writer(inputs, of.split_at if decision.mode == "piecewise" else frozenset())
    audit = audit_of(of, prepared, device)
    with prepared.untouched(audit):
        with signal_capture(), writer, audit:
            outputs = prepared.run()
        result = tree_unflatten(list(outputs.leaves), outputs.structure)
        values = [_what(x, i, writer, prepared.names) for x, i in zip(outputs.leaves, outputs.references, strict=True)]
    paths = [path for path, _ in leaves_with_names(result)]
    descriptor = "" if decision.descriptor is None else f" for '{decision.descriptor}'"
    title = f"{of.name}({', '.join((*call.references, *call.copied))}), {decision.mode}{descriptor}"
    listing = Listing(title, tuple(writer.inputs), tuple(writer.lines), tuple(zip(paths, values, strict=True)))
    in_tree = tree_structure({**call.references, **call.copied})
    return Lowered(of.name, decision, in_tree, outputs.structure, listing, compile)


def _origin(name: str, tensor: Tensor, donated: set[int], own: set[int]) -> str:
    return f"{name}, {'donated' if id(tensor) in donated else 'by reference' if id(tensor) in own else 'copied in'}"


def _what(leaf: Any, reference: int | None, writer: Writer, names: tuple[str, ...]) -> str:
    if reference is not None:
        return f"{names[reference]}, in its place"
    return str(writer.value(leaf)) if isinstance(leaf, Tensor) else repr(leaf)
