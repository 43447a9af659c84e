"""`engine_machine`: tests the engine with a user's model, as a Hypothesis state machine."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
from hypothesis import currently_in_test_context, event, note, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from weft.arguments.checks import is_int, kind_of
from weft.batches.sampling import SamplingParams
from weft.errors import CheckError
from weft.proofs._laws.engine.completions import check_nothing_is_left
from weft.proofs._strategies.engine.engines import Half
from weft.proofs.checks.difference import LawViolation
from weft.proofs.checks.served_model import CompletionKey, Oracle, ServedModel
from weft.proofs.serving import check_ends
from weft.stages.adapters.adapter import Adapter
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine, is_under_way, num_unfinished
from weft.transforms.engine.options import EngineLimits, Speculation, check_engine
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests.masks import Mask

LAW = "L11 an engine serves as alone"
# The number of requests at which an example stops adding more.
MAX_REQUESTS = 5
# The default requests use so few tokens that stop tokens and repetitions occur.
FEW_TOKENS = 12
# Each rule draws one seed, and derives all else from it with `random`, because Hypothesis itself
# repeats small values too often.
SEEDS = st.integers(0, 2**32 - 1)


def engine_machine(
    model: Model,
    expected: Oracle | None = None,
    *,
    prompts: Sequence[str | Sequence[int]] | None = None,
    sampling: Sequence[SamplingParams] | None = None,
    masks: Sequence[Mask] | None = None,
    adapters: Mapping[str, Adapter] | None = None,
    speculation: Sequence[Speculation] | None = None,
    graph: str = "full_and_piecewise",
    pipeline: int = 1,
    max_tokens: int = 7,
) -> "type[EngineMachine]":
    """Make a Hypothesis state machine that compares an engine of your model with an oracle.

    Each example draws an engine's rows, pages and tokens per step, which are mostly scarce.
    Requests arrive while others run, share prefixes, are preempted, and some are aborted. In the
    end, each completion must have exactly the oracle's tokens (an aborted one, the first of them),
    and the engine must hold no page.

    Assign the class's `TestCase` to a name that pytest or unittest collects. Your Hypothesis
    profile, or `TestCase.settings`, determines the number of examples and steps, and the database.
    A failure prints each call of the engine as a note.

    Tokens are compared exactly. Since batches of different sizes may round differently, use a model
    in float32 on a CPU whose likeliest tokens do not tie: a trained one, or one with large random
    weights.

    Args:
        model: from `weft.load`, whole. Its parameters must not change.
        expected: the oracle: a function from a `CompletionRequest` to the ids of the tokens that it
            generates, including the one that ends it. It is called once for each different request,
            with the full `max_tokens`. If it is None or returns None, the oracle is the same model
            in a separate engine, which runs eagerly, one request at a time.
        prompts: texts or token ids; some should begin alike, so that prefixes are shared. None: six
            short ones.
        sampling: parameters that requests choose from; a seed of None becomes the parameters' index
            in the list. None: nine, greedy and random, with penalties, stop tokens and `n=2`.
        masks: masks that requests choose from; half of the requests have none. Each mask must
            always allow a token that all of `sampling` allow. None: two masks that allow half of 12
            tokens; or no masks, if `sampling` is given.
        adapters: LoRA adapters by name, which the engine has in half of the examples. None: no
            adapters.
        speculation: the ways of drafting that examples choose from; two further choices are not to
            draft. None: prompt lookup.
        graph: one of `weft.transforms.MODES`.
        pipeline: the number of stages, in this process.
        max_tokens: the most tokens that a request generates; some generate fewer.

    Returns:
        A subclass of `RuleBasedStateMachine` with the rules `add`, `step` and `abort`.
        `self.engine` is the engine, and `self.events` names what happened in the example
        (`"preempted"`, `"drafts right"`, ...), which `--hypothesis-show-statistics` counts.
        Subclass it to add rules or invariants.

    Raises:
        CheckError: there are no prompts or no parameters; a prompt and `max_tokens` exceed the
            model's positions; or the vocabulary has fewer than 12 tokens that do not end a request,
            and prompts, parameters and masks are not all given.
        RequestError: `weft.Engine` does not accept an argument.

    >>> import torch, weft
    >>> from hypothesis import settings
    >>> model = weft.load(weft.stages.DEMO, "cpu", torch.float32)
    >>> TestMyEngine = engine_machine(model, graph="none", max_tokens=3).TestCase
    >>> TestMyEngine.settings = settings(max_examples=1, stateful_step_count=2)
    >>> TestMyEngine("runTest").runTest()
    """
    call = "weft.proofs.engine_machine(model, ...)"
    check_engine(call, model, graph=graph, pipeline=pipeline, adapters=adapters)
    for drafts in speculation or ():
        check_engine(call, model, speculation=drafts)
    if expected is not None and not callable(expected):
        raise CheckError(
            call,
            f"expected is {kind_of(expected)}",
            "a function from a CompletionRequest to token ids",
        )
    if not is_int(max_tokens, 1):
        raise CheckError(call, f"max_tokens={max_tokens!r}", "a whole number >= 1")
    size = model.config.vocab_size
    if masks is None:
        masks = (
            []
            if sampling is not None
            else [Half(seed, _few(model, call), size) for seed in range(2)]
        )
    ids = (
        _default_prompts(_few(model, call))
        if prompts is None
        else [_ids(model, prompt) for prompt in prompts]
    )
    params = _default_sampling(_few(model, call), size) if sampling is None else sampling
    if not ids or not params:
        problem = f"{len(ids)} prompts, {len(params)} sampling parameters"
        raise CheckError(call, problem, "at least one of each, or None")
    length = max(map(len, ids)) + max_tokens
    most = model.config.max_position_embeddings
    if length > most:
        problem = f"a prompt and tokens of {length}, where the model has {most} positions"
        raise CheckError(call, problem, "shorter prompts, or fewer max_tokens")
    subject = ServedModel(
        model=model,
        expected=expected,
        prompts=tuple(ids),
        sampling=tuple(
            attrs.evolve(p, seed=i) if p.seed is None else p for i, p in enumerate(params)
        ),
        masks=tuple(masks),
        adapters=dict(adapters or {}),
        speculation=(Speculation(3),) if speculation is None else tuple(speculation),
        graph=graph,
        pipeline=pipeline,
        max_tokens=max_tokens,
    )
    # A new class for each call, because Hypothesis makes instances without arguments.
    return type(
        "EngineMachine", (EngineMachine,), {"subject": subject, "__doc__": EngineMachine.__doc__}
    )


def _ids(model: Model, prompt: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(model.encode(prompt) if isinstance(prompt, str) else prompt)


def _few(model: Model, call: str) -> tuple[int, ...]:
    """The first tokens of the vocabulary that do not end a request."""
    size = model.config.vocab_size
    ends = model.config.eos_token_ids
    tokens = tuple(
        token for token in range(min(size, FEW_TOKENS + len(ends))) if token not in ends
    )[:FEW_TOKENS]
    if len(tokens) < FEW_TOKENS:
        problem = f"a model of {size} tokens, {len(tokens)} of which do not end a request"
        raise CheckError(call, problem, "prompts=..., sampling=... and masks=... of your own")
    return tokens


def _default_prompts(few: Sequence[int]) -> list[tuple[int, ...]]:
    """Four prompts that begin alike, with repetitions for prompt lookup to find; and two others."""
    places = [
        (1, 2, 3, 4, 1, 2, 3, 4, 5),
        (1, 2, 3, 4, 1, 2, 3, 4),
        (1, 2, 3, 4, 1, 2),
        (1, 2, 3, 4),
    ]
    return [tuple(few[place] for place in prompt) for prompt in (*places, (7,), (9, 8, 7, 6, 5, 4))]


def _default_sampling(few: Sequence[int], vocab_size: int) -> list[SamplingParams]:
    """Parameters that each allow at least 7 of the `few` tokens, and mostly no others."""
    if len(few) == vocab_size:
        only: dict[str, Any] = {}
    else:
        only = {"allowed_token_ids": few}
    penalties = {"frequency_penalty": 0.4, "presence_penalty": 0.3}
    stops = [few[place] for place in (0, 2, 3, 5, 7)]
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {
            "temperature": 0.0,
            "logit_bias": {few[3]: 2.5, few[5]: -1.0},
            "bad_token_ids": [few[8]],
            **only,
        },
        {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": stops, **only},
        {
            "temperature": 0.0,
            "stop_token_ids": [few[1], few[4], few[6]],
            "prompt_logprobs": 0,
            **only,
        },
        {"temperature": 1.0, "seed": 3, "n": 2},
        {"temperature": 0.7, "seed": 4, "top_k": 5, "n": 2, "stop_token_ids": [few[2]], **only},
        {"temperature": 1.5, "seed": 5, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "seed": 6, "prompt_logprobs": 0, **penalties, **only},
    ]
    return [SamplingParams(**kwargs) for kwargs in fields]


class EngineMachine(RuleBasedStateMachine):
    """Adds requests to an engine with drawn limits, and aborts some between its steps."""

    subject: ClassVar[ServedModel]
    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.events: set[str] = set()
        self._has_engine = self._has_failed = False
        self._added: dict[str, tuple[CompletionKey, int]] = {}
        self._tracks: dict[tuple[str, int], CompletionState] = {}
        self._num_returned: Counter[tuple[str, int]] = Counter()
        self._last: set[str] = set()

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        """Make an engine, and add two requests."""
        draw = random.Random(seed)
        subject = self.subject
        rows = draw.choice((2, 3, 4, 5))
        page_size = draw.choice((2, 4))
        limits = EngineLimits(
            max_num_reqs=rows,
            # A token for each row of a stage's turn at least; with few to spare, prompts come in
            # chunks.
            max_num_tokens=-(-rows // subject.pipeline) + draw.choice((0, 4, 20)),
            max_model_len=subject.max_model_len,
            page_size=page_size,
            # Pages for one request at least; with few to spare, others wait or are preempted.
            num_pages=-(-subject.max_model_len // page_size) + draw.choice((0, 2, 4, 30)),
            mixed=draw.random() < 0.5,
        )
        named = draw.choice(({}, subject.adapters))
        self._adapters = (None, *named)
        options: dict[str, Any] = {
            "pipeline": subject.pipeline,
            "graph": subject.graph,
            "speculation": draw.choice((None, None, *subject.speculation)),
            "run_ahead": draw.randrange(4),
            "num_logprobs": subject.num_logprobs,
            "seed": 0,
        }
        adapters_text = ", ".join(f"{name!r}: ..." for name in named)
        _note(
            f"engine = weft.Engine(model, {limits!r}, adapters={{{adapters_text}}}{_written(options)})"
        )
        self.engine = Engine(subject.model, limits, adapters=named, **options)
        self._has_engine = True
        self._add(draw, 2)

    @precondition(lambda self: len(self._added) < MAX_REQUESTS)
    @rule(seed=SEEDS)
    def add(self, seed: int) -> None:
        """Add one or two requests."""
        draw = random.Random(seed)
        self._add(draw, draw.choice((1, 2)))

    def _add(self, draw: random.Random, count: int) -> None:
        subject = self.subject
        for _ in range(count):
            prompt = draw.randrange(len(subject.prompts))
            which = draw.randrange(len(subject.sampling))
            most = draw.choice(
                (subject.max_tokens, subject.max_tokens, -(-2 * subject.max_tokens // 3), 1)
            )
            priority = draw.choice((0, 0, 1))
            adapter = draw.choice(self._adapters)
            if subject.masks:
                mask = draw.choice((None, draw.randrange(len(subject.masks))))
            else:
                mask = None
            options: dict[str, Any] = {"priority": priority, "adapter": adapter, "max_tokens": most}
            options["mask"] = subject.mask(mask)
            _note(
                f"engine.add({subject.prompts[prompt]},"
                f" {subject.sampling[which]!r}{_written(options)})"
            )
            name = self.engine.add(subject.prompts[prompt], subject.sampling[which], **options)
            self._added[name] = CompletionKey(prompt, which, 0, adapter, mask), most

    @precondition(
        lambda self: not self.engine.is_idle or len(self._added) >= MAX_REQUESTS
    )  # some rule always holds
    @rule(count=st.sampled_from((3, 2, 1)))
    def step(self, count: int) -> None:
        """Run some steps of the engine."""
        for _ in range(count):
            _note("engine.step()")
            self._step()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except BaseException:
            self._has_failed = True  # so that `teardown` does not hide what was raised
            raise
        self._take(outputs)
        self._look(outputs)

    @precondition(lambda self: num_unfinished(self.engine) > 1)
    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        """Abort a request."""
        name = random.Random(seed).choice(
            [name for name in self._added if is_under_way(self.engine, name)]
        )
        _note(f"engine.abort({name!r})")
        # A masked request does not run ahead: its next mask needs its last token.
        ran = name in self._last and self._added[name][0].mask is None
        self._see({"aborted with a step under way": ran and self.engine.run_ahead})
        self._take(self.engine.abort(name))

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.error is not None:
                self._has_failed = True
                raise output.error
            self._tracks[output.id, output.index] = output.track
            self._num_returned[output.id, output.index] += len(output.token_ids)

    def _look(self, outputs: Sequence[RequestOutput]) -> None:
        """Record which kinds of completions got a token, after their first, in the same step."""
        self._last = {output.id for output in outputs}
        decoding = [
            output for output in outputs if output.token_ids and len(output.track.token_ids) > 1
        ]
        keys = [self._added[output.id][0] for output in decoding]
        num_masked = sum(key.mask is not None for key in keys)
        self._see(
            {
                "several decode": len(keys) > 1,
                "adapters mixed": len({key.adapter for key in keys}) > 1,
                "masks": num_masked > 0,
                "a mask beside none": 0 < num_masked < len(keys),
                "several masks": num_masked > 1,
            }
        )

    def _see(self, happened: Mapping[str, Any]) -> None:
        self.events |= {name for name, times in happened.items() if times}

    def teardown(self) -> None:
        """Run the engine until it is idle, and compare all completions with the oracle's."""
        # After a failure, another error from here would replace the first one.
        if not self._has_engine or self._has_failed:
            return
        steps = 0
        while not self.engine.is_idle:
            check_ends(LAW, steps)
            self._step()
            steps += 1
        for name, (key, most) in self._added.items():
            for sample in range(self.subject.sampling[key.sampling].n):
                self._compare(name, attrs.evolve(key, sample=sample), most)
        check_nothing_is_left(self.engine)
        self._see_stats()
        if currently_in_test_context():
            for happened in sorted(self.events):
                event(happened)

    def _compare(self, name: str, key: CompletionKey, most: int) -> None:
        track = self._tracks[name, key.sample]
        expected = self.subject.tokens(key)[:most]
        tokens = track.token_ids
        reason = track.reason
        params = track.request.sampling
        # An oracle gives fewer tokens than the most only where something ends the request.
        if len(expected) < most or expected[-1] in params.stop_token_ids:
            ends = "stop"
        else:
            ends = "length"
        if reason == "abort":
            expected = expected[: len(tokens)]
            ends = "abort"
        elif ends == "length" and params.stop:
            # A stop text may have ended it with its last token, which the token ids do not show.
            ends = reason
        if (tokens, reason) != (expected, ends):
            problem = f"{tokens}, {reason}, and expected {expected}, {ends}"
            raise LawViolation(f"{LAW}: completion {key.sample} of {name!r} is {problem}")
        # The track may be right although a step returned a token twice, or never.
        if (count := self._num_returned[name, key.sample]) != len(tokens):
            raise LawViolation(
                f"{LAW}: of the {len(tokens)} tokens of {name!r}, {count} were returned by a step"
            )

    def _see_stats(self) -> None:
        stats = self.engine.stats()
        self._see(
            {
                "aborted": stats.ended.get("abort", 0),
                "preempted": stats.preempted,
                "prefixes shared": stats.prefix_tokens,
                "drafts right": stats.accepted,
                "drafts wrong": stats.drafted - stats.accepted,
                "mixed steps": stats.steps.get("mixed", 0),
                **{f"steps in mode {mode}": count for mode, count in stats.modes.items()},
            }
        )


def _written(options: Mapping[str, Any]) -> str:
    """Options as code, to follow the other arguments of a call."""
    return "".join(f", {name}={value!r}" for name, value in options.items())


def _note(text: str) -> None:
    """Print a text if the example fails; do nothing if the machine is run without Hypothesis."""
    if currently_in_test_context():
        note(text)
