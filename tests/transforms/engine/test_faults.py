"""One fault ends one request: `add` refuses it, or it ends alone, with its reason."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from tokenizers import decoders

from weft.batches.sampling import SamplingParams
from weft.errors import LogitsError, RequestError, WeftError
from weft.ops.requests import EMBEDDED
from weft.ops.sampling.logits import FLOATS
from weft.proofs._laws.engine.completions import alone
from weft.proofs._strategies.engine.engines import VOCABULARY, small_model
from weft.stages.head import head
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests.masks import blamed
from weft.transforms.engine.requests.prompts import EmbedsPrompt

SMALL = EngineLimits(max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=16)
GREEDY = SamplingParams(temperature=0.0)
WAYS = [(1, "none", None), (1, "full", Speculation(2)), (3, "piecewise", None)]


def ended(engine: Engine) -> dict[str, RequestOutput]:
    return {output.id: output for output in engine if output.finish_reason is not None}


def assert_others_go_on(engine: Engine, outputs: dict[str, RequestOutput]) -> None:
    """`good`, beside the odd request, and a later request generate what they generate alone; and
    nothing is left."""
    prompts = {"good": (3, 4), "late": (5, 6, 7)}
    engine.add(prompts["late"], max_tokens=5, id="late")
    outputs |= ended(engine)
    for name, prompt in prompts.items():
        assert outputs[name].error is None
        assert (
            outputs[name].track.token_ids
            == alone(prompt, outputs[name].track.request.sampling, 5)[0]
        )
    assert (engine.is_idle, engine.stats().pages_held) == (True, 0)


def with_ends(*tokens: int) -> Model:
    model = small_model()
    return attrs.evolve(model, config=attrs.evolve(model.config, eos_token_ids=tokens))


# Refused by `add`
# -----------------------------------------------------------------------------------------------------


def test_parameters_that_leave_no_token_with_the_models_ends_are_refused() -> None:
    engine = Engine(with_ends(3), SMALL, graph="none")
    engine.add([3, 4], max_tokens=5, id="good")
    bars = SamplingParams(
        bad_token_ids=[token for token in range(VOCABULARY) if token != 3], min_tokens=1
    )
    with pytest.raises(
        RequestError, match=f"saw: all {VOCABULARY} tokens barred, those that end"
    ) as error:
        engine.add([1, 2], bars, max_tokens=3)
    assert error.value.instead.startswith("leave one that can be drawn")
    engine.add([1, 2], attrs.evolve(bars, min_tokens=0), max_tokens=3, id="ends at once")
    assert ended(engine)["ends at once"].track.token_ids == [3]


def test_what_cannot_be_written_in_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`add` raises whatever the step that admits the request would raise."""
    engine = Engine(small_model(), SMALL, graph="none")
    engine.add([3, 4], max_tokens=5, id="good")
    with monkeypatch.context() as patched:
        patched.setattr(
            "weft.batches.sampling_rows._floats", lambda params: dict.fromkeys(FLOATS, "warm")
        )
        with pytest.raises(RequestError, match="saw: ValueError: too many dimensions") as error:
            engine.add([1], SamplingParams(temperature=0.5), max_tokens=1)
    assert error.value.call.startswith(
        "engine.add(prompt, SamplingParams(temperature=0.5), max_tokens=1"
    )
    assert_others_go_on(engine, ended(engine))


@pytest.mark.parametrize(
    "embeds", [torch.zeros(2, 8).to_sparse(), torch.zeros(2, 8, device="meta")]
)
def test_embeddings_that_cannot_be_read_are_refused(embeds: torch.Tensor) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    with pytest.raises(
        RequestError,
        match="instead: EmbedsPrompt(...) of dense tensors".replace("(...)", r"\(\.\.\.\)"),
    ):
        engine.add(EmbedsPrompt(None, embeds), max_tokens=1)
    assert engine.is_idle


def test_an_end_beyond_the_vocabulary_ends_nothing_and_says_so() -> None:
    """A generation_config.json may have the ids of a larger tokenizer."""
    with pytest.warns(
        UserWarning,
        match=r"its eos_token_id names \[99\], beyond its 12 tokens, which ends nothing",
    ):
        engine = Engine(with_ends(99, 5), SMALL, graph="none")
    engine.add([3, 4], GREEDY, max_tokens=5, id="good")
    assert ended(engine)["good"].track.request.sampling.stop_token_ids == (5,)


# Ended alone
# ----------------------------------------------------------------------------------------------------------

ACCEPTED: dict[str, SamplingParams] = {
    "ints where floats go": SamplingParams(
        temperature=10**37, logit_bias={1: 10**30, 2: -(10**30)}
    ),
    "a share of the probability that is 0 in float32": SamplingParams(
        temperature=1.0, top_p=1e-50, seed=1
    ),
    "the smallest temperature": SamplingParams(temperature=1e-320, min_p=1e-320, seed=1),
    "a bias that no logit outweighs": SamplingParams(
        logit_bias=dict.fromkeys(range(VOCABULARY), -1e30)
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_odd_parameters_break_no_step(case: str) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    engine.add([1, 2], ACCEPTED[case], max_tokens=3, id="odd")
    engine.add([3, 4], max_tokens=5, id="good")
    outputs = ended(engine)
    assert (outputs["odd"].finish_reason, len(outputs["odd"].track.token_ids)) == ("length", 3)
    assert_others_go_on(engine, outputs)


MASKED: dict[str, tuple[Callable[[Sequence[int]], Any], SamplingParams, int]] = {
    "min_tokens": (lambda said: [3] if said else [4], attrs.evolve(GREEDY, min_tokens=2), 1),
    "allowed_token_ids": (lambda said: [5], attrs.evolve(GREEDY, allowed_token_ids=[6, 7]), 0),
    "bad_token_ids": (lambda said: [5, len(said)], attrs.evolve(GREEDY, bad_token_ids=[5, 2]), 2),
}


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize(("pipeline", "graph", "speculation"), WAYS)
@pytest.mark.parametrize("case", MASKED)
def test_a_mask_that_shares_no_token_with_the_parameters_ends_its_request(
    case: str, pipeline: int, graph: str, speculation: Speculation | None
) -> None:
    """A grammar that is complete before `min_tokens`: it allows only the token that ends the
    request."""
    mask, params, count = MASKED[case]
    engine = Engine(with_ends(3), SMALL, pipeline=pipeline, graph=graph, speculation=speculation)
    engine.add([1, 2], params, max_tokens=6, id="odd", mask=mask)
    engine.add([3, 4], SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=5, id="good")
    outputs = ended(engine)
    odd = outputs["odd"]
    assert (odd.finish_reason, len(odd.track.token_ids), odd.track.reason) == (
        "error",
        count,
        "error",
    )
    assert isinstance(odd.error, RequestError)
    assert odd.error.call == f"mask of request 'odd', after {count} tokens"
    assert (
        odd.error.problem
        == "tokens that are all barred by the request's allowed_token_ids, bad_token_ids or"
        " min_tokens"
    )
    assert engine.stats().ended == {"error": 1, "length": 1}


@pytest.mark.parametrize("pipeline", [1, 3])
def test_a_token_that_the_device_alone_knows_to_be_barred_is_not_said(
    pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of all allowed tokens are -inf: the token that the kernel returns has no logprob."""

    def bars_all_but_5(config: Any, params: Any, hidden: torch.Tensor, ranks: Any) -> torch.Tensor:
        logits = head(config, params, hidden, ranks)
        return torch.where(torch.arange(VOCABULARY) == 5, logits, -math.inf)

    monkeypatch.setattr("weft.stages.head.head", bars_all_but_5)
    engine = Engine(small_model(), SMALL, pipeline=pipeline, graph="none", run_ahead=2)
    engine.add([1, 2], attrs.evolve(GREEDY, bad_token_ids=[5]), max_tokens=3, id="odd")
    engine.add([3, 4], GREEDY, max_tokens=3, id="good")
    outputs = ended(engine)
    odd = outputs["odd"]
    assert (odd.token_ids, odd.track.token_ids, odd.track.logprobs, odd.finish_reason) == (
        [],
        [],
        [],
        "error",
    )
    assert isinstance(odd.error, RequestError)
    assert odd.error.problem.startswith("no token that can be drawn after 2 tokens")
    assert outputs["good"].track.token_ids == [5, 5, 5]
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize(
    ("value", "kind", "problem"),
    [
        (math.nan, LogitsError, "logits that are NaN after 2"),
        (-math.inf, RequestError, "no token that can be drawn after 2"),
    ],
)
def test_an_error_tells_nan_from_logits_that_bar_all_tokens(
    value: float, kind: type[WeftError], problem: str
) -> None:
    faulty_model = small_model().with_stages(
        logits=lambda logits, rows, extras: torch.full_like(logits, value)
    )
    engine = Engine(faulty_model, SMALL, graph="none")
    engine.add([1, 2], GREEDY, max_tokens=3, id="odd")
    error = ended(engine)["odd"].error
    assert type(error) is kind
    assert error.problem.startswith(problem)


def test_a_prompt_with_embeddings_beside_one_whose_logprobs_are_told_breaks_no_step() -> None:
    """Prompt logprobs look up the next token of the prompt, and an embedding has no id."""
    engine = Engine(small_model(), SMALL, graph="none", num_logprobs=1)
    engine.add([3, 4], attrs.evolve(GREEDY, prompt_logprobs=1), max_tokens=5, id="good")
    embeds = EmbedsPrompt([1, EMBEDDED, EMBEDDED], torch.ones(3, 8))
    engine.add(embeds, attrs.evolve(GREEDY), max_tokens=2, id="odd")
    outputs = ended(engine)
    assert outputs["odd"].finish_reason == "length"
    assert len(outputs["good"].track.prompt_logprobs) == 1
    assert_others_go_on(engine, outputs)


class Undecodable:
    """A tokenizer that raises at a token; a Rust extension's panic is not an `Exception`."""

    def __init__(self, token: int, error: BaseException) -> None:
        self.token = token
        self.error = error

    decoder = decoders.Fuse()

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def id_to_token(self, token: int) -> str:
        if self.token == token:
            raise self.error
        return chr(97 + token)


class PanicException(BaseException):
    __module__ = "pyo3_runtime"


@pytest.mark.one_of(5, 2)
@pytest.mark.parametrize(
    "error", [UnicodeError("no text"), PanicException("index out of bounds")], ids=repr
)
@pytest.mark.parametrize(("pipeline", "graph", "speculation"), WAYS)
def test_a_token_that_cannot_be_decoded_ends_its_request(
    pipeline: int, graph: str, speculation: Speculation | None, error: BaseException
) -> None:
    model = attrs.evolve(small_model(), tokenizer=Undecodable(11, error))
    engine = Engine(model, SMALL, pipeline=pipeline, graph=graph, speculation=speculation)
    engine.add([1, 2], attrs.evolve(GREEDY, allowed_token_ids=[11]), max_tokens=4, id="odd")
    engine.add([3, 4], attrs.evolve(GREEDY, bad_token_ids=[11]), max_tokens=5, id="good")
    outputs = ended(engine)
    assert (outputs["odd"].finish_reason, outputs["odd"].track.token_ids) == ("error", [11])
    assert isinstance(outputs["odd"].error, RequestError)
    assert outputs["odd"].error.problem == f"{type(error).__qualname__}: {error}".replace(
        "Panic", "pyo3_runtime.Panic"
    )
    assert outputs["odd"].error.__cause__ is error
    assert (
        outputs["good"].track.token_ids
        == alone((3, 4), outputs["good"].track.request.sampling, 5)[0]
    )
    assert outputs["good"].track.text == "".join(
        chr(97 + token) for token in outputs["good"].track.token_ids
    )
    assert engine.stats().pages_held == 0


def test_an_abort_of_what_cannot_be_decoded_is_an_error_and_breaks_nothing() -> None:
    """A decoder that fails on the whole text alone, at the end."""
    tokenizer: Any = Undecodable(99, ValueError())
    engine = Engine(attrs.evolve(small_model(), tokenizer=tokenizer), SMALL, graph="none")
    engine.add([1, 2], GREEDY, max_tokens=9, id="odd")
    engine.add([3, 4], GREEDY, max_tokens=5, id="good")
    engine.step()
    [state] = [output.track for output in engine.step() if output.id == "odd"]
    with mock.patch.object(state._detokenizer, "end", side_effect=ValueError("too long")):
        [output] = engine.abort("odd")
    assert output.finish_reason == "error"
    assert output.error is not None
    assert output.error.problem == "ValueError: too long"
    assert engine.step() is not None


class Says:
    """A mask that does something to its engine."""

    def __init__(self, engine: Engine, do: Callable[[Engine], Any]) -> None:
        self.engine = engine
        self.do = do

    def __call__(self, said: Sequence[int]) -> list[int]:
        if len(said) == 1:
            self.do(self.engine)
        return [7]


def abort_and_raise(engine: Engine) -> None:
    engine.abort("odd")
    raise ValueError("gone")


MEDDLING: dict[str, tuple[Callable[[Engine], Any], str | None, str]] = {
    "steps": (lambda engine: engine.step(), "error", "a call from within a step"),
    "launches": (lambda engine: list(engine), "error", "a call from within a step"),
    "aborts itself": (lambda engine: engine.abort("odd"), None, ""),
    "aborts itself and raises": (abort_and_raise, None, ""),
    "aborts its neighbour": (lambda engine: engine.abort("other"), "length", ""),
    "asks for more": (lambda engine: engine.add([1], max_tokens=1, id="more"), "length", ""),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("case", MEDDLING)
def test_a_mask_that_meddles_with_its_engine_breaks_no_step(case: str) -> None:
    do, reason, problem = MEDDLING[case]
    engine = Engine(small_model(), SMALL, pipeline=3, graph="none")
    engine.add([1, 2], GREEDY, max_tokens=3, id="odd", mask=Says(engine, do))
    engine.add([1, 5], GREEDY, max_tokens=9, id="other")
    engine.add([3, 4], max_tokens=5, id="good")
    outputs = ended(engine)
    odd = outputs.get("odd")
    assert (None if odd is None else odd.finish_reason) == reason
    if odd is not None and problem:
        assert odd.error is not None
        assert problem in odd.error.problem
    assert ("more" in outputs) == (case == "asks for more")
    assert_others_go_on(engine, outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("when", ["before the request", "behind it"])
def test_the_default_dtype_is_nothing_to_an_engine(dtype: torch.dtype, when: str) -> None:
    def said(to: torch.dtype) -> list[int]:
        engine = Engine(small_model(), graph="none")
        default = torch.get_default_dtype()
        sampling = SamplingParams(
            temperature=1.0, seed=3, repetition_penalty=1.2, logit_bias={5: 1}
        )
        try:
            if when == "before the request":
                torch.set_default_dtype(to)
            engine.add([1, 2, 3], sampling, max_tokens=6)
            torch.set_default_dtype(to)
            return [token for output in engine for token in output.token_ids]
        finally:
            torch.set_default_dtype(default)

    assert said(dtype) == said(torch.float32)


def test_an_interrupt_within_a_mask_is_no_fault_of_the_request() -> None:
    engine = Engine(small_model(), SMALL, graph="none")

    def interrupted(said: Sequence[int]) -> list[int]:
        raise KeyboardInterrupt

    engine.add([1, 2], max_tokens=3, mask=interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_generate_says_what_went_wrong_with_one_prompt() -> None:
    model = small_model()
    assert model.params.embed_tokens is not None
    embed = model.params.embed_tokens.clone()
    embed[11] = math.nan
    broken = Model(
        model.config, attrs.evolve(model.params, embed_tokens=embed), None, Path("broken")
    )
    bad, good = generate(
        broken,
        [[1, 11], [1, 2]],
        max_tokens=3,
        sampling=SamplingParams(temperature=1.0, bad_token_ids=[11], seed=0),
    )
    assert (bad.finish_reason, bad.token_ids, bad.logprobs) == ("error", [], [])
    assert isinstance(bad.error, LogitsError)
    assert (good.finish_reason, good.error, len(good.token_ids)) == ("length", None, 3)


def test_what_an_error_says_of_itself_may_fail_too() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with (
        pytest.raises(RequestError, match="Silent: <exception str") as error,
        blamed("call", "instead"),
    ):
        raise Silent
    assert isinstance(error.value.__cause__, Silent)
    original = RequestError("mine", "seen", "instead")
    with pytest.raises(RequestError) as error, blamed("call", "instead"):
        raise original
    assert error.value is original
