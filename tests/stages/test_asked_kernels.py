"""While kernels are only asked for, two of the layers that are alike ask for those of all."""

import json
import subprocess
import sys
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from weft.batches.batch import Batch
from weft.ops.constants import ASKED, constant
from weft.stages import decoder
from weft.stages.config import parse_config
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS, random_model
from weft.torchapi.watching import OperatorWatch
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.transforms.graphs.lower import compile_ahead
from weft.values.donation import clone
from weft.values.trees import tree_leaves

_ASKED = """
import json, sys
from torch import library
implement = library.impl

def on_the_cpu_too(name, kind, function=None, **more):
    if name.startswith("weft::") and kind in ("CPU", "CUDA"):
        if kind == "CUDA":
            implement(name, "CPU", function)
        return None
    return implement(name, kind, function, **more)

library.impl = on_the_cpu_too
import weft
from weft.batches.batch import Batch
from weft.ops import kernel_triton
from weft.ops.constants import ASKED, constant
from weft.batches.sampling import SamplingParams
from weft.stages import layers
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS, random_model
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.transforms.graphs.lower import _Zeros
from weft.values.trees import tree_leaves

def ask(kernel, asked, grid, *args, **options):
    kernel._check_constants(args)
    asked[(kernel.jit.fn.__name__, *map(str, kernel_triton._kinds(args, options)))] = True

kernel_triton.Kernel._compile = ask
raw = {**PRESETS[sys.argv[1]], "num_hidden_layers": 4, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
raw |= {"num_experts": 8, "moe_intermediate_size": 128} if "num_experts" in raw else {}
model = random_model(parse_config(raw, source="a preset"), seed=0, device="cpu")
sampling = SamplingParams(temperature=1.0, seed=0)
runner, asked, two = make_runner(model, Limits(32, 256), mode="none"), [], layers._layers_to_run
for chosen in (lambda *given: given[-1], two, lambda *given: given[-1][:1]):
    layers._layers_to_run = chosen
    asked.append({})
    token = ASKED.set(asked[-1])
    for batch in (*(Batch.decode(range(n)) for n in (1, 3, 16, 32)), Batch.ragged([0, 1], [[1] * 40, [2]])):
        state = make_state(model, runner.layouts, [64] * 32, [sampling] * 32)
        with _Zeros(), constant(tree_leaves(runner.params)):
            runner.step(runner.params, state, batch)
    ASKED.reset(token)
print(json.dumps([sorted(map(str, own)) for own in asked]))
"""


@pytest.mark.slow
@pytest.mark.one_of(1, 4)
@pytest.mark.parametrize(
    "preset", ["qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b-fp8", "qwen3-32b-fp8"]
)
def test_two_layers_ask_for_the_kernels_of_all(preset: str) -> None:
    """A GPU's operators take tensors on the CPU, in a process of their own, and nothing is
    launched."""
    pytest.importorskip("triton")
    told = subprocess.run([sys.executable, "-c", _ASKED, preset], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    whole, two, one = json.loads(told.stdout)
    assert whole == two
    assert len(one) < len(whole), "the norm of a first layer adds nothing"
    assert any("attend_kernel" in kind for kind in whole)


class Attentions(OperatorWatch):
    """Counts the layers that run."""

    count = 0

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += func._schema.name == "weft::paged_attention"
        return self.pass_on(func, args, kwargs)


def layers_that_run(model: Model, asking: bool, written: Tensor | None = None) -> int:
    runner = make_runner(model, Limits(2, 8), mode="none")
    state = make_state(model, runner.layouts, [8, 8])
    batch = Batch.ragged([1, 0], [[1, 2, 3], [4]])
    token = ASKED.set({} if asking else None)
    try:
        with (
            Attentions() as attentions,
            constant([x for x in tree_leaves(runner.params) if x is not written]),
        ):
            runner.step(runner.params, state, batch)
    finally:
        ASKED.reset(token)
    return attentions.count


def changed_last(model: Model, **fields: Any) -> Model:
    layers = *model.params.layers[:-1], attrs.evolve(model.params.layers[-1], **fields)
    return attrs.evolve(model, params=attrs.evolve(model.params, layers=layers))


@pytest.fixture
def five() -> Model:
    """A model of five layers that are alike."""
    return random_model(
        parse_config({**PRESETS["tiny"], "num_hidden_layers": 5}, source="tiny"),
        seed=0,
        device="cpu",
    )


class Empty(dict[str, int]):
    """A function that is false, as a module without children is."""

    def __call__(self, config: Any, layer: Any, batch: Any, x: Any) -> Tensor:
        return decoder.feed_forward(config, layer, batch, x)


def test_of_layers_that_are_alike_two_ask_for_kernels(five: Model) -> None:
    assert layers_that_run(five, asking=False) == 5
    assert layers_that_run(five, asking=True) == 2
    assert layers_that_run(five.with_stages(feed_forward=Empty()), asking=True) == 5, (
        "it may differ by layer"
    )
    last = five.params.layers[-1].o_proj
    transposed = torch.zeros(last.shape[::-1]).T.copy_(last)
    shifted = torch.zeros(last.numel() + 1)[1:].view_as(last)
    for weight in (transposed, shifted):
        assert layers_that_run(changed_last(five, o_proj=weight), asking=True) == 5, (
            "it is laid out in another way"
        )
    copied = last.clone()
    assert layers_that_run(changed_last(five, o_proj=copied), asking=True) == 2
    assert layers_that_run(changed_last(five, o_proj=copied), asking=True, written=copied) == 5, (
        "it may not be read early"
    )
    sliding = attrs.evolve(five, config=attrs.evolve(five.config, windows=(0, 0, 0, 4, 0)))
    assert layers_that_run(sliding, asking=True) == 5, "the attention of one has a window"


@pytest.mark.parametrize("transform", ["grad", "autograd"])
def test_layers_that_are_not_asked_keep_their_pages(five: Model, transform: str) -> None:
    """A stage that takes a gradient gets new pages, and looks at those of the last layer."""

    def differentiated(stage: Any) -> Any:
        def step(params: Any, state: Any, batch: Any, x: Any) -> Any:
            def run(weight: Tensor) -> Any:
                first = attrs.evolve(params.layers[0], input_layernorm=weight)
                new, out = stage(
                    attrs.evolve(params, layers=(first, *params.layers[1:])), clone(state), batch, x
                )
                return out.logprobs.float().sum(), new.kv_pages

            weight = params.layers[0].input_layernorm
            if transform == "grad":
                _, pages = torch.func.grad(run, has_aux=True)(weight)
            else:
                with torch.enable_grad():
                    loss, pages = run(weight := weight.detach().requires_grad_())
                torch.autograd.grad(loss, weight)
            assert pages.shape == state.kv_pages.shape
            state.kv_pages.copy_(pages)
            return stage(params, state, batch, x)

        return step

    model = five.with_stages(differentiated)
    runner = make_runner(model, Limits(2, 8), mode="full")
    state, (graph,) = make_state(model, runner.layouts, [8, 8]), runner.graphs
    call = graph._example((runner.params, state, Batch.decode([0])), {})
    token = ASKED.set({})
    try:
        compile_ahead(graph._graphable, call, graph._cache)
    finally:
        ASKED.reset(token)
