"""The whole engine: each completion is what it is alone, nothing is left at the end, an error ends
one request."""

import asyncio
import gc
from typing import Any

import attrs
import pytest
import torch

import weft
from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.errors import EngineError, LogitsError, ProgramError, RequestError
from weft.proofs._laws.engine.completions import alone
from weft.proofs._strategies.engine.engines import small_adapters, small_model
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine, is_under_way, num_unfinished
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.graphs.ladder import MODES
from weft.transforms.pipelines.transports.threads import Threads
from weft.values.trees import tree_leaves

SMALL = EngineLimits(max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=16)


def ended(engine: Engine) -> dict[str, CompletionState]:
    return {output.id: output.track for output in engine if output.finish_reason is not None}


@pytest.mark.slow
def test_a_hundred_times_the_pages_are_served_in_their_turn() -> None:
    engine = Engine(small_model(), attrs.evolve(SMALL, num_pages=4), graph="none")
    prompts = {str(i): (1 + i % 7, i % 5, i % 3) for i in range(400)}
    for name, prompt in prompts.items():
        engine.add(prompt, max_tokens=1 + int(name) % 3, id=name)
    assert engine.stats().waiting == 400
    tracks = ended(engine)
    assert tracks.keys() == prompts.keys()
    for name in ("0", "1", "2", "399"):
        assert (
            tracks[name].token_ids
            == alone(prompts[name], tracks[name].request.sampling, 1 + int(name) % 3)[0]
        )
    assert (engine.stats().pages_held, engine.stats().ended) == (0, {"length": 400})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"prompt": []}, "the prompt has 0 tokens; the model's limit is 24"),
    "longer than the model": (
        {"prompt": [1] * 24},
        "the prompt has 24 tokens; the model's limit is 24",
    ),
    "longer than the pages": (
        {"prompt": [1] * 15, "max_tokens": 8},
        "a prompt of 15 tokens, and 8 to generate",
    ),
    "a token that is none": ({"prompt": [99]}, "the prompt holds 99"),
    "nothing to generate": ({"max_tokens": 0}, "max_tokens=0"),
    "an id under way": ({"id": "good"}, "a request of that id that has not ended"),
    "an id of its completions": ({"id": "good[1]"}, "a request of that id that has not ended"),
    "too many logprobs": ({"sampling": SamplingParams(logprobs=3)}, "logprobs=3"),
    "a stop text": ({"sampling": SamplingParams(stop="a")}, "the checkpoint has no tokenizer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_served_is_refused_and_the_others_go_on(case: str) -> None:
    changes, problem = WRONG[case]
    engine = Engine(small_model(), attrs.evolve(SMALL, num_pages=5), graph="none", num_logprobs=1)
    params = SamplingParams(temperature=1.0, seed=4, n=2)
    engine.add([1, 2, 3], params, max_tokens=4, id="good")
    engine.step()
    request: dict[str, Any] = {"prompt": [1], "max_tokens": 2, **changes}
    with pytest.raises(RequestError) as error:
        engine.add(**request)
    assert problem in str(error.value)
    with pytest.raises(RequestError, match="no request of that id"):
        engine.abort("unknown")
    outputs = [output for output in engine if output.finish_reason is not None]
    assert [(o.id, o.index, len(o.track.token_ids)) for o in outputs] == [
        ("good", 0, 4),
        ("good", 1, 4),
    ]
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize(("pipeline", "run_ahead"), [(1, 0), (1, 2), (3, 1)])
def test_logits_that_are_nan_are_an_error_of_their_request_alone(
    pipeline: int, run_ahead: int
) -> None:
    """A token's embedding is NaN; no other request finds the pages computed with it."""
    model = small_model()
    assert model.params.embed_tokens is not None
    embed = model.params.embed_tokens.clone()
    embed[11] = float("nan")
    broken = attrs.evolve(model, params=attrs.evolve(model.params, embed_tokens=embed))
    engine = Engine(broken, SMALL, pipeline=pipeline, graph="none", run_ahead=run_ahead)
    bars = SamplingParams(temperature=0.0, bad_token_ids=[11])
    prompts = {"good": [1, 2, 3, 4, 5], "bad": [1, 2, 11, 4, 5], "other": [4, 5]}
    for name, prompt in prompts.items():
        engine.add(prompt, bars, max_tokens=5, id=name)
    outputs = {output.id: output for output in engine if output.finish_reason is not None}
    assert outputs["bad"].finish_reason == "error"
    assert isinstance(outputs["bad"].error, LogitsError)
    assert outputs["bad"].error.problem == "logits that are NaN after 5 tokens"
    for name in ("good", "other"):
        assert outputs[name].error is None
        assert (
            outputs[name].track.token_ids
            == alone(tuple(prompts[name]), bars_of(outputs[name]), 5)[0]
        )
    assert engine.stats().pages_held == 0
    engine.add([1, 2, 11, 4, 5], bars, max_tokens=5, id="again")
    list(engine)
    assert engine.stats().prefix_tokens == 0, "what was broken is not found"


def bars_of(output: RequestOutput) -> SamplingParams:
    return output.track.request.sampling


def test_an_abort_ends_all_completions_and_frees_their_pages() -> None:
    engine = Engine(small_model(), SMALL, graph="none", run_ahead=2)
    engine.add([1, 2, 3, 4, 5], SamplingParams(temperature=1.0, n=3, seed=0), max_tokens=9, id="a")
    engine.add([1, 2, 3], max_tokens=6, id="b")
    for _ in range(3):
        engine.step()
    outputs = engine.abort("a")
    assert [(o.id, o.index, o.finish_reason) for o in outputs] == [
        ("a", index, "abort") for index in range(3)
    ]
    assert [output.id for output in engine if output.finish_reason] == ["b"]
    assert (engine.is_idle, engine.stats().pages_held) == (True, 0)


@pytest.mark.nightly
def test_two_thousand_requests_leave_nothing_behind() -> None:
    """There are as many pages, tensors and graphs at the end as after the first hundred requests."""
    engine = Engine(small_model(), SMALL, graph="full", run_ahead=1, num_logprobs=1)
    sizes = {}
    for index in range(2000):
        n = 2 if index % 10 == 0 else 1
        params = SamplingParams(temperature=float(index % 2), seed=index, logprobs=1, n=n)
        engine.add(
            (index % 7, index % 11, index % 3, index % 5, 1), params, max_tokens=1 + index % 2
        )
        if index % 50 == 49:
            list(engine)
        if index in (99, 1999):
            sizes[index] = live_sizes(engine)
    more_batches = sizes[1999].pop("batches") - sizes[99].pop("batches")
    assert more_batches <= 16, "the last ones that were placed are kept"
    assert sizes[99] == sizes[1999]


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "pipeline"), [("full", 1), ("full_and_piecewise", 2)])
def test_adapters_and_drafts_leave_nothing_behind(mode: str, pipeline: int) -> None:
    """The same, for requests with adapters, drafts and stop tokens."""
    adapters = small_adapters()
    settings = {"num_logprobs": 1, "speculation": Speculation(2)}
    engine = Engine(
        small_model(), SMALL, pipeline=pipeline, graph=mode, adapters=adapters, **settings
    )
    engine.warm_up()
    sizes = {}
    for index in range(300):
        stops = [index % 12] if index % 3 == 0 else []
        params = SamplingParams(
            temperature=float(index % 2), seed=index, logprobs=1, stop_token_ids=stops
        )
        prompt = (index % 7, index % 11, index % 3, index % 5, 1)
        adapter = (None, *adapters)[index % 3]
        engine.add(prompt, params, max_tokens=1 + index % 3, adapter=adapter)
        if index % 25 == 24:
            list(engine)
        if index in (99, 299):
            sizes[index] = live_sizes(engine)
    stats = engine.stats()
    assert min(stats.accepted, stats.drafted - stats.accepted, stats.ended["stop"]) > 0
    assert sizes[299].pop("batches") - sizes[99].pop("batches") <= 16, (
        "the last ones that were placed are kept"
    )
    assert sizes[99] == sizes[299]


def live_sizes(engine: Engine) -> dict[str, Any]:
    """The sizes of everything that could grow."""
    gc.collect()
    objects = gc.get_objects()
    stats = engine.stats()
    host = engine._host
    batches = [x for x in objects if isinstance(x, Batch)]
    placed = {id(x) for x in tree_leaves(batches)}
    processor = engine._outputs
    tables = (
        host.requests,
        host.waiting,
        host.running,
        host.unread,
        processor._open,
        processor._names,
        engine._pending,
    )
    return {
        "batches": len(batches),
        "tensors": sum(isinstance(x, torch.Tensor) and id(x) not in placed for x in objects),
        "pages": (stats.pages_held, stats.pages_free),
        "graphs": (stats.captures, stats.graphs),
        "tables": sum(map(len, tables)),
        "requests": sum(isinstance(x, CompletionState | RequestOutput) for x in objects),
    }


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("pipeline", "mode"), [(1, "full"), (1, "full_and_piecewise"), (2, "full_and_piecewise")]
)
def test_after_warm_up_nothing_is_captured_and_nothing_was_left_in_the_state(
    pipeline: int, mode: str
) -> None:
    limits = attrs.evolve(SMALL, max_num_tokens=8)
    warm, cold = (
        Engine(small_model(), limits, pipeline=pipeline, graph=mode, seed=0) for _ in range(2)
    )
    captured = warm.warm_up()
    assert captured.captures == sum(captured.graphs.values()) > 4
    said = []
    for engine in (warm, cold):
        for index in range(6):
            engine.add([1, 2, index], SamplingParams(), max_tokens=4, id=str(index))
        said.append({name: track.token_ids for name, track in ended(engine).items()})
    assert said[0] == said[1]
    assert warm.stats().captures == captured.captures
    assert 0 < cold.stats().captures < captured.captures
    assert warm.stats().steps == cold.stats().steps


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_engine_warms_up_while_requests_are_under_way(pipeline: int, steps: int) -> None:
    said = []
    for graph in ("full_and_piecewise", "none"):
        engine = Engine(small_model(), SMALL, pipeline=pipeline, graph=graph, seed=0)
        for index in range(6):
            engine.add([1, 2, index], max_tokens=5, id=str(index))
        outputs = [output for _ in range(steps) for output in engine.step()]
        engine.warm_up()
        outputs += engine
        said.append({output.id: output.track.token_ids for output in outputs})
    assert said[0] == said[1]


def test_stats_count_what_was_done() -> None:
    engine = Engine(small_model(), SMALL, graph="full_decode_only", run_ahead=0)
    for index in range(3):
        engine.add([1, 2, 3, 4, 5, index], max_tokens=4, id=str(index))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held, stats.tokens) == (3, 0, 6, 16)
    list(engine)
    engine.add([1, 2, 3, 4, 5], max_tokens=4)
    list(engine)
    stats = engine.stats()
    assert stats.prefix_tokens == 4
    assert stats.ended == {"length": 4}
    assert stats.steps["decode"] == stats.modes["full"] == stats.replays
    assert stats.steps["prompts"] + stats.steps["mixed"] == stats.modes["none"] == stats.eager
    assert sum(stats.eager_reasons.values()) == stats.eager
    assert all(
        reason.startswith("no captured class covers 'ragged ") for reason in stats.eager_reasons
    )
    assert stats.padding_share == stats.padding / (stats.tokens + stats.padding) > 0, (
        "3 requests ran as 4"
    )


@pytest.mark.parametrize(
    ("options", "num_layers"),
    [
        ({}, 3),
        ({"pipeline": 2}, 3),
        ({"speculation": Speculation(model=small_model(1), num_tokens=2)}, 3 + 3),
    ],
    ids=["one stage", "two stages", "with a draft model"],
)
def test_stats_have_the_bytes_of_the_kv_cache(options: dict[str, Any], num_layers: int) -> None:
    engine = Engine(small_model(), SMALL, graph="none", **options)
    keys = num_layers * 16 * 4 * 1 * 4  # layers, pages, tokens, heads, dimensions
    assert engine.stats().kv_cache_bytes == 2 * keys * 4
    engine.add([1, 2, 3], max_tokens=4)
    engine.step()
    assert engine.stats().kv_cache_bytes == 2 * keys * 4, "it does not depend on the requests"


def test_the_kv_cache_of_a_model_beside_and_snapshots_of_pages_count() -> None:
    carries = {"state": torch.zeros(5)}
    model = small_model().with_stages(
        logits=lambda logits, rows, extras: logits + extras["other"],
        beside={"other": small_model(1)},
    )
    plain = Engine(small_model(), SMALL, graph="none").stats().kv_cache_bytes
    assert Engine(model, SMALL, graph="none").stats().kv_cache_bytes == 2 * plain
    snapshots = small_model().with_stages(carries=carries, prefix_caching="snapshot")
    with_snapshots = Engine(snapshots, SMALL, graph="none").stats().kv_cache_bytes
    assert with_snapshots - plain == (16 + 1) * 5 * 4, "for each page, and a scratch one"


def test_each_class_of_steps_without_a_graph_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(
        small_model(), SMALL, graph="full_decode_only", run_ahead=0, prefix_caching=False
    )
    object.__setattr__(weft.config, "explain_cache_misses", True)
    try:
        for index in range(4):
            engine.add([1, 2, 3, 4, 5, index], max_tokens=2)
            list(engine)
    finally:
        object.__setattr__(weft.config, "explain_cache_misses", False)
    texts = [
        record.getMessage()
        for record in caplog.records
        if "runs without a graph" in record.getMessage()
    ]
    assert len(texts) == len(set(texts)) == len(engine.stats().eager_reasons) == 1
    assert engine.stats().eager == 4


@pytest.mark.one_of(3)
@pytest.mark.parametrize("mode", MODES)
def test_threads_say_what_one_thread_says(mode: str) -> None:
    said = []
    for transport in (None, Threads()):
        engine = Engine(small_model(), SMALL, pipeline=2, graph=mode, transport=transport, seed=0)
        for index in range(4):
            engine.add(
                [1, 2, index], SamplingParams(temperature=1.0, n=2), max_tokens=4, id=str(index)
            )
        said.append([(o.id, o.index, o.token_ids) for o in engine])
    assert said[0] == said[1]


# Streams


async def read(
    engine: Engine, prompt: Any, count: int | None = None, **options: Any
) -> list[RequestOutput]:
    """The outputs of a stream; or the first few, after which the consumer stops."""
    outputs: list[RequestOutput] = []
    stream = engine.stream(prompt, **options)
    async for output in stream:
        outputs.append(output)
        if len(outputs) == count:
            await stream.aclose()
            break
    return outputs


def test_streams_side_by_side_are_the_completions(demo: Model) -> None:
    prompts = ["The function returns", "def ", "A list is"]
    whole = weft.generate(demo, prompts, max_tokens=8, graph="none")
    engine = Engine(demo, EngineLimits(max_num_reqs=2, max_model_len=64), graph="none")

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(engine, prompt, max_tokens=8) for prompt in prompts))

    for outputs, completion in zip(asyncio.run(all_of_them()), whole, strict=True):
        assert "".join(output.text or "" for output in outputs) == completion.text
        assert outputs[-1].finish_reason == completion.finish_reason
    assert engine.is_idle or num_unfinished(engine) == 0
    assert asyncio.run(all_of_them())[0][-1].track.text == whole[0].text, (
        "on another event loop, later"
    )


@pytest.mark.parametrize("leaves", ["closes", "is cancelled"])
def test_a_consumer_that_goes_away_aborts_its_request(leaves: str) -> None:
    engine = Engine(small_model(), SMALL, graph="none")

    async def both() -> list[RequestOutput]:
        stays = asyncio.create_task(read(engine, [1, 2, 3], max_tokens=9))
        goes = asyncio.create_task(
            read(engine, [1, 2], 2 if leaves == "closes" else None, max_tokens=20, id="gone")
        )
        while leaves == "is cancelled" and not is_under_way(engine, "gone"):
            await asyncio.sleep(0)
        if leaves == "is cancelled":
            goes.cancel()
        await asyncio.wait([goes])
        assert not is_under_way(engine, "gone")
        return await stays

    outputs = asyncio.run(both())
    assert len(outputs[-1].track.token_ids) == 9
    assert engine.stats().ended == {"abort": 1, "length": 1}
    assert engine.stats().pages_held == 0


def test_what_a_step_raises_all_who_listen_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small_model(), SMALL, graph="none")

    def broken(works: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(engine, "_executor", broken)

    async def both() -> list[Any]:
        streams = (read(engine, [index], max_tokens=2) for index in range(2))
        return await asyncio.gather(*streams, return_exceptions=True)

    assert [type(result) for result in asyncio.run(both())] == [MemoryError, MemoryError]
    with pytest.raises(EngineError, match="an earlier step that raised MemoryError: no more; "):
        asyncio.run(read(engine, [1], max_tokens=2))


class _Elsewhere(Threads):
    """A transport of a pipeline over processes, as one rank sees it: one stage runs here."""

    def ranks(self, num_ranks: int) -> range:
        return range(min(num_ranks, 1))


def test_streams_of_a_pipeline_over_processes_are_refused() -> None:
    engine = Engine(small_model(), SMALL, pipeline=2, graph="none", transport=_Elsewhere())
    with pytest.raises(ProgramError, match="which do not know when requests come"):
        asyncio.run(read(engine, [1], max_tokens=1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"graph": "fast"}, "graph='fast'"),
        ({"pipeline": 4}, "pipeline=4"),
        ({"run_ahead": -1}, "run_ahead=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"transport": "threads"}, "transport='threads'"),
        ({"transport": Threads}, "transport=Threads, the class"),
        (
            {"limits": EngineLimits(max_num_reqs=8, max_num_tokens=4)},
            "max_num_tokens=4",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as error:
        Engine(small_model(), **options)
    assert error.value.problem == problem
