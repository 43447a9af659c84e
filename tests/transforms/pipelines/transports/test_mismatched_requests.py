"""Ranks with different requests fail before any of them returns a token."""

import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import streams
import torch
from ranks import advance, scale, told

from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.errors import RankError, WeftError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.checkpoints.reading import places
from weft.stages.model import Model
from weft.stages.random_weights import random_adapter
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.watching.watchdog import Launch, Watchdog

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank finds this module by its name

PROMPT = [5, 6, 7, 8]
OTHER = [5, 6, 7, 9]


def sampled(**kwargs: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**{"temperature": 0.5, "seed": 1, **kwargs})}


# The request of rank 1 that differs from the others', and the words of its error.
REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": OTHER}, "a prompt of 4 tokens ("),
    "longer prompt": ({"prompt": [*PROMPT, 1]}, "a prompt of 5 tokens ("),
    "max_tokens": ({"max_tokens": 7}, "max_tokens=7"),
    "priority": ({"priority": 1}, "priority=1"),
    "id": ({"id": "b"}, "'b', a prompt"),
    "mask or none": ({"mask": lambda said: [3]}, "masked"),
    "adapter": ({"adapter": "one"}, "adapter 0"),
    "temperature": (sampled(temperature=0.6), "temperature=0.6"),
    "seed": (sampled(seed=2), "seed=2"),
    "top_p": (sampled(top_p=0.9), "top_p=0.9"),
    "top_k": (sampled(top_k=3), "top_k=3"),
    "penalty": (sampled(repetition_penalty=1.2), "repetition_penalty=1.2"),
    "bias": (sampled(logit_bias={3: 1.0}), "logit_bias={3: 1.0}"),
    "bad tokens": (sampled(bad_token_ids=[3]), "bad_token_ids=(3,)"),
    "stop": (sampled(stop=["a"]), "stop=('a',)"),
    "stop tokens": (sampled(stop_token_ids=[9]), "stop_token_ids="),
    "ignore_eos": (sampled(ignore_eos=True), "ignore_eos=True"),
    "n": (sampled(n=2), "n=2"),
}

ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "limits": (
        {"limits": EngineLimits(max_num_reqs=3, max_model_len=32)},
        "'max_num_reqs: 3', where rank 0 has '",
    ),
    "tokens per step": (
        {"limits": EngineLimits(max_num_reqs=4, max_model_len=32, max_num_tokens=64)},
        "'max_num_tokens: 64', where rank 0 has 'max_num_tokens: 2048'",
    ),
    "engine seed": ({"seed": 4}, "'seed: 4', where rank 0 has 'seed: 3'"),
    "mode": ({"graph": "full"}, "'graph: full', where rank 0 has 'graph: none'"),
    "speculation": ({"speculation": Speculation(2, ngram=(1, 2))}, "'query_lens: (1, 2, 3)'"),
}

REST: dict[str, str] = {
    "weights": (
        "changed since it was loaded', where rank 0 has 'weights: torch.bfloat16, checkpoint"
    ),
    "configuration": "'config.rms_norm_eps: 0.25', where rank 0 has 'config.rms_norm_eps: ",
    "adapter's values": "'adapter 'one': ",
    "update": "'the update: engine.update(params) of ",
    "adapter of an update": (
        "'the update: engine.update() of what was changed in place, adapters={'one': "
    ),
    "mask": "'the work: job 0: row 0: 4, masks ",
    "abort": "the abort: 'a'', where rank 0 has 'the work: job 0",
    "order": "'the request: 'second', a prompt of 4",
    "one more request": "the request: 'more'",
}


def model_of(rank: int, what: str, split: str = "pipeline") -> Model:
    model = (
        load(DEMO, "cpu", stage=(rank, 2))
        if split == "pipeline"
        else load(DEMO, "cpu", shard=(rank, 2))
    )
    if what == "weights" and rank == 1:
        model.params.layers[0].o_proj[:] += 0.01
    if what == "configuration" and rank == 1:
        model = attrs.evolve(model, config=attrs.evolve(model.config, rms_norm_eps=0.25))
    return model


def ask(engine: Engine, what: str, odd: bool) -> None:
    """Add requests; one rank adds a different one."""
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "id": "a", **sampled()}
    if odd and what in REQUESTS:
        request |= REQUESTS[what][0]
    if what == "mask":
        request["mask"] = (lambda said: [3]) if odd else (lambda said: [4])
    if what == "order":
        for name in ("second", "first") if odd else ("first", "second"):
            engine.add(**(request | {"id": name, "prompt": PROMPT}))
    engine.add(**request)
    if what == "abort":
        engine.add(PROMPT, max_tokens=2, id="another")
    if odd and what == "abort":
        engine.abort("a")
    if odd and what == "one more request":
        engine.add(PROMPT, max_tokens=2, id="more")


def run_all(kinds: list[str], split: str) -> list[tuple[str, int]]:
    """For each kind, the words of this rank's error, and the number of tokens that it returned. The
    two ranks are stages of a pipeline (`pipeline`), or share layers (`tensor`)."""
    torch.set_num_threads(1)
    return [run_kind(what, split) for what in kinds]


def run_kind(what: str, split: str) -> tuple[str, int]:
    transport = Distributed(timeout=10)
    odd = transport.rank == 1
    returned = 0
    options: dict[str, Any] = {
        "graph": "none",
        "seed": 3,
        "limits": EngineLimits(max_num_reqs=4, max_model_len=32),
    }
    if odd and what in ENGINES:
        options |= ENGINES[what][0]
    try:
        model = model_of(transport.rank, what, split)
        names = ["model.layers.0.self_attn.q_proj"]
        other = odd and "adapter" in what
        first_adapter, new = (
            random_adapter(model.config, names, rank=2, seed=seed, std=0.1)
            for seed in (1, 2 + other)
        )
        adapter = new if other and what == "adapter's values" else first_adapter
        options[split] = 2
        engine = Engine(model, transport=transport, adapters={"one": adapter}, **options)
        ask(engine, what, odd)
        if what == "update":
            whole = load(DEMO, "cpu")
            weight_places = places(whole.params, whole.config, whole.layout)
            engine.update(
                {name: place.view * (1.5 if odd else 1.25) for name, place in weight_places.items()}
            )
        if what == "adapter of an update":
            engine.update(adapters={"one": new})
        for output in engine:
            returned += len(output.token_ids)
    except WeftError as error:
        return f"{type(error).__name__}: {error}", returned
    finally:
        transport.close()
    return "no error", returned


def run_on_a_device(differs: bool, slow_watchdog: bool = False) -> list[str]:
    """Steps on a device whose host runs ahead. Rank 1's differing request has a layout that rank 0
    knows. Returns the error of each step, each followed by the error of the read.

    Args:
        differs: whether there is such a request.
        slow_watchdog: whether a watchdog checks before the device is done, and finds the failure
            only after its host has closed.
    """
    streams.use_streams()
    find, looked = Watchdog._find_failure, threading.Event()

    def find_slowly(watchdog: Watchdog) -> RankError | None:
        error = find(watchdog)
        if error is not None:
            watchdog._launches.append(Launch(watchdog.monitor.here, watchdog._closed.is_set))
            looked.set()
            watchdog._closed.wait(timeout=4)
        return error

    if slow_watchdog:
        mock.patch.object(
            Watchdog, "_find_failure", find_slowly
        ).start()  # to the end of this process
    transport = Distributed(timeout=5)
    step = pipeline([scale] * 2, advance=advance, transport=transport)
    state = [torch.ones(())]
    said = []
    for number in range(3):
        transport.assert_equal(
            "the number", f"{number + (differs and transport.rank and number == 2)}"
        )

        def run() -> None:
            nonlocal state
            state, _ = step([torch.ones(())], state, torch.ones(3))

        said.append(told(run))
        if slow_watchdog and differs and number == 2:
            looked.wait(timeout=0.5)
        said.append(told(transport.synchronize))
    return said


KINDS = {what: said for table in (REQUESTS, ENGINES) for what, (_, said) in table.items()} | REST


def errors_of(split: str) -> dict[str, list[tuple[str, int]]]:
    kinds = ["nothing", *KINDS]
    return {
        what: list(each)
        for what, *each in zip(kinds, *launch(run_all, 2, kinds, split, timeout=120), strict=True)
    }


@pytest.fixture(scope="module")
def pipeline_errors() -> dict[str, list[tuple[str, int]]]:
    return errors_of("pipeline")


@pytest.fixture(scope="module")
def tensor_errors() -> dict[str, list[tuple[str, int]]]:
    return errors_of("tensor")


@pytest.mark.slow
def test_ranks_that_are_asked_for_the_same_agree(
    pipeline_errors: dict[str, Any], tensor_errors: dict[str, Any]
) -> None:
    assert pipeline_errors["nothing"] == tensor_errors["nothing"] == [("no error", 6)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_ranks_that_share_layers_find_what_differs_at_their_first_collective(
    what: str, tensor_errors: dict[str, Any]
) -> None:
    """Each rank compares the other's journal; one may first hear that the other has failed."""
    texts = [text for text, _ in tensor_errors[what]]
    assert [returned for _, returned in tensor_errors[what]] == [0, 0]
    assert any(text.startswith("ProgramError: rank ") for text in texts)
    for rank, text in enumerate(texts):
        differs = KINDS[what].partition("', where rank")[0].strip("'")
        assert differs in text or text.startswith(f"RankError: rank {rank}")
        assert f", where rank {1 - rank} has '" in text or f", where rank {rank} has '" in text
        if text.startswith("ProgramError"):
            assert text.splitlines()[0].startswith(
                f"ProgramError: rank {rank}: 'all_reduce sum among 0, 1 [mb 0]: x["
            )
            assert text.endswith(
                "instead: the same calls with the same arguments, in the same order, on every rank"
            )


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_what_differs_is_refused_before_a_token_is_returned(
    what: str, pipeline_errors: dict[str, Any]
) -> None:
    (first, by_first), (second, by_second) = pipeline_errors[what]
    assert (by_first, by_second) == (0, 0)
    assert second.startswith("ProgramError: step 1 of rank 1\n  saw: '")
    assert KINDS[what] in second
    assert ", where rank 0 has '" in second
    assert second.endswith(
        "instead: the same calls with the same arguments, in the same order, on every rank"
    )
    assert first.startswith("RankError: rank 0: ")
    assert second.splitlines()[1] in first


def step_by_hand(what: str) -> tuple[str, str]:
    """A step of a runner, and a call of `generate`, in which rank 1 has other weights or prompts."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    def step() -> None:
        transport = Distributed(timeout=5)
        model = model_of(rank, what)
        runner = make_runner(model, Limits(2, 16), num_stages=2, mode="none", transport=transport)
        state = make_state(model, runner.layouts, lengths=[8])
        runner.step(runner.params, state, Batch.ragged(token_ids=[PROMPT], rows=[0]))

    def complete() -> None:
        prompts = [PROMPT, PROMPT] if rank and what == "prompts" else [PROMPT]
        generate(
            model_of(rank, what),
            prompts,
            max_tokens=2,
            pipeline=2,
            transport=Distributed(timeout=5),
            seed=1,
        )

    return told(step), told(complete)


@pytest.mark.slow
def test_runners_compare_their_models_and_prompts_are_counted_first() -> None:
    assert launch(step_by_hand, 2, "nothing") == [("no error", "no error")] * 2
    for what in ("weights", "configuration"):
        _, (step, _) = launch(step_by_hand, 2, what)
        assert KINDS[what] in step
    _, (_, completed) = launch(step_by_hand, 2, "prompts")
    assert (
        "'the prompts: of [4, 4] tokens, max_tokens=2', where rank 0 has 'the prompts: of [4] "
        in completed
    )


def start_with(rank_options: list[dict[str, Any]]) -> str:
    transport = Distributed(timeout=5)
    options = {
        "limits": EngineLimits(max_num_reqs=2, max_model_len=32),
        **rank_options[transport.rank],
    }
    return told(
        lambda: Engine(load(DEMO, "cpu"), pipeline=2, transport=transport, graph="none", **options)
    )


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_do_not_wait_for_what_another_one_was_given(odd: int) -> None:
    pages = {"limits": EngineLimits(max_num_reqs=2, max_model_len=32, num_pages=4)}
    for name, options, number in (("limits.num_pages", pages, 4), ("seed", {"seed": 3}, 3)):
        errors = launch(start_with, 2, [options if rank == odd else {} for rank in range(2)])
        assert f"saw: {name}={number}, where rank {1 - odd} has None" in errors[odd]
        assert f"saw: {name}=None, where rank {odd} has a number" in errors[1 - odd]


@pytest.mark.slow
@pytest.mark.parametrize("slow_watchdog", [False, True])
def test_a_host_that_runs_ahead_of_its_device_is_told_before_it_reads(slow_watchdog: bool) -> None:
    assert launch(run_on_a_device, 2, False, slow_watchdog) == [["no error"] * 6] * 2
    for said in launch(run_on_a_device, 2, True, slow_watchdog):
        assert said[:4] == ["no error"] * 4
        # Whichever rank sees it first
        assert all(f"'the number: {number}'" in said[5] for number in (2, 3))
