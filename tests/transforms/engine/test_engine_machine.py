"""The engine as a state machine: in every graph mode and split, whatever requests arrive, are
aborted or preempted, each completion is what its request gets alone; a greedy one is transformers'.
And all this did happen."""

import functools
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers import Qwen3Config, Qwen3ForCausalLM

import weft
from weft.proofs import CompletionRequest, engine_machine
from weft.proofs._strategies.engine.drafts import Drafts
from weft.proofs._strategies.engine.engines import VOCABULARY, Half
from weft.proofs.checks.engine_machine import EngineMachine
from weft.stages.adapters.adapter import Adapter
from weft.stages.model import Model
from weft.stages.random_weights import random_adapter
from weft.stages.shares import adaptable
from weft.transforms.engine.engine import num_unfinished
from weft.transforms.engine.options import Speculation
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.graphs.ladder import MODES

# The modes of the steps that each mode of graphs leads to.
REPLAYED = {
    "none": ["none"],
    "piecewise": ["piecewise"],
    "full_decode_only": ["full"],
    "full": ["full"],
    "full_and_piecewise": ["full", "piecewise"],
}
WAYS = [
    pytest.param(graph, stages, marks=[] if place % 3 + 1 == stages else pytest.mark.slow)
    for place, graph in enumerate(MODES)
    for stages in (1, 2, 3)
]


@functools.cache
def theirs() -> Any:
    """A small transformers model with large weights, so that differences show."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 24,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5)
    return model


@functools.cache
def ours() -> Model:
    """The same, loaded from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        theirs().save_pretrained(folder)
        return weft.load(folder, "cpu")


@functools.cache
def adapters() -> dict[str, Adapter]:
    config = ours().config
    names = [name for layer in range(3) for name in adaptable(config, layer)]
    return {
        f"adapter {seed}": random_adapter(config, names, rank=1 + seed, seed=seed, std=0.5)
        for seed in range(2)
    }


@functools.cache
def speculation() -> list[Speculation]:
    """By the model itself, by another one, and by prompt lookup."""
    by_itself = Speculation(3, model=ours())
    by_lookup = Speculation(3, ngram=(1, 3))
    return [by_itself, Drafts(2, "another").speculation(ours().config, 0, 0.5), by_lookup]


def by_transformers(request: CompletionRequest) -> list[int] | None:
    """The tokens of a greedy completion of the plain model; None for others."""
    if request.sampling.temperature or request.adapter is not None:
        return None
    assert request.mask is None or isinstance(request.mask, Half)
    key = request.prompt, repr(request.sampling), request.mask
    if key not in GENERATED:
        GENERATED[key] = generated(request, request.mask)
    return GENERATED[key]


# What transformers generated, for all tests of this file.
GENERATED: dict[Any, list[int]] = {}


def generated(request: CompletionRequest, mask: Half | None) -> list[int]:
    params = request.sampling

    def rule(_: int, ids: torch.Tensor) -> list[int]:
        allowed = None if mask is None else mask.allowed(ids[len(request.prompt) :].tolist())
        return [*range(VOCABULARY)] if allowed is None else allowed

    options: dict[str, Any] = {
        "repetition_penalty": params.repetition_penalty,
        "min_new_tokens": params.min_tokens,
    }
    if params.logit_bias:
        options["sequence_bias"] = [[[token], bias] for token, bias in params.logit_bias.items()]
    options["suppress_tokens"] = list(params.bad_token_ids) or None
    options["eos_token_id"] = list(params.stop_token_ids) or None
    options["prefix_allowed_tokens_fn"] = rule
    ids = torch.tensor([request.prompt])
    output_ids = theirs().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.max_tokens,
        pad_token_id=0,
        **options,
    )
    return [int(token) for token in output_ids[0, ids.shape[1] :]]


class Counting(EngineMachine):
    """Counts the traces in which each thing happened, and knows of rows, too, which have no public
    name."""

    reached: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.masked_rows: set[int] = set()

    def _look(self, outputs: Sequence[RequestOutput]) -> None:
        super()._look(outputs)
        decoding = [one for one in self.engine._host.running.values() if one.on_device]
        unmasked = {one.row for one in decoding if not one.request.is_masked}
        if self.masked_rows & unmasked:
            self.events.add("no mask in a row that had one")
        self.masked_rows |= {one.row for one in decoding} - unmasked

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            self.reached.update(["traces", *self.events])
            self.reached.update(" and ".join(pair) for pair in PAIRS if self.events >= set(pair))


def counting_machine(graph: str, stages: int) -> tuple[type[EngineMachine], Counter[str]]:
    """A machine, and the number of its traces in which each thing happened."""
    reached: Counter[str] = Counter()
    machine = engine_machine(
        ours(),
        by_transformers,
        adapters=adapters(),
        speculation=speculation(),
        graph=graph,
        pipeline=stages,
    )
    return type("CountingMachine", (Counting, machine), {"reached": reached}), reached


@pytest.mark.one_of(5, 2)
@pytest.mark.parametrize(("graph", "stages"), WAYS)
def test_each_completion_is_what_it_is_alone(graph: str, stages: int, runs_nightly: bool) -> None:
    examples = 2
    if runs_nightly:
        examples = 20 if graph == "none" else 5
    machine, reached = counting_machine(graph, stages)
    case = machine.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=8)
    case("runTest").runTest()
    assert reached["traces"] >= examples
    for mode in REPLAYED[graph]:
        assert reached[f"steps in mode {mode}"] >= examples // 2


PAIRS = [("drafts right", "preempted"), ("masks", "preempted"), ("masks", "drafts right")]
MUST_HAPPEN = {
    "several decode",
    "adapters mixed",
    "aborted with a step under way",
    "preempted",
    "prefixes shared",
    "drafts right",
    "drafts wrong",
    "mixed steps",
    "a mask beside none",
    "several masks",
    "no mask in a row that had one",
    *(" and ".join(pair) for pair in PAIRS),
}


@pytest.mark.slow
def test_all_of_it_does_happen() -> None:
    """A state machine whose requests do not meet proves nothing."""
    machine, reached = counting_machine("none", 1)
    for seed in range(SEEDS):
        play(machine(), random.Random(seed))
    assert MUST_HAPPEN - reached.keys() == set()


# Traces in which each thing happens at least once.
SEEDS = 12


def play(machine: EngineMachine, draw: random.Random) -> None:
    """A trace without Hypothesis, the same in each run."""
    machine.start(seed=draw.getrandbits(32))
    for _ in range(3):
        machine.step(count=draw.randint(1, 3))
        machine.add(seed=draw.getrandbits(32))
        machine.step(count=draw.randint(1, 3))
        if draw.random() < 0.7 and num_unfinished(machine.engine) > 1:
            machine.abort(seed=draw.getrandbits(32))
    machine.teardown()
