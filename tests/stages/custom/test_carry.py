"""`carry` and `batch.carried`: errors that name what is wrong."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.errors import ProgramError, RequestError
from weft.stages import carry, sow
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.decoder import decoder_stage
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import Speculation
from weft.transforms.engine.setup import make_state
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


def reading(name: str) -> Callable[[Any], Any]:
    """The change of a layer that reads what another one carries."""

    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            return hidden + batch.per_token(batch.carried[name]).sum(-1, keepdim=True), kv_pages

        return run

    return change


def carrying(make: Callable[[Tensor], Any], name: str = "a") -> Callable[[Any], Any]:
    """The change of a layer that carries something."""

    def change(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            hidden, pages = layer(*args)
            carry(name, make(hidden))
            return hidden, pages

        return run

    return change


def sowing(name: str) -> Callable[[Any], Any]:
    """The change of a layer that captures something."""

    def change(layer: Any) -> Any:
        def run(*args: Any) -> Any:
            hidden, pages = layer(*args)
            sow(name, hidden[:, :1])
            return hidden, pages

        return run

    return change


ONE = torch.zeros(1)
GOOD = carrying(lambda hidden: hidden[:, :1])


def run_two(model: Model, **options: Any) -> Any:
    return generate(model.with_stages(**options), ["A list is"], max_tokens=2)


WRONG: list[tuple[Callable[[Model], Any], str]] = [
    (lambda m: m.with_stages(carries={"a": 3}), "a dict of the values before the first token"),
    (lambda m: m.with_stages(prefix_caching="sometimes"), "one of full, recompute, snapshot, none"),
    (
        lambda m: m.with_stages(carries={"a": ONE}, prefix_caching="full"),
        "carries: tokens that the prefix cache skips have no carried values",
    ),
    (
        lambda m: m.with_stages(carries={"a": ONE}, prefix_caching="snapshot").with_stages(
            captures={"b": ONE}
        ),
        r"prefix_caching='snapshot'[\s\S]*captures: tokens that the prefix cache skips have no"
        r" captured values[\s\S]*'recompute' or 'none'",
    ),
    (
        lambda m: m.with_stages(prefix_caching="snapshot"),
        "no carries, so a snapshot would be empty",
    ),
    (lambda m: run_two(m, layers={0: GOOD}), "do not declare; they declare none"),
    (
        lambda m: run_two(m, layers={0: carrying(lambda hidden: hidden[:1])}, carries={"a": ONE}),
        r"a tensor \[\d+, 1\]: \[1\] for each token",
    ),
    (
        lambda m: run_two(m, layers={0: carrying(lambda hidden: 3)}, carries={"a": ONE}),
        "for each token of the batch",
    ),
    (
        lambda m: run_two(m, layers={0: GOOD, 1: GOOD}, carries={"a": ONE}),
        r"in layer 1\n  saw: layer 0 has already carried this name\n",
    ),
    (
        lambda m: run_two(m.with_stages(layers={0: GOOD}, carries={"a": ONE}), layers={0: GOOD}),
        r"in layer 0\n  saw: layer 0 has already carried this name in this step\n",
    ),
    (lambda m: run_two(m, carries={"a": ONE}), "no function that calls weft.stages.carry"),
    (
        lambda m: run_two(m, layers={0: GOOD, 1: reading("a")}, carries={"a": ONE}),
        r"batch.carried\['a'\] in layer 1\n  saw: this layer does not carry 'a'; layer 0 does\n",
    ),
    (
        lambda m: generate(
            m.with_stages(layers={0: GOOD, 2: reading("a")}, carries={"a": ONE}),
            ["A list is"],
            max_tokens=2,
            pipeline=3,
        ),
        r"batch.carried\['a'\] in layer 2\n  saw: this layer does not carry 'a'\n",
    ),
    (
        lambda m: run_two(
            m,
            layers={0: GOOD},
            carries={"a": ONE},
            logits=lambda x, rows, extras: (carry("a", x), x)[1],
        ),
        "a call from logits",
    ),
]


SPLIT: list[tuple[dict[str, Any], str]] = [
    (
        {"layers": {0: GOOD, 4: GOOD}, "carries": {"a": ONE}},
        r"carry\('a', value\) in layer 4\n  saw: layer 0 has already carried this name\n",
    ),
    (
        {"layers": {1: GOOD}, "carries": {"a": ONE, "b": ONE}},
        r"no function that calls weft.stages.carry\('b', value\)",
    ),
    (
        {"layers": {5: sowing("a")}, "captures": {"a": ONE, "b": ONE}},
        r"no function that calls weft.stages.sow\('b', value\)",
    ),
]


@pytest.mark.one_of(7, 5)
@pytest.mark.parametrize("transport", [Local, Threads])
@pytest.mark.parametrize("graph", ["none", "full"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("options", "text"), SPLIT)
def test_several_stages_refuse_what_one_refuses(
    model: Model, options: dict[str, Any], text: str, stages: int, graph: str, transport: Any
) -> None:
    custom_model = model.with_stages(**options)
    with pytest.raises(ProgramError, match=text):
        generate(
            custom_model,
            ["A list is"],
            max_tokens=2,
            pipeline=stages,
            graph=graph,
            transport=transport(),
        )


@pytest.mark.slow
def test_the_warm_up_of_a_pipeline_finds_what_nobody_captures(model: Model) -> None:
    engine = Engine(
        model.with_stages(layers={5: sowing("a")}, captures={"a": ONE, "b": ONE}), pipeline=2
    )
    with pytest.raises(ProgramError, match=r"no function that calls weft.stages.sow\('b', value\)"):
        engine.warm_up()


@pytest.mark.parametrize(("call", "text"), WRONG)
def test_a_wrong_carry_is_named(model: Model, call: Callable[[Model], Any], text: str) -> None:
    with pytest.raises(ProgramError, match=text) as caught:
        call(model)
    assert "instead" in str(caught.value)


@pytest.mark.parametrize("pipeline", [1, 3])
@pytest.mark.parametrize(("verb", "option"), [(sow, "captures"), (carry, "carries")])
def test_what_is_sown_or_carried_in_some_steps_only_is_refused(
    model: Model, verb: Callable[[str, Tensor], None], option: str, pipeline: int
) -> None:
    """The other steps would have zeros, and hand on an old value."""

    def of_prompts(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            if batch.descriptor.query_len is None:
                verb("a", hidden)
            return hidden, kv_pages

        return run

    declared: Any = {option: {"a": torch.zeros(model.config.hidden_size)}}
    custom_model = model.with_stages(layers={0: of_prompts}, **declared)
    with pytest.raises(
        ProgramError, match=rf"no function that calls weft.stages.{verb.__name__}\('a', value\)"
    ):
        generate(custom_model, ["A list is"], max_tokens=3, pipeline=pipeline, graph="none")


def test_a_draft_model_carries_nothing(model: Model) -> None:
    draft_model = model.with_stages(layers={0: GOOD}, carries={"a": ONE})
    with pytest.raises(RequestError, match="draft model whose functions carry nothing"):
        Engine(model, speculation=Speculation(num_tokens=1, model=draft_model))


def test_a_state_without_carried_rows_is_named(model: Model) -> None:
    carrying_model = model.with_stages(layers={0: GOOD}, carries={"a": ONE})
    stage = decoder_stage(
        carrying_model.config, carrying_model.layout, layers={0: GOOD}, carries={"a": ONE}
    )
    (state,) = make_state(carrying_model, [carrying_model.layout], [8])
    with pytest.raises(ProgramError, match="a state without `carried`"):
        stage(
            carrying_model.params,
            attrs.evolve(state, carried=None),
            Batch.ragged([0], [[1, 2]]),
            None,
        )
