"""`Engine`: requests in, tokens out. Device work is pure steps, host work a pure scheduler; this drives the two."""

import math
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import attrs

from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.stages.adapters import Adapter
from weft.stages.model import Model
from weft.transforms.engine.reading import Reading, Told
from weft.transforms.engine.requests import Request, request_seed
from weft.transforms.engine.scheduler import Budget, HostState, add, finish, observe, schedule
from weft.transforms.engine.setup import EngineLimits, check_sampling, encode_prompt, make_stepper
from weft.transforms.engine.tracking import Track
from weft.transforms.engine.work import Work
from weft.transforms.transports import Transport
from weft.transforms.transports.local import Local


@attrs.frozen(eq=False)
class RequestOutput:
    """What a request got in a step of the engine.

    Args:
        id: whose.
        token_ids: the new tokens.
        text: the new text; None where the checkpoint has no tokenizer.
        finish_reason: None: it goes on. `stop` (a token or a text that ends it), `length`, `abort`, or `error`.
        track: all that it has said so far.
    """

    id: str
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    track: Track


@attrs.define
class Stats:
    """What the engine has done: steps by kind, their tokens, requests that ended by reason, tokens shared by prefix."""

    decodes: int = 0
    prefills: int = 0
    tokens: int = 0
    preempted: int = 0
    ended: dict[str, int] = attrs.field(factory=dict)


class Engine:
    """Continuous batching of a model: requests come and go at any time.

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
    ) -> None:
        self.model = model
        self.transport = transport or Local()
        self.run_ahead = run_ahead
        self.num_logprobs = num_logprobs
        self.limits = (limits or EngineLimits()).resolve(model, pipeline)
        self.budget: Budget = self.limits.budget
        self.stats = Stats()
        self._seed = self.transport.share(secrets.randbits(62)) if seed is None else seed
        self._host = HostState.empty(self.budget, self.limits.num_pages, self.limits.page_size)
        named = dict(adapters or {})
        self._slots = {name: slot for slot, name in enumerate(named)}
        self._stepper = make_stepper(
            model, self.limits, pipeline, graph, self.transport, num_logprobs, backend, [*named.values()]
        )
        self._tracks: dict[str, Track] = {}
        self._shown: dict[str, int] = {}
        self._pending: deque[Reading] = deque()
        self._count = 0

    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int,
        id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> str:
        """A request arrives; its tokens come with the next `step()`s.

        Args:
            prompt: a string or token ids.
            sampling: how its tokens are chosen, and what ends it; None: greedy.
            max_tokens: tokens to generate at most; the model's own limit on positions may end it sooner.
            id: a name that no request under way has; None: one is made.
            priority: the lower goes first; among equals who came first.
            adapter: the name of its LoRA adapter, one of the engine's; None: the model alone.

        Returns:
            The id.

        Raises:
            RequestError: it could never be served.
        """
        name = f"request {self._count}" if id is None else id
        given = SamplingParams(temperature=0.0) if sampling is None else sampling
        call = f"engine.add(prompt, {given!r}, max_tokens={max_tokens!r}, id={name!r})"
        check_sampling(call, self.model, given, self.num_logprobs)
        ids = encode_prompt(self.model, prompt, call)
        params = given.for_request(self.model.config.eos_token_ids, request_seed(self._seed, self._count))
        most = min(max_tokens, self.model.config.max_position_embeddings - len(ids))
        if adapter is not None and adapter not in self._slots:
            known = ", ".join(map(repr, self._slots)) or "none: Engine(..., adapters={name: weft.load_adapter(...)})"
            raise RequestError(call, f"adapter={adapter!r}", f"one of the engine's: {known}")
        slot = -1 if adapter is None else self._slots[adapter]
        request = Request(name, tuple(ids), most, params, priority, slot)
        self._host = add(self._host, request, self.budget)
        self._tracks[name] = Track(request, self.model.tokenizer)
        self._shown[name] = 0
        self._count += 1
        return name

    def abort(self, id: str) -> RequestOutput:
        """End a request.

        Raises:
            RequestError: no request of that id is under way.
        """
        self._host = finish(self._host, id, "abort")
        return self._end(id, "abort", [])

    @property
    def num_unfinished(self) -> int:
        """Requests under way."""
        return len(self._tracks)

    def step(self) -> list[RequestOutput]:
        """Launch work as far ahead as is allowed, and read the oldest.

        Returns:
            What requests got; empty where nothing was to be read.
        """
        while len(self._pending) <= self.run_ahead and self._launch():
            pass
        return self._read(self._pending.popleft()) if self._pending else []

    def __iter__(self) -> Iterator[RequestOutput]:
        """Step until no request is left."""
        while self._tracks or self._pending:
            yield from self.step()

    def _launch(self) -> bool:
        """Schedule a step of every cohort, and start it; False where there is nothing to do."""
        works: list[Work] = []
        for _ in range(self.budget.num_cohorts):
            self._host, more = schedule(self._host, self.budget)
            works += more
        if works:
            self._pending.append(Reading(works, self._stepper(works)))
        return bool(works)

    def _read(self, reading: Reading) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for work, told in reading.wait():
            self.stats.decodes += not work.token_ids
            self.stats.prefills += bool(work.token_ids)
            self.stats.tokens += work.num_tokens
            if told is not None:
                self._take_prompts(work, told)
                for found in self._take(work, told):
                    before = outputs.get(found.id)
                    outputs[found.id] = found if before is None else _joined(before, found)
        return list(outputs.values())

    def _take_prompts(self, work: Work, told: Told) -> None:
        first = 0
        for name, targets, start in zip(work.requests, work.targets, work.starts, strict=False):
            track = self._tracks.get(name)
            if track is not None and track.request.sampling.prompt_logprobs is not None:
                track.take_prompt(told, first, start, len(targets))
            first += len(targets)

    def _take(self, work: Work, told: Told) -> Iterator[RequestOutput]:
        self._host, got = observe(self._host, work.job, told.token_ids)
        for row, running in got:
            name, reason = running.request.id, running.reason
            track = self._tracks[name]
            stopped, wrong = track.take(told, row), math.isnan(told.logprobs[row])
            if (stopped or wrong) and not reason:
                self._host = finish(self._host, name, "stop" if stopped else "error")
            reason = "error" if wrong else "stop" if stopped else reason
            token = [told.token_ids[row]]
            yield self._end(name, reason, token) if reason else self._output(name, None, token)

    def _end(self, name: str, reason: str, tokens: list[int]) -> RequestOutput:
        self._tracks[name].end(reason)
        output = self._output(name, reason, tokens)
        del self._tracks[name], self._shown[name]
        self.stats.ended[reason] = self.stats.ended.get(reason, 0) + 1
        return output

    def _output(self, name: str, reason: str | None, tokens: list[int]) -> RequestOutput:
        track = self._tracks[name]
        text = None if track.tokenizer is None else track.text[self._shown[name] :]
        self._shown[name] = len(track.text)
        return RequestOutput(name, tokens, text, reason, track)


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    text = None if second.text is None else f"{first.text or ''}{second.text}"
    return attrs.evolve(second, token_ids=[*first.token_ids, *second.token_ids], text=text)
