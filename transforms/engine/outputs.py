"""Outputs: from the tokens that a step sampled to each request's text, stop texts and streams."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
from tokenizers import Tokenizer
from torch import Tensor

from weft.errors import EngineError, ProgramError, RequestError, WeftError
from weft.ops.requests import LAST_TOKEN
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.detokenizing import special_ids
from weft.transforms.engine.requests.host_state import Request, find_open
from weft.transforms.engine.requests.mask_budget import MaskBudget
from weft.transforms.engine.requests.masks import (
    Mask,
    RequestMask,
    blame,
    budget_of,
    compute_mask,
)
from weft.transforms.engine.steps.results import StepResult
from weft.transforms.engine.steps.step import Work

# Pause between two polls of the device while a stream waits.
_POLL_SECONDS = 1e-4
_NO_CAPTURES = 0, 0


# Not frozen: a frozen object takes three times as long to make, and every token makes one.
@attrs.define(eq=False)
class RequestOutput:
    """What one completion of a request got in a step of the engine.

    Args:
        id: of the request.
        index: the number of the completion (`SamplingParams.n`), from 0.
        token_ids: the new tokens.
        text: the new text; None where the checkpoint has no tokenizer, or the request asked for
            none.
        finish_reason: None: it has not ended. Otherwise `stop` (a stop token or a stop text),
            `length`, `abort`, or `error`.
        track: the whole completion so far: tokens, logprobs, text, times.
        error: if the reason is `error`, what went wrong with this request.
        captured_range: the half-open range of the request's tokens whose captures are new.
    """

    id: str
    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    track: CompletionState = attrs.field(repr=False)
    error: WeftError | None = None
    captured_range: tuple[int, int] = attrs.field(default=(0, 0), repr=False)

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or the stop text that ended it; None: it has not ended, or the model's own
        end-of-sequence token ended it."""
        return self.track.stop_reason

    @property
    def captured(self) -> dict[str, Tensor]:
        """The captures of the tokens that the model has processed since the last output, the
        prompt's first: [n, ...] by name (`weft.stages.sow`). A completion's last token is never
        processed."""
        return self.track.captured_of(*self.captured_range)


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Join two consecutive outputs of one completion."""
    if second.text is None:
        text = None
    else:
        text = f"{first.text or ''}{second.text}"
    captured = first.captured_range[0], second.captured_range[1]
    return attrs.evolve(
        second, token_ids=[*first.token_ids, *second.token_ids], text=text, captured_range=captured
    )


def joined_by_completion(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Join the outputs of each completion, in the order of their first outputs."""
    joined_outputs: dict[tuple[str, CompletionState], RequestOutput] = {}
    for output in outputs:
        key = output.id, output.track
        joined_outputs[key] = (
            joined(joined_outputs[key], output) if key in joined_outputs else output
        )
    return list(joined_outputs.values())


@attrs.define(eq=False)
class _OpenCompletion:
    """A completion that has not ended, and how much of it was output.

    Args:
        id, index: of its outputs.
        state: what it has generated.
        first_job: the first job that can belong to it: earlier jobs belong to an earlier request of
            the same name.
    """

    id: str
    index: int
    state: CompletionState
    first_job: int
    _num_captured: int = 0

    def output(
        self, tokens: list[int], reason: str | None = None, error: WeftError | None = None
    ) -> RequestOutput:
        """An output with these tokens, and with the text and captures that are new."""
        state = self.state
        if state.tokenizer is None:
            text = None
        else:
            text = state.take_text()
        captured = _NO_CAPTURES
        if state.num_captured:
            captured = self._num_captured, state.num_captured
            self._num_captured = state.num_captured
        return RequestOutput(self.id, self.index, tokens, text, reason, state, error, captured)


class MaskClock:
    """The CPU time that the masks of a step take, by request.

    Args:
        num_requests: the number of requests with masks in the step.
    """

    def __init__(self, num_requests: int) -> None:
        self.seconds: dict[str, float] = {}
        self._num_requests = num_requests

    def now(self) -> float:
        """Seconds of CPU time of this thread, so that time taken by other threads does not
        count."""
        return time.thread_time()

    def note(self, id: str, begin: float) -> None:
        """Add the time of a mask that started at `begin`."""
        self.seconds[id] = self.seconds.get(id, 0.0) + self.now() - begin

    def budget(self, budget: MaskBudget) -> MaskBudget:
        """One request's share of a budget."""
        return budget.share(self._num_requests)


class OutputProcessor:
    """The completions that have not ended, by name; a request's first completion has the request's
    name.

    Args:
        tokenizer: None: completions have no text.
        vocab_size: the size of masks.
        eos_ids: the model's end-of-sequence tokens.

    Attributes:
        ended: completions that have ended, by reason.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids(tokenizer)
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._open: dict[str, _OpenCompletion] = {}
        self._names: dict[str, list[str]] = {}
        self.ended: Counter[str] = Counter()
        self._masks: dict[str, RequestMask] = {}
        self._budgets: dict[str, MaskBudget] = {}
        self._debts: dict[str, float] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._names)

    def __contains__(self, id: object) -> bool:
        return id in self._names

    def names(self, call: str, id: object) -> list[str]:
        """The names of a request's completions that have not ended. The RequestError for an unknown
        id names `call`."""
        return list(find_open(call, self._names, id))

    def add(self, id: str, requests: Sequence[Request], first_job: int, mask: Mask | None) -> None:
        """Add a request's completions; the first one collects the prompt's logprobs for all of
        them."""
        tokenization = self._tokenizer, self._special_ids, self._eos_ids
        states = [CompletionState(request, *tokenization) for request in requests]
        if mask is None:
            own_mask = None
        else:
            own_mask = RequestMask.of(mask, requests[0].sampling, self._vocab_size)
        for index, (request, state) in enumerate(zip(requests, states, strict=True)):
            state.prompt_logprobs = states[0].prompt_logprobs
            state.prompt_top_logprobs = states[0].prompt_top_logprobs
            state.prompt_ranks = states[0].prompt_ranks
            self._open[request.id] = _OpenCompletion(id, index, state, first_job)
            if own_mask is not None:
                self._masks[request.id] = own_mask
        budget = budget_of(mask)
        if budget is not None:
            self._budgets[id] = budget
        self._names[id] = [request.id for request in requests]

    def forget(self, id: str, requests: Sequence[Request]) -> None:
        """Undo `add`, also one that was interrupted."""
        self._names.pop(id, None)
        self._budgets.pop(id, None)
        for request in requests:
            self._masks.pop(request.id, None)
            self._open.pop(request.id, None)

    def note_admissions(self, work: Work) -> None:
        """Record the time at which requests were given rows."""
        if work.edits.admissions:
            names = dict(zip(work.rows, work.requests, strict=True))
            for admission in work.edits.admissions:
                completion = self._open.get(names[admission.row])
                # Its mask may have ended the request.
                if completion is not None and completion.state.times.admitted is None:
                    completion.state.times.admitted = time.monotonic()

    def apply_masks(
        self, works: Sequence[Work], share: Callable[[Any], Any], *, decides: bool = True
    ) -> tuple[list[Work], dict[str, RequestError]]:
        """The works of a step with their requests' masks, and an error for each completion whose
        mask failed.

        Args:
            works: of one step.
            share: sends rank 0's value to all ranks (`Transport.share`).
            decides: whether this is rank 0, whose clock decides if a mask takes too long. If a mask
                has a budget, the other ranks first receive which masks failed on rank 0, and then
                compute the rest.
        """
        masked = [name for work in works for name in _sampled(work) if name in self._masks]
        if not masked:
            return [*works], {}
        clock = MaskClock(len({self._open[name].id for name in masked}))
        failed: dict[str, RequestError] = {}
        # Without a budget nothing is shared: ranks with different requests would wait for each
        # other here, before the comparison that reports the difference.
        has_budget = any(self._open[name].id in self._budgets for name in masked)
        if has_budget and not decides:
            failed = {name: RequestError(*words) for name, words in share(None).items()}
        masks = {name: self._mask(name, failed, clock if decides else None) for name in masked}
        for id, seconds in clock.seconds.items():
            if id in self._budgets:
                self._debts[id] = clock.budget(self._budgets[id]).owed(
                    self._debts.get(id, 0.0), seconds
                )
        if has_budget and decides:
            share(
                {name: (error.call, error.problem, error.instead) for name, error in failed.items()}
            )
        kept = {
            name: mask for name, mask in masks.items() if mask is not None and name not in failed
        }
        return [_with_masks(work, kept) for work in works], failed

    def _mask(
        self, name: str, failed: dict[str, RequestError], clock: MaskClock | None
    ) -> bytes | None:
        # Another request's mask may have ended this one.
        if name in failed or name not in self._masks:
            return None
        completion = self._open[name]
        begin = 0.0 if clock is None else clock.now()
        try:
            mask = compute_mask(
                completion.id, self._masks[name], completion.state.token_ids, self._vocab_size
            )
        except RequestError as error:
            failed[name] = error
            return None
        finally:
            if clock is not None:
                clock.note(completion.id, begin)
        if clock is not None and completion.id in self._budgets and completion.id in self._names:
            self._check_budget(completion, failed, clock)
        return mask

    def _check_budget(
        self, completion: _OpenCompletion, failed: dict[str, RequestError], clock: MaskClock
    ) -> None:
        """Fail all completions of a request whose masks have taken too long."""
        budget = clock.budget(self._budgets[completion.id])
        seconds = clock.seconds[completion.id]
        debt = self._debts.get(completion.id, 0.0)
        if not budget.is_exceeded(debt, seconds):
            return
        call = f"the masks of request {completion.id!r}, after {len(completion.state.token_ids)} tokens"
        problem = (
            f"its masks took {seconds:.2g} s in this step and were {debt:.2g} s over in earlier"
            f" ones; allowed: {budget.step_seconds:.2g} s a step, {budget.burst_seconds:.2g} s over"
            " in total"
        )
        instead = (
            "a grammar with fewer repetitions within repetitions, fewer completions, or fewer"
            " max_tokens"
        )
        for each in self._names[completion.id]:
            failed.setdefault(each, RequestError(call, problem, instead))

    def append_per_token(self, work: Work, result: StepResult) -> None:
        """Append what a step returned per token: the logprobs of prompts, and the stages'
        captures."""
        if work.targets:
            self._append_prompt_logprobs(work, result)
        if work.captures:
            self._append_captured(work, result)

    def _append_prompt_logprobs(self, work: Work, result: StepResult) -> None:
        """Append the logprobs of the prompts' tokens that a step computed."""
        first = 0
        for name, targets, start in zip(work.requests, work.targets, work.starts, strict=True):
            completion = self._open.get(name)
            # The job may belong to an earlier request of the same name.
            is_its = completion is not None and work.job >= completion.first_job
            if (
                completion is not None
                and is_its
                and completion.state.request.sampling.prompt_logprobs is not None
            ):
                completion.state.append_prompt_logprobs(result, first, start, len(targets))
            first += len(targets)

    def _append_captured(self, work: Work, result: StepResult) -> None:
        """Append what a step captured for each request's tokens; of a decode with drafts, for the
        accepted ones."""
        # A fast path, twice as fast, for decodes of one token each.
        if not work.token_ids and work.query_len == 1:
            for row, (name, tokens) in enumerate(zip(work.requests, result.token_ids, strict=True)):
                if (
                    tokens
                    and (completion := self._open.get(name)) is not None
                    and work.job >= completion.first_job
                ):
                    completion.state.append_captured(result.captured, row)
            return
        first = 0
        chunks = work.token_ids or ((LAST_TOKEN,),) * len(work.rows)
        for row, (name, ids, start) in enumerate(
            zip(work.requests, chunks, work.starts, strict=True)
        ):
            if work.token_ids:
                count = len(ids)
            else:
                count = work.query_len
            completion = self._open.get(name)
            if completion is not None and work.job >= completion.first_job:
                if work.token_ids:
                    kept = count
                else:
                    kept = min(count, len(result.token_ids[row]))
                goes_on = ids == (LAST_TOKEN,)
                completion.state.append_captured(
                    result.captured, first, kept, None if goes_on else start
                )
            first += count

    def append(
        self, name: str, result: StepResult, row: int, count: int, reason: str
    ) -> RequestOutput:
        """Append the first `count` tokens of a step's row to a completion; a stop text, or a token
        that cannot be decoded, ends it earlier.

        Args:
            reason: why it ends after these tokens; empty: it does not end.
        """
        completion = self._open[name]
        tokens = result.token_ids[row]
        if len(tokens) != count:
            tokens = tokens[:count]
        for index in range(count):
            try:
                stopped = completion.state.append(
                    result, row, index, is_stop=reason == "stop" and index == count - 1
                )
            except BaseException as error:
                return self.end(name, "error", tokens[: index + 1], _undecodable(completion, error))
            if stopped:
                return self.end(name, "stop", tokens[: index + 1])
        if not reason:
            return completion.output(tokens)
        if reason != "error":
            return self.end(name, reason, tokens)
        num_tokens = len(completion.state.request.prompt) + len(completion.state.token_ids)
        return self.end(name, reason, tokens, result.error(row, completion.id, num_tokens))

    def end(
        self, name: str, reason: str, tokens: list[int], error: WeftError | None = None
    ) -> RequestOutput:
        """End a completion and return its last output. If its text cannot be decoded, the reason
        becomes `error`.

        Args:
            error: if the reason is `error`, what went wrong.
        """
        completion = self._open[name]
        try:
            completion.state.end(reason)
        # A panic in tokenizers, which is Rust, is no Exception.
        except BaseException as fault:
            completion.state.reason, error = "error", error or _undecodable(completion, fault)
        self.ended[completion.state.reason] += 1
        remaining = self._names[completion.id]
        remaining.remove(name)
        if not remaining:
            del self._names[completion.id]
            self._budgets.pop(completion.id, None)
            self._debts.pop(completion.id, None)
        self._masks.pop(name, None)
        del self._open[name]
        return completion.output(tokens, completion.state.reason, error)


def _sampled(work: Work) -> Iterable[str]:
    """The names of the completions for which a step samples."""
    return itertools.compress(work.requests, work.samples)


def _with_masks(work: Work, masks: Mapping[str, bytes]) -> Work:
    """The work with the masks of the completions for which it samples."""
    sampled = {*_sampled(work)}
    of_rows = tuple(masks.get(name) if name in sampled else None for name in work.requests)
    if all(mask is None for mask in of_rows):
        return work
    return attrs.evolve(work, masks=of_rows)


def _undecodable(completion: _OpenCompletion, error: BaseException) -> RequestError:
    call = f"the text of request {completion.id!r}, of {len(completion.state.token_ids)} tokens"
    return blame(
        error, call, "a tokenizer that decodes every token of the model, or a model without one"
    )


class Streams:
    """The streams of an engine: while there are any, one task of the event loop steps the engine
    for all.

    Args:
        engine: the `Engine`; typed `Any` since its module imports this one.
        is_distributed: whether other processes run some of its stages; streams are then refused,
            since those processes cannot know when requests arrive.
    """

    def __init__(self, engine: Any, is_distributed: bool) -> None:
        self._engine = engine
        self._is_distributed = is_distributed
        self._queues: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._task: asyncio.Task[None] | None = None

    async def stream(
        self, prompt: Any, sampling: Any, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, until all of its completions have ended."""
        if self._is_distributed:
            call = "engine.stream(prompt)"
            instead = "add() on all ranks, and step() on each"
            raise ProgramError(
                call, "stages in other processes, which do not know when requests come", instead
            )
        loop = asyncio.get_running_loop()
        self._check_loop(loop)
        name = self._engine.add(prompt, sampling, **options)
        queue = self._queues[name] = asyncio.Queue()
        # The task of an event loop that has stopped never goes on, and the streams would wait for
        # it forever.
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._run())
        try:
            if sampling is None:
                left = 1
            else:
                left = sampling.n
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.finish_reason is not None
                yield item
        finally:
            del self._queues[name]
            # A consumer that stopped early: the request would otherwise hold its row and pages to
            # its end.
            if name in self._engine._outputs:
                self._engine.abort(name)

    def _check_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise EngineError if a task of another running event loop steps the engine."""
        if self._task is None or self._task.done():
            return
        other = self._task.get_loop()
        if other is not loop and other.is_running():
            problem = "an event loop, while one of another thread steps the engine for its streams"
            raise EngineError(
                "engine.stream(prompt)", problem, "streams of one event loop, or an engine for each"
            )

    def publish(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs into the queues of their streams."""
        for output in outputs:
            if (queue := self._queues.get(output.id)) is not None:
                queue.put_nowait(output)

    async def _run(self) -> None:
        """Step the engine while there are streams; an error in a step is raised in all of them."""
        try:
            while self._queues:
                self._engine.launch()
                # Poll: a blocking wait for the device would block the event loop.
                while not self._engine._is_ready():
                    await asyncio.sleep(_POLL_SECONDS)
                self.publish(self._engine.step())
                # Let the consumers take their outputs before the next step.
                await asyncio.sleep(0)
        except BaseException as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
            # The streams raise the error. A cancellation or an interrupt must also end this task.
            if not isinstance(error, Exception):
                raise
