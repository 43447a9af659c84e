"""Errors in the middle of a step, and user calls at a bad moment."""

import asyncio
from typing import Any
from unittest import mock

import attrs
import pytest

import weft
from weft.batches.sampling import SamplingParams
from weft.errors import EngineError
from weft.proofs._strategies.engine.engines import small_model
from weft.stages.checkpoints.known_models import DEMO
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine, is_under_way
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.outputs import RequestOutput

SMALL = EngineLimits(max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=16)


def ended(engine: Engine) -> dict[str, CompletionState]:
    return {output.id: output.track for output in engine if output.finish_reason is not None}


@pytest.mark.parametrize(
    "error", [MemoryError("no more"), KeyboardInterrupt()], ids=["memory", "interrupt"]
)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_after_a_step_that_raised_no_other_is_taken(error: BaseException, pipeline: int) -> None:
    """The progress of the failed step is unknown: continuing would lose a token, and wait for it
    forever."""
    engine = Engine(small_model(), SMALL, pipeline=pipeline, graph="none")
    engine.add([1, 2], max_tokens=5, id="a")
    engine.step()
    with mock.patch.object(engine, "_executor", _Raises(error)), pytest.raises(type(error)):
        list(engine)
    for _ in range(2):
        with pytest.raises(
            EngineError, match=f"an earlier step that raised {type(error).__name__}"
        ) as caught:
            engine.step()
    assert caught.value.instead == "another weft.Engine(...), and its requests again"
    for after in (lambda: engine.add([3], max_tokens=1), lambda: asyncio.run(_read(engine, [3]))):
        with pytest.raises(EngineError, match="an earlier step that raised"):
            after()
    assert repr(engine).endswith("requests under way: 1; ended by what a step raised>")
    assert [output.finish_reason for output in engine.abort("a")] == ["abort"]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_an_interrupt_while_an_engine_warms_up_is_that_of_a_step(pipeline: int) -> None:
    engine = Engine(small_model(), SMALL, pipeline=pipeline)
    engine.add([1, 2], max_tokens=5, id="a")
    engine.step()
    with (
        mock.patch.object(engine, "_executor", _Raises(KeyboardInterrupt())),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.warm_up()
    for call in (engine.step, engine.warm_up):
        with pytest.raises(EngineError, match="an earlier step that raised KeyboardInterrupt"):
            call()


class _Raises:
    num_running = 0

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, _: Any) -> Any:
        raise self.error

    def flush(self) -> Any:
        raise self.error


async def _read(engine: Engine, prompt: Any, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.stream(prompt, **{"max_tokens": 20, **options})]


def test_an_abort_ends_the_stream_of_its_request() -> None:
    engine = Engine(small_model(), SMALL, graph="none")

    async def both() -> list[RequestOutput]:
        task = asyncio.create_task(
            _read(engine, [1, 2], sampling=SamplingParams(temperature=1.0, n=2, seed=1), id="a")
        )
        while not is_under_way(engine, "a") or not engine.stats().running:
            await asyncio.sleep(0)
        engine.abort("a")
        return await asyncio.wait_for(task, 20)

    outputs = asyncio.run(both())
    assert [(o.index, o.finish_reason) for o in outputs if o.finish_reason] == [
        (0, "abort"),
        (1, "abort"),
    ]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_name_that_is_used_again_gets_nothing_of_what_was_under_way(pipeline: int) -> None:
    """The first request is aborted while the logprobs of its prompt are on their way."""
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    prompt = [5, 4, 3, 2, 1]
    fresh = Engine(small_model(), SMALL, graph="none")
    fresh.add(prompt, sampling, max_tokens=2, id="a")
    engine = Engine(small_model(), SMALL, pipeline=pipeline, graph="none", run_ahead=2)
    engine.add([1, 2, 3, 4, 5], sampling, max_tokens=5, id="a")
    engine.launch()
    engine.abort("a")
    engine.add(prompt, sampling, max_tokens=2, id="a")
    again = ended(engine)["a"]
    expected = ended(fresh)["a"]
    assert again.prompt_logprobs == pytest.approx(expected.prompt_logprobs)
    assert again.token_ids == expected.token_ids


def test_a_stream_with_a_stop_text_and_min_tokens_is_its_text() -> None:
    """Text shown before the request may end is not taken back when it ends."""
    model = weft.load(DEMO, "cpu", "float32")
    greedy = SamplingParams(temperature=0.0)
    [whole] = weft.generate(model, ["The function returns"], max_tokens=40, graph="none")
    assert whole.text is not None
    sampling = attrs.evolve(greedy, stop=[whole.text[2:4], "never this"], min_tokens=12)
    options: dict[str, Any] = {"max_tokens": 40, "graph": "none", "sampling": sampling}
    outputs = list(weft.generate(model, ["The function returns"], stream=True, **options))
    text = "".join(output.text or "" for output in outputs)
    assert (
        text
        == outputs[-1].track.text
        == weft.generate(model, ["The function returns"], **options)[0].text
    )
    assert whole.text.startswith(text)
    assert len(text) >= 11, "the stop text in its beginning ended nothing"
