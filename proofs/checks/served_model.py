"""`ServedModel`: a model that engines serve, and an oracle for the tokens of its completions."""

from collections.abc import Callable, Sequence

import attrs

from weft.batches.sampling import SamplingParams
from weft.proofs._laws.engine.completions import complete
from weft.stages.adapters.adapter import Adapter
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.requests.host_state import sample_seeds
from weft.transforms.engine.requests.masks import Mask


@attrs.frozen(eq=False)
class CompletionRequest:
    """One completion, whose tokens the oracle returns.

    Args:
        prompt: token ids.
        sampling: the sampling parameters, with `n=1` and the completion's own seed.
        max_tokens: the most tokens to generate.
        adapter: the name of the LoRA adapter; None: the model alone.
        mask: allows some tokens at each position; None: all are allowed.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    adapter: str | None
    mask: Mask | None


Oracle = Callable[[CompletionRequest], Sequence[int] | None]


@attrs.frozen
class CompletionKey:
    """Identifies a completion by indices into the lists of a `ServedModel`."""

    prompt: int
    sampling: int
    sample: int
    adapter: str | None
    mask: int | None


@attrs.frozen(eq=False, kw_only=True)
class ServedModel:
    """The model, its oracle, and everything that examples choose from."""

    model: Model
    expected: Oracle | None
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    masks: tuple[Mask, ...]
    adapters: dict[str, Adapter]
    speculation: tuple[Speculation, ...]
    graph: str
    pipeline: int
    max_tokens: int
    _expected_tokens: dict[CompletionKey, list[int]] = attrs.field(factory=dict, init=False)
    _engines: dict[bool, Engine] = attrs.field(factory=dict, init=False)

    @property
    def max_model_len(self) -> int:
        return max(map(len, self.prompts)) + self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return max(
            max(params.logprobs or 0, params.prompt_logprobs or 0) for params in self.sampling
        )

    def mask(self, place: int | None) -> Mask | None:
        if place is None:
            return None
        return self.masks[place]

    def tokens(self, key: CompletionKey) -> list[int]:
        """All tokens of a completion, from the oracle; without its answer, from the model alone."""
        if key not in self._expected_tokens:
            params = self.sampling[key.sampling]
            # Each of the `n` completions has its own seed, so that it can be computed alone.
            sampling = attrs.evolve(
                params, n=1, seed=sample_seeds(params.seed or 0, params.n)[key.sample]
            )
            prompt = self.prompts[key.prompt]
            mask = self.mask(key.mask)
            request = CompletionRequest(prompt, sampling, self.max_tokens, key.adapter, mask)
            if self.expected is None:
                said = None
            else:
                said = self.expected(request)
            self._expected_tokens[key] = (
                self._alone(request) if said is None else [int(token) for token in said]
            )
        return self._expected_tokens[key]

    def _alone(self, request: CompletionRequest) -> list[int]:
        is_adapted = request.adapter is not None
        if is_adapted not in self._engines:
            most = self.max_model_len
            # The reference is the simplest engine: one request, read whole, eager, no run-ahead.
            limits = EngineLimits(max_num_reqs=1, max_num_tokens=most, max_model_len=most)
            limits = attrs.evolve(limits, num_pages=-(-most // limits.page_size))
            if is_adapted:
                named = self.adapters
            else:
                named = None
            self._engines[is_adapted] = Engine(
                self.model, limits, graph="none", run_ahead=0, adapters=named
            )
        sampling = attrs.evolve(request.sampling, logprobs=None, prompt_logprobs=None)
        engine = self._engines[is_adapted]
        return complete(
            engine, request.prompt, sampling, request.max_tokens, request.adapter, request.mask
        ).token_ids
