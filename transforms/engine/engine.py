"""`Engine`: requests in, tokens out. Device work is pure steps, host work a pure scheduler; this drives the two."""

import itertools
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import attrs

from weft.arguments import names_arguments
from weft.equivalents import ENGINE, for_add
from weft.errors import EngineError, RequestError, WeftError
from weft.sampling import SamplingParams
from weft.stages.adapters import Adapter
from weft.stages.model import Model
from weft.transforms.engine.faults import Whole
from weft.transforms.engine.host import HostState
from weft.transforms.engine.intake import Intake
from weft.transforms.engine.masks import Mask
from weft.transforms.engine.outputs import RequestOutput, joined
from weft.transforms.engine.prompts import EmbedsPrompt
from weft.transforms.engine.reading import Reading, Told
from weft.transforms.engine.requests import Request, sample_seeds
from weft.transforms.engine.samples import Samples
from weft.transforms.engine.scheduler import add, finish, observe, outdate, schedule
from weft.transforms.engine.setup import (
    EngineLimits,
    Resolved,
    assert_same_engines,
    check_engine,
    check_options,
    engine_ladder,
    make_stepper,
    make_weights,
)
from weft.transforms.engine.speculation import Speculation
from weft.transforms.engine.stats import Counts, Stats
from weft.transforms.engine.steppers import Done, Stepper
from weft.transforms.engine.streaming import Streams
from weft.transforms.engine.weights import Params
from weft.transforms.engine.work import Work
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local


@names_arguments(**ENGINE)
class Engine:
    """Continuous batching of a model: requests come and go at any time, and share every step.

    Args:
        model: from `weft.load`; of a pipeline over processes this rank's stage (`weft.load(..., stage=...)`).
        limits: rows, tokens a step, pages. None: what fits.
        pipeline: stages that the layers are split into.
        graph: one of `weft.transforms.MODES`.
        transport: where the stages run; None: in this process. Every rank makes the same calls.
        run_ahead: steps that are launched before the tokens of the first of them are read: the host's work is hidden
            behind the device's. What was sampled past an end is dropped.
        num_logprobs: the most that a request may ask for.
        seed: of requests that bring none; None: a fresh one.
        backend: of graphify.
        adapters: LoRA adapters by name (`weft.load_adapter`), for requests to choose from.
        speculation: how tokens are drafted, to be verified several a step; None: they are not.

    Raises:
        RequestError: an argument that makes no engine, or limits that leave no room for a request.

    >>> from weft.stages.model import DEMO, load
    >>> engine = Engine(load(DEMO, "cpu"), graph="none")
    >>> engine.add("The function returns", max_tokens=3), engine.add("A list is", max_tokens=2)
    ('request 0', 'request 1')
    >>> sum(len(output.token_ids) for output in engine)
    5
    """

    def __init__(
        self,
        model: Model,
        limits: EngineLimits | None = None,
        *,
        pipeline: int = 1,
        graph: str = "full_and_piecewise",
        transport: Transport | None = None,
        run_ahead: int = 1,
        num_logprobs: int = 0,
        seed: int | None = None,
        backend: str | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        call = f"weft.Engine(model, pipeline={pipeline!r}, graph={graph!r}, run_ahead={run_ahead!r})"
        check_engine(call, model, graph, pipeline, seed, transport)
        check_options(call, model, limits, run_ahead, num_logprobs, adapters, speculation)
        self.model = model
        self.transport = transport or Local()
        self.run_ahead = run_ahead
        self.num_logprobs = num_logprobs
        if speculation is not None:
            speculation.check(call, model, 0 in self.transport.ranks(pipeline))
        named = dict(adapters or {})
        self._weights = make_weights(model, pipeline, self.transport, named, speculation)

        def stepper(limits: Resolved) -> Stepper:
            ladder = engine_ladder(graph, limits.budget, len(named))
            own = self._weights, limits, pipeline, ladder, self.transport
            return make_stepper(*own, num_logprobs=num_logprobs, backend=backend)

        self.limits = (limits or EngineLimits()).resolve(model, pipeline, self.transport, speculation, stepper)
        budget = self.limits.budget
        given = self.transport.share(secrets.randbits(62)) if seed is None else seed
        self._intake = Intake(model, num_logprobs, given, {name: slot for slot, name in enumerate(named)})
        self._host = HostState.empty(budget, self.limits.num_pages, self.limits.page_size)
        self._stepper = stepper(self.limits)
        self._counts = Counts(engine_ladder(graph, budget, len(named)))
        self._samples = Samples(model.tokenizer, model.config.vocab_size)
        self._pending: deque[Reading] = deque()
        self._failed: list[RequestOutput] = []
        self._count = 0
        self._whole = Whole("engine.step()")
        self._spread = len(self.transport.ranks(pipeline)) < pipeline
        self._streams = Streams(self, self._spread)
        self._check = self.transport.check if self._spread else None
        self._assert_equal = self.transport.assert_equal if self._spread else None
        if self._assert_equal is not None:
            options = {"graph": graph, "num_logprobs": num_logprobs, "seed": given}
            assert_same_engines(self._assert_equal, model, self.limits, options, named)

    def __repr__(self) -> str:
        """What it serves, and how far it is."""
        name, graphs = self.model.config.architecture, len(self._stepper.graphs)
        ended = "; ended by what a step raised" * self._whole.is_broken
        return f"<Engine of {name}; graphified steps here: {graphs}; requests under way: {self.num_unfinished}{ended}>"

    @names_arguments(**for_add(attrs.fields_dict(SamplingParams)))
    def add(
        self,
        prompt: str | Sequence[int] | EmbedsPrompt,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        mask: Mask | None = None,
    ) -> str:
        """A request arrives; its tokens come with the next `step()`s.

        Args:
            prompt: a string or token ids; or, with embeddings and positions of its own, a `weft.EmbedsPrompt`, the same
                on every rank, bit for bit: those of the first stage compute with it, all name pages by it.
            sampling: how its tokens are chosen, and what ends it; None: greedy. With `n` > 1 it has so many
                completions, which share the pages of the prompt.
            max_tokens: tokens to generate at most; the model's own limit on positions may end it sooner.
            id: a name that no request under way has; None: one is made.
            priority: FIFO within a priority; lower numbers first. While enough requests of lower numbers keep coming,
                one of a higher number gets no turn.
            adapter: the name of its LoRA adapter, one of the engine's; None: the model alone.
            mask: a function of the tokens that it has said, called before each of its tokens, that returns those that
                may be next, such as a grammar's (`weft.transforms.engine.masks.Mask`); None: any. What it says next
                waits until what it said has been read, so that such a request does not run ahead, and has no drafts.
                If the function raises, or allows nothing, the request ends with an error, and no other one does.

        Returns:
            The id.

        Raises:
            RequestError: it could never be served. Nothing else is touched.
            EngineError: an earlier step raised, Ctrl-C among others.
        """
        self._whole.check("engine.add(...)")
        name = self._free_name() if id is None else id
        request = self._intake.request(
            self._count, name, prompt, sampling, max_tokens=max_tokens, priority=priority, adapter=adapter, mask=mask
        )
        names = [name, *(f"{name}[{index}]" for index in range(1, request.sampling.n))]
        if name in self._samples or any(self._host.find(each) for each in names):
            call = f"engine.add(prompt, {sampling!r}, max_tokens={max_tokens!r}, id={name!r})"
            raise RequestError(call, "a request of that id that has not ended", "another id, or abort it first")
        if self._assert_equal is not None:
            self._assert_equal("the request", f"{request}, n={request.sampling.n}")
        first_job = self._host.num_jobs
        self._samples.add(name, self._add_to_host(names, request), first_job, mask)
        self._count += 1
        return name

    def _free_name(self) -> str:
        names = (f"request {index}" for index in itertools.count(self._count))
        return next(name for name in names if name not in self._samples and not self._host.find(name))

    def _add_to_host(self, names: Sequence[str], first: Request) -> list[Request]:
        """The completions of a request: the first leads, the others wait for the pages of its prompt."""
        requests, budget = [first], self.limits.budget
        self._host = add(self._host, first, budget)
        seeds = sample_seeds(first.sampling.seed or 0, len(names))
        for name, seed in zip(names[1:], seeds[1:], strict=True):
            requests.append(attrs.evolve(first, id=name, sampling=attrs.evolve(first.sampling, seed=seed)))
            untold = attrs.evolve(requests[-1].sampling, prompt_logprobs=None)
            self._host = add(self._host, attrs.evolve(requests[-1], sampling=untold), budget, behind=first.id)
        return requests

    def abort(self, id: str) -> list[RequestOutput]:
        """End a request: all of its completions that have not ended.

        Returns:
            The last output of each.

        Raises:
            RequestError: no request of that id is under way.
        """
        if not isinstance(id, str) or id not in self._samples:
            call = f"engine.abort({id!r})"
            raise RequestError(call, "no request of that id that has not ended", "an id that add() returned")
        if self._assert_equal is not None:
            self._assert_equal("the abort", repr(id))
        names = self._samples.names(id)
        for name in names:
            self._host = finish(self._host, name, "abort")
        outputs = [self._end(name, "abort", []) for name in names]
        self._streams.tell(outputs)
        return outputs

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return len(self._samples)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and no step whose tokens were not read."""
        return not (len(self._samples) or self._pending or self._failed or self._stepper.num_under_way)

    def is_under_way(self, id: str) -> bool:
        """Whether the request of that id has not ended."""
        return id in self._samples

    @property
    def graphs(self) -> Sequence[Graphified[..., Any]]:
        """What was graphified and runs in this process, for its `memory_analysis()`; nothing in mode none."""
        return self._stepper.graphs

    def warm_up(self) -> Stats:
        """Capture all graphs of the ladder, largest first, with a progress bar on a terminal; without it they are
        captured when they are first needed. On a GPU their kernels are compiled before, several at once. They run on
        padding, in rows and pages that no request has. Steps with masks, embeddings or logprobs of prompts have graphs
        of their own, which are captured when one is first needed.

        A server that is to answer evenly calls `gc.collect()` and `gc.freeze()` after it: a full collection looks
        through all objects of torch and of the model, which takes 0.1 s, in the midst of a step.

        Returns:
            The engine's counts: how many graphs it holds now.
        """
        self._stepper.capture()
        return self.stats()

    def update(self, params: Params | None = None, *, adapters: Mapping[str, Adapter] | None = None) -> None:
        """Change the parameters: no page of the KV cache that was computed with the old ones is read again. Requests
        under way go on from what they have said, with pages that are computed anew; graphs are not captured again.

        The tensors are those of `engine.model`, written in place. A change in place that is not announced, as an
        optimizer's, is found out before the next step where torch counts it. It counts operators, and neither what is
        done to a tensor's `.data`, nor `fused=True` optimizers, nor what an array, a kernel of one's own or another
        process writes, nor tensors made in inference mode: then say `engine.update()`. With stages in other processes,
        say it of every change, on every rank.

        Args:
            params: as a model of `weft.load` has them; or tensors by transformers' names, such as a `state_dict()`:
                those that it does not name stay, and another stage's are skipped; where every rank is given all of
                them, 4 values of each are compared between ranks. None: they were changed in place.
            adapters: new ones by the names of the engine's own, of no larger rank.

        Raises:
            RequestError: parameters or adapters that do not fit; nothing is changed.

        >>> from weft.stages.model import DEMO, load
        >>> engine = Engine(load(DEMO, "cpu"), graph="none")
        >>> engine.update({"model.norm.weight": 1.01 * engine.model.params.norm})
        """
        call = f"engine.update({'' if params is None else 'params'})"
        pairs = [] if params is None else self._weights.pairs(call, params)
        if adapters is not None:
            self._weights.check_adapters(call, adapters)
        if self._assert_equal is not None:
            said = {name: own.weights for name, own in sorted((adapters or {}).items())}
            self._assert_equal("the update", f"{call} of {self._weights.digest(params)}, adapters={said}")
        with self._whole:
            self._outdate()
            self._weights.write(pairs, adapters or {})

    def _outdate(self) -> None:
        self._weights.look()
        self._keep(self._stepper.flush())
        self._host = outdate(self._host)

    def stats(self) -> Stats:
        """What the engine has done so far, and what it holds."""
        return self._counts.stats(self._host, self._stepper.graphs)

    def step(self) -> list[RequestOutput]:
        """Launch work as far ahead as is allowed, and read the oldest.

        Returns:
            What requests got; empty where nothing was to be read.

        Raises:
            EngineError: an earlier step raised, Ctrl-C among others, and what it did is not known. Whatever a step
                raises.
        """
        self.launch()
        with self._whole:
            failed, self._failed = self._failed, []
            return [*failed, *(self._read(self._pending.popleft()) if self._pending else [])]

    def launch(self) -> None:
        """Start work as far ahead as is allowed, or as there is any."""
        changed = self._weights.are_changed
        if changed and self._spread:
            seen = "parameters that were changed in place, of which other ranks do not know"
            raise EngineError("engine.step()", seen, "engine.update() behind the change, on every rank")
        with self._whole:
            if changed:
                self._outdate()
            while len(self._pending) <= self.run_ahead:
                if not self._launch():
                    self._keep(self._stepper.flush())
                    return

    def is_ready(self) -> bool:
        """Whether `step()` would not wait for the device."""
        return not self._pending or self._pending[0].is_ready()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Step until no request is left."""
        while not self.is_idle:
            yield from self.step()

    @names_arguments(**for_add(attrs.fields_dict(SamplingParams)))
    def stream(
        self,
        prompt: str | Sequence[int] | EmbedsPrompt,
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        mask: Mask | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as an async iterator; any number of them run on one event loop, and share every
        step. A consumer that goes away (`aclose()`, `break`, a cancelled task) aborts its request.

        The engine is stepped by the loop: between two waits for the device; call neither `step()` nor iterate beside
        it. All stages must run in this process.

        Args:
            prompt, sampling, max_tokens, id, priority, adapter, mask: as `add` takes them.

        Raises:
            RequestError: with the first output, what `add` raises; ProgramError: stages in other processes.

        >>> import asyncio
        >>> from weft.stages.model import DEMO, load
        >>> engine = Engine(load(DEMO, "cpu"), graph="none")
        >>> async def count(prompt):
        ...     return sum([len(output.token_ids) async for output in engine.stream(prompt, max_tokens=3)])
        >>> async def both():
        ...     return await asyncio.gather(count("The function"), count("A list"))
        >>> asyncio.run(both())
        [3, 3]
        """
        return self._streams.stream(
            prompt, sampling, max_tokens=max_tokens, id=id, priority=priority, adapter=adapter, mask=mask
        )

    def _launch(self) -> bool:
        """Schedule a step of every cohort, and start it; False where there is nothing to do."""
        works: list[Work] = []
        for _ in range(self.limits.budget.num_cohorts):
            self._host, more = schedule(self._host, self.limits.budget)
            works += map(self._masked, more)
        if works:
            if self._assert_equal is not None:
                for work in works:
                    self._assert_equal("the work", work.summary)
            self._keep(self._stepper(works))
            for work in works:
                self._counts.add(work)
        return bool(works)

    def _masked(self, work: Work) -> Work:
        """Work, with what its requests may say next; a request whose mask fails ends, and what is said for it is
        dropped."""
        work, failed = self._samples.masked(work)
        for name, error in failed.items():
            if self._host.find(name) is not None:  # which its mask may have aborted
                self._host = finish(self._host, name, "error")
                self._failed.append(self._end(name, "error", [], error))
        return work

    def _keep(self, done: Sequence[Done]) -> None:
        if done:
            self._pending.append(Reading(done, self._stepper.received(done)))

    def _read(self, reading: Reading) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for work, told in reading.wait(self._check):
            if told is None or not work.feeds:
                continue
            if work.targets:
                self._samples.take_prompts(work, told)
            self._host, got = observe(self._host, work.job, told.token_ids, told.faults)
            self._counts.read(told)
            for row, running, count in got:
                name = running.request.id
                found = self._take(name, running.reason, told, row, count)
                before = outputs.get(name)
                outputs[name] = found if before is None else joined(before, found)
        return list(outputs.values())

    def _take(self, name: str, reason: str, told: Told, row: int, count: int) -> RequestOutput:
        """What a request got in a row of a step, the first `count` tokens, which end it if it has a reason; so do an
        error, or a stop text, with the tokens up to there."""
        own, tokens, error = self._samples.take(name, told, row, count)
        if own and not reason:
            self._host = finish(self._host, name, own)
        if reason == "error" and not own:
            error = self._samples.fault(name, told.faults[row])
        reason = own or reason
        return self._end(name, reason, tokens, error) if reason else self._samples.output(name, tokens)

    def _end(self, name: str, reason: str, tokens: list[int], error: WeftError | None = None) -> RequestOutput:
        output = self._samples.end(name, reason, tokens, error)
        self._counts.ended[output.track.reason] += 1
        return output
