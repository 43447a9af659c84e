"""`Engine`: requests in, tokens out. The driver loop schedules on the host, launches on the device,
and reads results later."""

import functools
import itertools
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.arguments.checks import names_arguments
from weft.arguments.equivalents import ENGINE, for_add
from weft.batches.sampling import SamplingParams
from weft.errors import EngineError, WeftError
from weft.stages.adapters.adapter import Adapter
from weft.stages.custom.functions import capability_of
from weft.stages.model import Model
from weft.torchapi.inductor import Compiler, compiler_name
from weft.torchapi.ranges import profile_range
from weft.transforms.engine.calls import Calls
from weft.transforms.engine.memory import cache_bytes
from weft.transforms.engine.options import (
    EngineLimits,
    Speculation,
    check_draft_model,
    check_engine,
    query_lens,
    resolve_limits,
)
from weft.transforms.engine.outputs import (
    OutputProcessor,
    RequestOutput,
    Streams,
    joined,
    joined_by_completion,
)
from weft.transforms.engine.requests.host_state import HostState, Request, RequestState, check_free
from weft.transforms.engine.requests.inputs import RequestBuilder, call_of_add
from weft.transforms.engine.requests.masks import Mask
from weft.transforms.engine.requests.prompts import EmbedsPrompt
from weft.transforms.engine.scheduler import add, finish, forget, observe, outdate, schedule
from weft.transforms.engine.setup import assert_same_engines, assert_same_left_out, make_executor
from weft.transforms.engine.split import Split
from weft.transforms.engine.stats import Counts, Stats
from weft.transforms.engine.step_limit import limit_steps
from weft.transforms.engine.steps.executor import capture_all
from weft.transforms.engine.steps.results import FinishedWork, PendingResults, StepResult
from weft.transforms.engine.steps.step import Work
from weft.transforms.engine.weights import Params, make_weights
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.ladder import mode_within
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local


@names_arguments(**ENGINE)
class Engine:
    """Continuous batching of a model: requests arrive and end at any time, and share its steps.

    Args:
        model: from `weft.load`; with a pipeline over processes, this rank's stage (`weft.load(...,
            stage=...)`).
        limits: the most requests, tokens per step, and pages. None: the defaults of `EngineLimits`.
        pipeline: the number of stages that the layers are split into.
        tensor: the number of ranks that share each layer; each is a process with its share of the
            weights (`weft.load(..., shard=...)`), and the ranks of one stage have consecutive
            numbers. None: as many as the model has shares.
        graph: one of `weft.transforms.MODES`. On a GPU, steps without a graph are padded as in the
            default mode, so that all modes run the same kernels. On a CPU, graphs save no time:
            `none` starts sooner (`weft.make_ladder`).
        transport: where the stages run; None: in this process. Every rank makes the same calls.
        run_ahead: steps to launch ahead of the step whose tokens are read, so that host and device
            work at the same time.
        num_logprobs: the most logprobs per token that a request may ask for; -1: the whole
            vocabulary.
        seed: the seed for requests that bring none; None: a random one.
        backend: the backend of `graphify`.
        compiler: compiles the graphs, as in `graphify`: `inductor`, or another compiler that
            `torch.compile(backend=...)` takes. It fuses torch's operators, such as those of custom
            functions (`model.with_stages`); weft's own, which take most of a decoder's step, stay
            whole. Tokens are the same up to rounding of the logits. Steps without a graph are not
            compiled. None: nothing is compiled.
        strict: whether a step that cannot be compiled is an error. Otherwise a warning says so, and
            its graph holds the operators as they are.
        adapters: LoRA adapters by name (`weft.load_adapter`), for requests to choose from.
        speculation: how drafts are made, so that a step verifies several tokens; None: no drafts.
        prefix_caching: whether requests share the pages of equal prefixes; False: each request
            computes all of its tokens.

    Raises:
        CompilerError: torch has no such compiler, or it would have nothing to compile: with
            `graph="none"`, or for a model that is batch invariant.
        RequestError: an invalid argument, or limits that leave no room for a request.

    >>> import weft
    >>> engine = Engine(weft.load("demo", "cpu"), graph="none")
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
        tensor: int | None = None,
        graph: str = "full_and_piecewise",
        transport: Transport | None = None,
        run_ahead: int = 1,
        num_logprobs: int = 0,
        seed: int | None = None,
        backend: str | None = None,
        compiler: Compiler | None = None,
        strict: bool = False,
        adapters: Mapping[str, Adapter] | None = None,
        speculation: Speculation | None = None,
        prefix_caching: bool = True,
    ) -> None:
        call = (
            f"weft.Engine(model, pipeline={pipeline!r}, graph={graph!r}, run_ahead={run_ahead!r})"
        )
        options = {
            "graph": graph,
            "num_logprobs": num_logprobs,
            "seed": seed,
            "prefix_caching": prefix_caching,
            "strict": strict,
        }
        settings = {"limits": limits, "adapters": adapters, "speculation": speculation}
        check_engine(
            call,
            model,
            transport,
            pipeline=pipeline,
            tensor=tensor,
            run_ahead=run_ahead,
            compiler=compiler,
            **options,
            **settings,
        )
        self.model = model
        self.transport = transport or Local()
        self.run_ahead = run_ahead
        self.num_logprobs = num_logprobs = (
            model.config.vocab_size if num_logprobs == -1 else num_logprobs
        )
        split = Split(self.transport, pipeline, tensor or model.shard[1])
        split.check(call, model, backend)
        if speculation is not None:
            check_draft_model(speculation, call, model, 0 in split.here)
        # Resolved once, here, so that a mode that the attention cannot run in warns only once.
        graph = mode_within(call, graph, query_lens(speculation), capability_of(model.functions))
        self._is_distributed = split.is_distributed
        self._decides = 0 in self.transport.ranks(split.num_stages * split.num_shards)
        limits = limits or EngineLimits()
        if self._is_distributed:
            settings = {
                f"limits.{name}": getattr(limits, name)
                for name in ("num_pages", "max_step_seconds")
            }
            assert_same_left_out(call, self.transport, {"seed": seed, **settings})
        self._weights = make_weights(model, split, named := dict(adapters or {}), speculation)
        executor = functools.partial(
            make_executor,
            self._weights,
            split=split,
            graph=graph,
            num_logprobs=num_logprobs,
            backend=backend,
            compiler=compiler,
            strict=strict,
        )
        self.limits = resolve_limits(limits, model, split, speculation, executor)
        if seed is None:
            # Ranks sample the same tokens only from the same seed, so rank 0 draws it.
            own_seed = self.transport.share(secrets.randbits(62))
        else:
            own_seed = seed
        self._builder = RequestBuilder(
            model, num_logprobs, own_seed, self._weights.slots, prefix_caching
        )
        self._host = HostState.empty(
            self.limits.budget, self.limits.num_pages, self.limits.page_size
        )
        self._executor = executor(self.limits)
        self._outputs = OutputProcessor(
            model.tokenizer, model.config.vocab_size, self._builder.eos_ids
        )
        self._counts = Counts(self._executor.classes, cache_bytes(self._executor.state))
        self._num_added = 0
        self._pending = deque[PendingResults]()
        self._unreturned = list[RequestOutput]()
        self._calls = Calls()
        self._streams = Streams(self, self._is_distributed)
        if self._is_distributed:
            assert_same_engines(
                self.transport.assert_equal,
                model,
                self.limits,
                {**options, "seed": own_seed, "compiler": compiler_name(compiler)},
                named,
            )
        if limits.max_step_seconds is not None:
            self.warm_up()
            self.limits = limit_steps(
                self, limits.max_step_seconds, self._executor.classes.captured_tokens
            )
            # The measurements used the engine itself: count as if it had served nothing.
            self._counts = Counts(self._executor.classes, self._counts.kv_cache_bytes)
            self._num_added = 0
            self._outputs.ended, self._host.num_found = Counter(), 0

    def __repr__(self) -> str:
        """The model, and the number of graphs and requests."""
        name = self.model.config.architecture
        graphs = len(self._executor.graphs)
        ended = "; ended by what a step raised" * self._calls.is_broken
        return (
            f"<Engine of {name}; graphified steps here: {graphs}; requests under way:"
            f" {num_unfinished(self)}{ended}>"
        )

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
        extras: Mapping[str, Tensor] | None = None,
        cache_salt: str = "",
    ) -> str:
        """Add a request; the next `step()`s return its tokens.

        Args:
            prompt: a string, token ids, or, with embeddings and positions, a `weft.EmbedsPrompt`;
                the same on every rank, bit for bit.
            sampling: how tokens are chosen, and what ends the request; None: greedy. With `n` > 1
                it has `n` completions, which share the pages of the prompt.
            max_tokens: the most tokens to generate; the model's limit on positions may end the
                request sooner.
            id: a name that no unfinished request has; None: the engine makes one.
            priority: lower numbers run first, FIFO among equal ones; a request with a higher number
                can starve while lower ones keep coming.
            adapter: the name of one of the engine's LoRA adapters; None: the model alone.
            mask: a function, such as a grammar's, that is called before each token with the tokens
                generated so far and returns those that may be next
                (`weft.transforms.engine.requests.masks.Mask`); None: any token. Each token has to
                be read before the next one is computed, so the request has no run-ahead and no
                drafts. If the function raises or allows nothing, only this request ends with an
                error.
            extras: the request's extra inputs for the model's stages, by name
                (`model.with_stages(..., extras=...)`), and per-token inputs of its prompt
                (`token_extras=...`); omitted names have the model's defaults.
            cache_salt: the request shares pages of the prefix cache only with requests of the same
                salt.

        Returns:
            The id.

        Ctrl-C waits until the request is in the engine. After any other exception, no part of the
        request is in it.

        Raises:
            RequestError: the request could never be served. Other requests go on.
            EngineError: an earlier step raised; or another thread is inside a call of the engine.
        """
        with self._calls.enter("engine.add(...)", nests=True) as entered:
            index = self._num_added
            names = (f"request {number}" for number in itertools.count(index))
            free = (
                each for each in names if each not in self._outputs and not self._host.find(each)
            )
            name = next(free) if id is None else id
            options: dict[str, Any] = {
                "max_tokens": max_tokens,
                "priority": priority,
                "adapter": adapter,
                "mask": mask,
            }
            options |= {"extras": extras, "cache_salt": cache_salt}
            call = call_of_add(sampling, max_tokens, name)
            requests, mask = self._builder.build(call, index, name, prompt, sampling, **options)
            check_free(call, [each.id for each in requests], self._outputs, self._host.requests)
            try:
                entered.changing = "add"
                self._insert(name, requests, mask)
                entered.changing = ""
            except BaseException as error:
                # Roll back: the request is in the engine as a whole, or not at all.
                self._host = forget(self._host, [each.id for each in requests])
                self._outputs.forget(name, requests)
                self._num_added = index
                # In a distributed engine, any other error may be this rank's alone, while other
                # ranks hold the request: the call stays marked, which ends the engine.
                if not self._is_distributed or isinstance(error, WeftError):
                    entered.changing = ""
                raise
        return name

    def _insert(self, name: str, requests: Sequence[Request], mask: Mask | None) -> None:
        """Enter a request's completions in the scheduler's and the outputs' books."""
        if self._is_distributed:
            self.transport.assert_equal("the request", f"{requests[0]}, n={len(requests)}")
        # Later completions wait for the first one to compute the prompt's pages.
        for request in requests:
            self._host = add(
                self._host,
                request,
                self.limits.budget,
                behind=None if request is requests[0] else name,
            )
        self._outputs.add(name, requests, self._host.num_jobs, mask)
        self._num_added += 1

    def abort(self, id: str) -> list[RequestOutput]:
        """End a request; returns the last output of each completion that had not ended.

        Ctrl-C waits until the request has ended; the next `step()` then returns these outputs.

        Raises:
            RequestError: there is no request of this name, or it has ended.
            EngineError: another thread is inside a call of the engine.
        """
        with self._calls.enter(
            call := f"engine.abort({id!r})", nests=True, needs_whole=False
        ) as entered:
            names = self._outputs.names(call, id)
            entered.changing = "abort"
            self.transport.assert_equal("the abort", repr(id))
            # A broken engine steps no more, and its books of pages cannot be trusted.
            if not self._calls.is_broken:
                for name in names:
                    self._host = finish(self._host, name, "abort")
            outputs = [self._outputs.end(name, "abort", []) for name in names]
            self._streams.publish(outputs)
            kept = [output for output in self._unreturned if output.id != id]
            before = [output for output in self._unreturned if output.id == id]
            outputs = joined_by_completion([*before, *outputs])
            self._unreturned = [*kept, *outputs]
            entered.changing = ""
        # An interrupt that comes before this line leaves them for the next `step()`.
        self._unreturned = kept
        return outputs

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
        extras: Mapping[str, Tensor] | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as an async iterator. Any number of streams share one event
        loop, and one task of that loop steps the engine; do not call `step()` or iterate over the
        engine meanwhile. A consumer that stops (`aclose()`, `break`, a cancelled task) aborts its
        request. All stages must run in this process.

        Args:
            prompt, sampling, max_tokens, id, priority, adapter, mask, extras, cache_salt: as `add`
                takes them.

        Raises:
            RequestError: what `add` raises, when the first output is awaited.
            ProgramError: stages run in other processes.

        >>> import asyncio
        >>> import weft
        >>> engine = Engine(weft.load("demo", "cpu"), graph="none")
        >>> async def count():
        ...     return sum([len(output.token_ids) async for output in engine.stream("A list", max_tokens=3)])
        >>> asyncio.run(count())
        3
        """
        options: dict[str, Any] = {
            "priority": priority,
            "adapter": adapter,
            "mask": mask,
            "extras": extras,
        }
        return self._streams.stream(
            prompt, sampling, max_tokens=max_tokens, id=id, cache_salt=cache_salt, **options
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, no launched step is unread, and no output is unreturned."""
        return not (
            len(self._outputs) or self._pending or self._unreturned or self._executor.num_running
        )

    def _is_ready(self) -> bool:
        """Whether `step()` would not wait for the device."""
        return not self._pending or self._pending[0].is_ready()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Step until no request is left."""
        while not self.is_idle:
            if not self._unreturned:
                self._step()
            while self._unreturned:
                output = self._unreturned[0]
                # No call between `del` and `yield`, where Python could run a signal handler and
                # lose the output.
                del self._unreturned[0]
                yield output

    def step(self) -> list[RequestOutput]:
        """Launch steps up to the run-ahead limit and read the oldest unread one; returns one output
        for each completion that got tokens or ended.

        Ctrl-C waits until the step has ended: the engine stays usable, and the next `step()` also
        returns the outputs of this one. A second Ctrl-C interrupts the step at once and leaves the
        engine unusable. So do other asynchronous exceptions in the middle of a step (from another
        signal's handler, or `PyThreadState_SetAsyncExc`).

        Raises:
            EngineError: an earlier step was interrupted by an error, so that the engine's state is
                unknown; or another thread is inside a call of the engine.
            BaseException: whatever a step raises.
        """
        self._step()
        outputs = self._unreturned
        self._unreturned = []  # as in `__iter__`
        return outputs

    def _step(self) -> None:
        """Take a step, and add its outputs to the unreturned ones."""
        with self._calls.enter("engine.step()") as entered:
            self._check_weights()
            entered.changing = "step"
            is_behind = bool(self._unreturned)
            self._launch()
            if self._pending:
                with profile_range("weft: read"):
                    outputs = self._read(self._pending.popleft())
            else:
                outputs = []
            self._unreturned += outputs
            if is_behind:  # outputs of an interrupted step, not returned yet
                self._unreturned = joined_by_completion(self._unreturned)
            entered.changing = ""

    def launch(self) -> None:
        """Launch steps until `run_ahead` of them are in flight after the next one to read, or until
        no work is left."""
        with self._calls.enter("engine.launch()") as entered:
            self._check_weights()
            entered.changing = "step"
            self._launch()
            entered.changing = ""

    def _check_weights(self) -> None:
        if self._is_distributed and self._weights.are_changed:
            problem = "this rank's parameters were changed in place, and other ranks were not told"
            raise EngineError(
                "engine.step()", problem, "engine.update() after the change, on every rank"
            )

    def _launch(self) -> None:
        if self._weights.are_changed:
            self._outdate()
            # Copies the adapters, which may have changed in place, into their slots again.
            self._weights.write((), {})
        while len(self._pending) <= self.run_ahead:
            if not self._launch_step():
                # A pipeline returns finished work only while later work is submitted, so without
                # any, flush.
                with profile_range("weft: launch"):
                    self._copy_results(self._executor.flush())
                return

    def _launch_step(self) -> bool:
        """Schedule a step of every cohort and launch these steps; False if there is nothing to
        do."""
        with profile_range("weft: schedule"):
            works: list[Work] = []
            for _ in range(self.limits.budget.num_cohorts):
                self._host, more = schedule(self._host, self.limits.budget)
                works += more
        if works:
            works = self._apply_masks(works)
            if self._is_distributed:
                for work in works:
                    # Every rank schedules for itself; a rank that decided otherwise must not go
                    # unnoticed.
                    self.transport.assert_equal("the work", work.summary)
            with profile_range("weft: launch"):
                self._copy_results(self._executor(works))
            for work in works:
                self._counts.add(work)
                self._outputs.note_admissions(work)
        return bool(works)

    def _apply_masks(self, works: Sequence[Work]) -> list[Work]:
        """The works with their requests' masks. A request whose mask fails ends, and tokens sampled
        for it are dropped."""
        masked, failed = self._outputs.apply_masks(
            works, self.transport.share, decides=self._decides
        )
        for name, error in failed.items():
            # The mask function may have aborted its own request.
            if self._host.find(name) is not None:
                self._host = finish(self._host, name, "error")
                self._unreturned.append(self._outputs.end(name, "error", [], error))
        return masked

    def _copy_results(self, finished: Sequence[FinishedWork]) -> None:
        """Start to copy the results of finished work to the host."""
        if finished:
            self._pending.append(PendingResults(finished, self._executor.received(finished)))

    def _read(self, pending: PendingResults) -> list[RequestOutput]:
        """Wait for results, and give each request its tokens."""
        outputs: dict[str, RequestOutput] = {}
        for work, result in pending.wait(self.transport.check if self._is_distributed else None):
            if result is None or not work.feeds:
                continue
            # Before the tokens, which may end a completion and so close it.
            self._outputs.append_per_token(work, result)
            self._host, got = observe(self._host, work.job, result.token_ids, result.faults)
            self._counts.read(result)
            for row, req, count in got:
                output = self._append(req, result, row, count)
                name = req.request.id
                outputs[name] = joined(outputs[name], output) if name in outputs else output
        return list(outputs.values())

    def _append(self, req: RequestState, result: StepResult, row: int, count: int) -> RequestOutput:
        """Append tokens to a completion, and end its request if its text ends it."""
        output = self._outputs.append(req.request.id, result, row, count, req.reason)
        if output.finish_reason is not None and not req.reason:
            self._host = finish(self._host, req.request.id, output.finish_reason)
        return output

    def update(
        self, params: Params | None = None, *, adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        """Change the parameters. Pages of the KV cache that were computed with the old ones are not
        read again: unfinished requests keep their tokens, and recompute their pages. Graphs stay
        valid and are not captured again.

        The new values are written into the tensors of `engine.model`. If you change those tensors
        or an adapter's in place yourself, as an optimizer does, the next step notices if torch
        counts the change. torch counts changes by operators; it does not count writes to a tensor's
        `.data`, by a `fused=True` optimizer, through an array, by your own kernel, by another
        process, or in inference mode. After such a write, call `engine.update()`. With stages in
        other processes, call it after every change, on every rank.

        Args:
            params: parameters as in a model of `weft.load`; or tensors by transformers' names, such
                as a `state_dict()`. Parameters that it does not name stay, and those of other
                stages are skipped. Ranks compare 4 values of each tensor. None: the parameters were
                changed in place.
            adapters: new adapters, under names that the engine was made with, and with no larger
                LoRA rank.

        Raises:
            RequestError: parameters or adapters do not fit, or two names of one tensor, such as a
                tied head, have different values. Nothing is changed then.

        >>> import weft
        >>> engine = Engine(weft.load("demo", "cpu"), graph="none")
        >>> engine.update({"model.norm.weight": 1.01 * engine.model.params.norm})
        """
        call = f"engine.update({'' if params is None else 'params'})"
        with self._calls.enter(call) as entered:
            if params is None:
                pairs = []
            else:
                pairs = self._weights.pairs(call, params)
            self._weights.check_adapters(call, adapters)
            if self._is_distributed:
                self.transport.assert_equal(
                    "the update", f"{call} of {self._weights.digest(params, adapters or {})}"
                )
            entered.changing = "update"
            self._outdate()
            self._weights.write(pairs, adapters or {})
            entered.changing = ""

    def _outdate(self) -> None:
        self._copy_results(self._executor.flush())
        self._host = outdate(self._host)

    def reset_prefix_cache(self) -> int:
        """Remove all pages from the prefix cache; returns how many it held. Unfinished requests
        keep their pages. With stages in other processes, call it on every rank."""
        with self._calls.enter(call := "engine.reset_prefix_cache()", nests=True) as entered:
            entered.changing = "reset_prefix_cache"
            self.transport.assert_equal("the call", call)
            count = self._host.pages.forget()
            entered.changing = ""
        return count

    def warm_up(self) -> Stats:
        """Capture all graphs on padding, with a progress bar on a terminal; returns `stats()`. On a
        GPU, kernels are compiled first, and larger steps without a graph run once; in mode none
        nothing is done. Steps with masks, embeddings or prompt logprobs have other graphs, which
        are captured when first needed. For even latency, call `gc.collect` and `gc.freeze`
        afterwards: a full collection takes 0.1 s. With stages in other processes, call it on every
        rank."""
        with self._calls.enter(call := "engine.warm_up()", nests=True, defers=False) as entered:
            entered.changing = "step"
            self.transport.assert_equal("the call", call)
            # Running work owns the states that capture needs.
            self._copy_results(self._executor.flush())
            entered.changing = ""
            capture_all(self._executor)
        return self.stats()

    @property
    def graphs(self) -> Sequence[Graphified[..., Any]]:
        """The graphified functions that run in this process, for their `memory_analysis()`; empty
        in mode none."""
        return self._executor.graphs

    def stats(self) -> Stats:
        """What the engine has done so far, and what it holds."""
        return self._counts.stats(self._host, self._outputs.ended, self._executor.graphs)


def is_under_way(engine: Engine, id: str) -> bool:
    """Whether there is a request of that id that has not ended."""
    return id in engine._outputs


def num_unfinished(engine: Engine) -> int:
    """The number of requests that have not ended."""
    return len(engine._outputs)
