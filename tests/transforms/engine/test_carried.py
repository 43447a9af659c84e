"""What custom functions carry from token to token: a recurrent layer gives what torch's gives
over the whole sequence at once, however its requests are served."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.sampling import SamplingParams
from weft.stages import carry, sow
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import MODES, Limits
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

LAYERS = (0, 2)
SIZE = 8
SHARED = "The function returns a"
PROMPTS = [f"{SHARED} {rest}" for rest in ("word", "list of", "", "lis")] + ["A list is"]
POLICIES = ("none", "recompute", "snapshot")
WAYS: tuple[dict[str, Any], ...] = (
    *({"graph": mode} for mode in MODES),
    {"pipeline": 2},
    {"pipeline": 3, "graph": "full_and_piecewise"},
    {"speculation": Speculation(num_tokens=3)},
    {"pipeline": 3, "speculation": Speculation(num_tokens=2)},
)
# Chunks of prompts, preempted requests, and pages that are shared.
TIGHT = EngineLimits(max_num_reqs=3, max_num_tokens=7, num_pages=14, max_model_len=56, page_size=4)


class Recurrent(torch.nn.Module):
    """A gated recurrent layer beside a decoder's: what it makes of the layer's result is added to
    that."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gru = torch.nn.GRU(hidden_size, SIZE, batch_first=True)
        self.up = torch.nn.Linear(SIZE, hidden_size)
        self.start = torch.randn(SIZE)

    def served(self, name: str) -> Callable[[Any], Any]:
        """The change of a layer, in any batch."""
        step = torch.nn.GRUCell(self.gru.input_size, SIZE, device=self.up.weight.device)
        step.load_state_dict(
            {key.removesuffix("_l0"): x for key, x in self.gru.state_dict().items()}
        )

        def change(layer: Any) -> Any:
            def run(
                params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
            ) -> Any:
                hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
                states = batch.scan_tokens(lambda h, x: step(x, h), batch.carried[name], hidden)
                carry(name, states)
                return hidden + self.up(states), kv_pages

            return run

        return change

    def whole(self, hidden: Tensor) -> Tensor:
        """The hidden states [n, hidden_size] of a whole sequence, changed."""
        states, _ = self.gru(hidden[None], self.start[None, None])
        changed: Tensor = hidden + self.up(states[0])
        return changed


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def cells(model: Model) -> dict[int, Recurrent]:
    return {index: Recurrent(model.config.hidden_size, index) for index in LAYERS}


@pytest.fixture(scope="module")
def recurrent(model: Model, cells: dict[int, Recurrent]) -> Model:
    return model.with_stages(
        layers={index: cell.served(f"state {index}") for index, cell in cells.items()},
        carries={f"state {index}": cell.start for index, cell in cells.items()},
    )


@pytest.fixture(scope="module")
def expected(model: Model, cells: dict[int, Recurrent]) -> list[list[int]]:
    """The greedy tokens of transformers with torch's GRUs after its layers, each from a pass over
    all tokens."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    for index, cell in cells.items():

        def hook(module: Any, args: Any, out: Any, cell: Recurrent = cell) -> Any:
            hidden = out[0] if isinstance(out, tuple) else out
            changed = cell.whole(hidden[0])[None]
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        reference.model.layers[index].register_forward_hook(hook)
    completions = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = model.encode(prompt)
            for _ in range(12):
                ids.append(
                    int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
                )
            completions.append(ids[-12:])
    return completions


def tokens(model: Model, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=12, **options)]


@pytest.mark.one_of(12, 3)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_recurrent_layer_is_that_of_torch(
    recurrent: Model, expected: list[list[int]], way: dict[str, Any]
) -> None:
    assert tokens(recurrent, **way) == expected


@pytest.mark.one_of(36, 12)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_in_chunks_preempted_and_under_prefix_hits(
    recurrent: Model, expected: list[list[int]], policy: str, way: dict[str, Any]
) -> None:
    engine = Engine(recurrent.with_stages(prefix_caching=policy), TIGHT, **way)
    said: dict[str, list[int]] = {}
    for again in ("a", "b"):
        for index, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_tokens=12, id=f"{index}{again}")
        for output in engine:
            said[output.id] = output.track.token_ids
    assert [
        said[f"{index}{again}"] for again in ("a", "b") for index in range(len(PROMPTS))
    ] == 2 * expected
    stats = engine.stats()
    assert stats.preempted > 0
    assert (stats.prefix_tokens > 0) == (policy != "none")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu(
    cells: dict[int, Recurrent], expected: list[list[int]], policy: str, way: dict[str, Any]
) -> None:
    there = {index: copy.deepcopy(cell).to("cuda") for index, cell in cells.items()}
    recurrent_model = load(DEMO, "cuda", "float32").with_stages(
        layers={index: cell.served(f"state {index}") for index, cell in there.items()},
        carries={f"state {index}": cell.start for index, cell in there.items()},
        prefix_caching=policy,
    )
    engine = Engine(recurrent_model, TIGHT, **way)
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_tokens=12, id=f"{index}")
    said = {int(output.id): output.track.token_ids for output in engine}
    assert [said[index] for index in range(len(PROMPTS))] == expected


@pytest.mark.nightly
def test_threads_and_a_draft_model(
    model: Model, recurrent: Model, expected: list[list[int]]
) -> None:
    assert tokens(recurrent, pipeline=2, transport=Threads()) == expected
    drafting = Speculation(num_tokens=2, model=model)
    for policy in POLICIES:
        engine = Engine(
            recurrent.with_stages(prefix_caching=policy), TIGHT, pipeline=2, speculation=drafting
        )
        for index, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_tokens=12, id=f"{index}")
        said = {int(output.id): output.track.token_ids for output in engine}
        assert [said[index] for index in range(len(PROMPTS))] == expected


def served(transport: Transport, policy: str) -> list[list[int]]:
    """Tokens of a model that carries something and whose tokens have inputs of their own, on two
    stages."""
    torch.set_num_threads(1)
    model = load(DEMO, "cpu", "float32")
    cell, place = Recurrent(model.config.hidden_size, 2), torch.zeros(model.config.hidden_size)

    def change(layer: Any) -> Any:
        recurrent_layer = cell.served("state")(layer)
        return lambda params, pages, batch, tables, hidden: recurrent_layer(
            params, pages, batch, tables, hidden + batch.token_extras["patch"]
        )

    recurrent_model = model.with_stages(
        layers={2: change},
        carries={"state": cell.start},
        token_extras={"patch": place},
        prefix_caching=policy,
    )
    engine = Engine(
        recurrent_model,
        TIGHT,
        pipeline=2,
        transport=transport,
        speculation=Speculation(num_tokens=2),
    )
    for index, prompt in enumerate(PROMPTS):
        count = len(model.encode(prompt))
        patch = (index % 2) * torch.linspace(0, 3, count)[:, None].expand(count, len(place))
        engine.add(prompt, max_tokens=8, id=f"{index}", extras={"patch": patch})
    said = {int(output.id): output.track.token_ids for output in engine}
    return [said[index] for index in range(len(PROMPTS))]


def served_by_a_rank(policy: str) -> list[list[int]]:
    return served(Distributed(timeout=60), policy)


@pytest.mark.slow
def test_other_processes() -> None:
    expected = served(Local(), "none")
    for tokens in launch(served_by_a_rank, 2, "snapshot"):
        assert tokens == expected
    assert served(Local(), "snapshot") == served(Local(), "recompute") == expected


@pytest.mark.slow
def test_completions_of_one_prompt_carry_their_own(recurrent: Model) -> None:
    """They share the prompt's pages as far as the policy lets them."""
    params = SamplingParams(temperature=1.0, seed=3, n=3)
    completions = []
    for policy in POLICIES:
        engine = Engine(
            recurrent.with_stages(prefix_caching=policy), EngineLimits(page_size=4, num_pages=200)
        )
        engine.add(PROMPTS[0], params, max_tokens=10)
        said = {output.index: output.track.token_ids for output in engine}
        completions.append([said[index] for index in range(3)])
        assert (engine.stats().prefix_tokens > 0) == (policy != "none")
    assert completions[0] == completions[1] == completions[2]
    assert len({tuple(tokens) for tokens in completions[0]}) == 3


def capturing(cell: Recurrent) -> Callable[[Any], Any]:
    def change(layer: Any) -> Any:
        recurrent_layer = cell.served("state 0")(layer)

        def run(*args: Any) -> Any:
            hidden, pages = recurrent_layer(*args)
            sow("hidden", hidden)
            return hidden, pages

        return run

    return change


def test_recomputed_tokens_are_captured_and_share_their_pages(
    model: Model, cells: dict[int, Recurrent]
) -> None:
    """A prompt that is found has all captures. Pages that others share are read, and not written."""
    hidden = torch.zeros(model.config.hidden_size)
    options: dict[str, Any] = {
        "captures": {"hidden": hidden},
        "carries": {"state 0": cells[0].start},
    }
    capturing_model = model.with_stages(
        layers={0: capturing(cells[0])}, **options, prefix_caching="recompute"
    )
    engine = Engine(capturing_model, EngineLimits(page_size=4, num_pages=100), graph="full")
    engine.add(SHARED, max_tokens=8)
    *_, first = engine
    assert engine.stats().prefix_tokens == 0
    engine.add(SHARED, max_tokens=8)
    *_, second = engine
    num_prefix_tokens = engine.stats().prefix_tokens
    assert num_prefix_tokens >= len(model.encode(SHARED)) - 4
    assert first.track.token_ids == second.track.token_ids
    captured = [output.track.captured["hidden"] for output in (first, second)]
    assert len(captured[1]) == len(model.encode(SHARED)) + 8 - 1
    torch.testing.assert_close(*captured, atol=1e-5, rtol=1e-5)

    # The same with other keys in the shared pages: they are read, and stay.
    (state,) = engine._executor.state
    state.kv_pages[:, 0] += 1.0
    marked = state.kv_pages.clone()
    engine.add(SHARED, max_tokens=8)
    *_, third = engine
    (state,) = engine._executor.state
    untouched = (state.kv_pages == marked).flatten(3).all(-1).all(1).all(0)
    assert int(untouched[:100].sum()) >= 100 - 3
    assert not torch.equal(third.track.captured["hidden"], captured[1])
    assert state.kv_pages.shape[2] == 100 + 1


def test_gradients_flow_through_what_is_carried(model: Model, cells: dict[int, Recurrent]) -> None:
    """A derivative through a prompt in two chunks is that of one pass over it."""
    ids = model.encode(SHARED)
    grads = []
    for cuts in ((len(ids),), (9, len(ids) - 9)):
        cell = Recurrent(model.config.hidden_size, 5)
        recurrent_model = model.with_stages(
            layers={0: through(cell)}, carries={"state 0": torch.zeros(SIZE)}
        )
        runner = make_runner(recurrent_model, Limits(1, len(ids)), mode="none", keep_logits=True)
        states = make_state(recurrent_model, runner.layouts, [len(ids) + 1])
        start = 0
        for count in cuts:
            chunk = ids[start : start + count]
            start += count
            batch = Batch.ragged([0], [chunk], samples=[start == len(ids)])
            states, out = runner.step(runner.params, states, batch)
        assert out.logits is not None
        out.logits.square().mean().backward()
        grads.append([cell.gru.weight_ih_l0.grad, cell.gru.bias_hh_l0.grad])
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads[0])
    for one, two in zip(*grads, strict=True):
        assert one is not None
        assert two is not None
        torch.testing.assert_close(one, two, atol=2e-5 * float(one.abs().max()), rtol=1e-4)


def through(cell: Recurrent) -> Callable[[Any], Any]:
    """`Recurrent.served` with the module's own parameters."""
    gru = cell.gru

    def step(x: Tensor, h: Tensor) -> Tensor:
        return torch.gru_cell(
            x, h, gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0
        )

    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            states = batch.scan_tokens(lambda h, x: step(x, h), batch.carried["state 0"], hidden)
            carry("state 0", states)
            return hidden + cell.up(states), kv_pages

        return run

    return change


def test_a_model_without_carries_has_no_tensors_for_them(model: Model) -> None:
    (state,) = Engine(model, EngineLimits(num_pages=10))._executor.state
    assert (state.carried, state.num_recomputed_tokens, state.kv_pages.shape[2]) == (None, None, 10)
