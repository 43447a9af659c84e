"""L1, L2, L5 and L7 of a decoder with each attention back end, in bfloat16 with heads that all of
them have."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import pad, unpad
from weft.batches.state import State
from weft.ops.attention.backends import BACKENDS
from weft.proofs._laws.compare import larger, whole
from weft.proofs._laws.padding import _garbage_scratch, _garbage_tail
from weft.proofs.checks.difference import assert_equal, visible
from weft.proofs.strategies import Scenario, scenarios
from weft.stages.custom.functions import StageFunctions
from weft.stages.decoder import decoder_stage
from weft.stages.layout import split_layers
from weft.stages.params import slice_params
from weft.stages.random_weights import random_params
from weft.transforms.engine.steps.classes import model_ladder
from weft.transforms.engine.steps.step import graph_step
from weft.transforms.graphs.ladder import Limits
from weft.values.trees import tree_map

LACKS = BACKENDS["flashinfer"].missing(torch.device("cuda"))
NEEDS_FLASHINFER = pytest.mark.skipif(bool(LACKS), reason=f"FlashInfer needs {LACKS}")
ON_A_GPU = {"triton": [], "torch": [], "flashinfer": [NEEDS_FLASHINFER]}
CASES = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    *(
        pytest.param(name, "cuda", id=f"{name}-cuda", marks=[pytest.mark.gpu, *marks])
        for name, marks in ON_A_GPU.items()
    ),
]


@attrs.frozen(eq=False, repr=False)
class OfBackend(Scenario):
    """A scenario in bfloat16 whose stages have an attention back end."""

    backend: str = "torch"

    def stages(self, num_stages: int, device: torch.device | str = "cpu") -> list[Any]:
        backend = BACKENDS[self.backend]
        layouts = split_layers(self.config.num_layers, num_stages)
        return [
            decoder_stage(self.config, x, keep_logits=True, attend=backend, device=device)
            for x in layouts
        ]

    def params(self, num_stages: int, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        (every,) = split_layers(self.config.num_layers, 1)
        params = random_params(
            self.config, every, seed=self.seed, device="cpu", dtype=torch.bfloat16, std=0.1
        )
        params = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, params)
        layouts = split_layers(self.config.num_layers, num_stages)
        return tuple(slice_params(params, layout) for layout in layouts)

    def state(
        self, num_stages: int, device: torch.device | str = "cpu", poison: float = 0.0
    ) -> tuple[State, ...]:
        return tuple(
            attrs.evolve(stage_state, kv_pages=stage_state.kv_pages.bfloat16())
            for stage_state in super().state(num_stages, device, poison)
        )


@st.composite
def of_backend(draw: st.DrawFn, name: str) -> OfBackend:
    """A scenario whose heads are 128 wide, in groups of 2 or 4, on pages of 16."""
    base = draw(scenarios(max_layers=2, max_steps=4))
    kv_heads = draw(st.sampled_from((1, 2)))
    sizes = {
        "num_heads": kv_heads * draw(st.sampled_from((2, 4))),
        "num_kv_heads": kv_heads,
        "head_dim": 128,
    }
    config = attrs.evolve(base.config, **sizes, windows=())
    fields = {field.name: getattr(base, field.name) for field in attrs.fields(Scenario)}
    return OfBackend(**{**fields, "config": config, "page_size": 16, "adapters": ()}, backend=name)


def ladder_of(scenario: OfBackend, mode: str) -> Any:
    """The classes that an engine with this back end captures for the scenario's batches."""
    most = max(batch.descriptor.num_tokens for batch in scenario.batches())
    functions = StageFunctions(attend=BACKENDS[scenario.backend])
    return model_ladder(
        mode, Limits(len(scenario.prompts), max(most, len(scenario.prompts))), functions
    )


def check_modes(scenario: OfBackend, device: str) -> None:
    """L1, L5, L7: whole graphs and pieces give bitwise what the step gives at the padded class that
    was chosen."""
    params = scenario.params(1, device)
    eager = whole(scenario, device)
    for mode in ("full_and_piecewise", "piecewise"):
        graph = graph_step(whole(scenario, device), ladder_of(scenario, mode), None)
        state = scenario.state(1, device)
        other = scenario.state(1, device)
        for batch in scenario.batches(device):
            decision = graph.explain(params, other, batch).decision
            assert decision.mode != "none", f"{batch.descriptor} of {ladder_of(scenario, mode)}"
            assert decision.descriptor.query_len in (None, batch.descriptor.query_len), "L7"
            state, out = eager(params, state, pad(batch, decision.descriptor))
            other, graph_out = graph(params, other, batch)
            assert_equal(f"L1, L5 {mode}: output", graph_out, unpad(out, batch.descriptor))
            assert_equal(f"L1, L5 {mode}: state", other, state)


def check_padding(scenario: OfBackend, device: str) -> None:
    """L2: what is in the padding, and in memory that nothing was written to, reaches no logit."""
    params = scenario.params(1, device)
    step = whole(scenario, device)
    clean = scenario.state(1, device)
    poisoned = scenario.state(1, device, poison=float("nan"))
    for batch in scenario.batches(device):
        wider: list[BatchDescriptor] = larger(
            batch.descriptor, list(ladder_of(scenario, "full_and_piecewise"))
        )
        clean_batch = pad(batch, wider[0])
        padded = _garbage_tail(pad(batch, wider[0]), batch)
        clean, out = step(params, clean, clean_batch)
        poisoned, poisoned_out = step(params, _garbage_scratch(poisoned), padded)
        assert_equal(
            "L2: output", unpad(poisoned_out, batch.descriptor), unpad(out, batch.descriptor)
        )
        unwritten = tree_map(
            lambda x: x.nan_to_num(0.0, torch.inf) if x.is_floating_point() else x,
            visible(poisoned),
        )
        assert_equal("L2: state", unwritten, visible(clean))


@pytest.mark.parametrize(("name", "device"), CASES)
@pytest.mark.parametrize("law", [check_modes, check_padding], ids=["L1-L5-L7", "L2"])
def test_laws_of_a_back_end(law: Any, name: str, device: str, runs_nightly: bool) -> None:
    @settings(max_examples=20 if device == "cuda" or runs_nightly else 4)
    @given(of_backend(name))
    def check(scenario: OfBackend) -> None:
        law(scenario, device)

    check()
