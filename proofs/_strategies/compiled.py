"""The cases of law L26: functions of several kinds, each with a compiler."""

import attrs
from hypothesis import strategies as st

from weft.batches.descriptor import BatchDescriptor
from weft.proofs._laws.func import TRANSFORMS
from weft.proofs._strategies.captures.functions import Mapping, mappings
from weft.proofs._strategies.captures.tensor_programs import TensorProgram, tensor_programs
from weft.proofs._strategies.classes import ladders
from weft.proofs._strategies.compilers import EXACT, INDUCTOR, QUICK
from weft.proofs._strategies.models import Scenario, scenarios
from weft.proofs._strategies.sized_functions import SizedFunction, sized_functions


@attrs.frozen
class CompiledMapping:
    """A function, a transform of torch.func, and a compiler.

    Args:
        mapping: the function, with its inputs.
        transform: a key of `weft.proofs._laws.func.TRANSFORMS`.
        compiler: of the graph.
    """

    mapping: Mapping
    transform: str
    compiler: str


@attrs.frozen
class CompiledModel:
    """A model with its batches, a ladder, and a compiler."""

    scenario: Scenario
    ladder: tuple[BatchDescriptor, ...]
    compiler: str


CompiledCase = TensorProgram | SizedFunction | CompiledMapping | CompiledModel

# One case in so many is compiled by Inductor, which takes seconds.
_SELDOM = 50


def _with_compiler(program: TensorProgram, compiler: str) -> TensorProgram:
    return attrs.evolve(program, compiler=compiler)


def compiled_programs(device: str = "cpu") -> st.SearchStrategy[TensorProgram]:
    """A program of `tensor_programs`, and a compiler that makes no code."""
    return st.builds(_with_compiler, tensor_programs(device), st.sampled_from(QUICK))


def compiled_mappings(device: str = "cpu") -> st.SearchStrategy[CompiledMapping]:
    """A function of `mappings`, a transform of torch.func, and a compiler that makes no code."""
    return st.builds(
        CompiledMapping,
        mappings(device),
        st.sampled_from(sorted(TRANSFORMS)),
        st.sampled_from(QUICK),
    )


@st.composite
def compiled_models(draw: st.DrawFn) -> CompiledModel:
    """A small model, a ladder for its batches, and a compiler whose results have torch's bits."""
    scenario = draw(scenarios(max_layers=2, max_steps=3))
    ladder = draw(ladders(scenario.batches(), covered=draw(st.booleans())))
    return CompiledModel(scenario, tuple(ladder), draw(st.sampled_from(EXACT)))


def inductor_cases(
    device: str = "cpu",
) -> st.SearchStrategy[TensorProgram | SizedFunction]:
    """A small program, or a function under a small ladder, for Inductor."""
    programs = tensor_programs(device, max_calls=2, max_statements=4)
    sized = sized_functions((INDUCTOR,), max_operations=2, max_classes=3, max_calls=3)
    return st.one_of(sized, st.builds(_with_compiler, programs, st.just(INDUCTOR)), sized)


def compiled_cases(device: str = "cpu") -> st.SearchStrategy[CompiledCase]:
    """A case of any kind, of which one in `_SELDOM` is Inductor's."""
    cheap: st.SearchStrategy[CompiledCase] = st.one_of(
        compiled_programs(device),
        sized_functions(),
        compiled_programs(device),
        sized_functions(),
        compiled_mappings(device),
        compiled_models(),
    )
    by_inductor: st.SearchStrategy[CompiledCase] = inductor_cases(device)
    return st.integers(1, _SELDOM).flatmap(lambda n: by_inductor if n == _SELDOM else cheap)
