"""`weft.generate` and transformers' own generation side by side, on models with drawn
configurations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from gradients import SIZES as SIZES
from theirs import CLASSES
from torch import Tensor

import weft
from weft.transforms.engine import engine as engine_module
from weft.transforms.engine.generate import Completion
from weft.transforms.engine.setup import make_executor
from weft.transforms.engine.steps.executor import Executor
from weft.transforms.engine.steps.step import Work

PIPELINES = (1, 2, 3)
# The absolute tolerance of logits and logprobs in float32, as promised in `proofs/pages/laws.md`.
TOLERANCE = 1e-4


@attrs.frozen
class Case:
    """A transformers model, and prompts to complete.

    Args:
        fields: the fields of the configuration class.
        seed: of the weights and of the prompts' tokens.
        lengths: of the prompts.
        budget: the most tokens of a prefill batch.
        shift: assigns graph modes to pipeline sizes.
        sharded: whether to save the model in many files.
    """

    architecture: str
    fields: dict[str, Any]
    seed: int
    lengths: list[int]
    max_tokens: int = 6
    budget: int = 2048
    shift: int = 0
    sharded: bool = False

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randint(0, self.fields["vocab_size"], (n,), generator=generator).tolist()
            for n in self.lengths
        ]

    def build(self) -> Any:
        """The transformers model. All weights are random and large, biases and norms too, so that
        arg maxes are seldom near ties, and leaving out any tensor shows."""
        config_class, model_class = CLASSES[self.architecture]
        model = model_class(config_class(**self.fields)).eval()
        if (
            self.architecture == "Qwen3MoeForCausalLM"
        ):  # its grouped product asks for multiples of 16 bytes
            model.set_experts_implementation("eager")
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
        return model

    def save(self, model: Any, folder: str | Path) -> None:
        model.save_pretrained(folder, max_shard_size="6KB" if self.sharded else "1GB")


@attrs.frozen(eq=False)
class Expected:
    """transformers' completion of one prompt: tokens, finish reason, and the logits [tokens,
    vocab_size] of each."""

    token_ids: list[int]
    finish_reason: str
    logits: Tensor

    @property
    def gap(self) -> float:
        """The smallest lead of the best token over the second best."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def complete_theirs(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[Expected]:
    """transformers' own greedy search over one batch, padded on the left as its users do it."""
    width = max(map(len, prompts))
    generated = model.generate(
        input_ids=torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        do_sample=False,
        max_new_tokens=max_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    eos = model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
    rows = zip(
        generated.sequences[:, width:].tolist(), torch.stack(generated.logits, 1), strict=True
    )
    return [_until_the_end(tokens, logits, ends) for tokens, logits in rows]


def _until_the_end(tokens: list[int], logits: Tensor, ends: frozenset[int]) -> Expected:
    """One row without the padding after its end."""
    count = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return Expected(
        tokens[:count], "stop" if tokens[count - 1] in ends else "length", logits[:count].float()
    )


@attrs.frozen(eq=False)
class Seen:
    """The completions of `weft.generate`, the logits [tokens, vocab_size] of each, and the executor
    that ran it."""

    completions: list[Completion]
    logits: list[Tensor]
    works: list[Work]
    executor: Executor


@attrs.define(eq=False)
class Keeping:
    """An executor that records its steps."""

    inner: Executor
    steps: list[tuple[Work, Any]] = attrs.field(factory=list)

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def classes(self) -> Any:
        return self.inner.classes

    @property
    def graphs(self) -> Any:
        return self.inner.graphs

    def examples(self) -> Any:
        return self.inner.examples()

    def placed(self) -> Any:
        return self.inner.placed()

    @property
    def num_running(self) -> int:
        return self.inner.num_running

    def __call__(self, works: Sequence[Work]) -> Any:
        return self._kept(self.inner(works))

    def flush(self) -> Any:
        return self._kept(self.inner.flush())

    def received(self, done: Any, /) -> Any:
        return self.inner.received(done)

    def _kept(self, done: Any) -> Any:
        self.steps += done
        return done


def complete(
    model: weft.Model, prompts: Sequence[Any], *, budget: int = 2048, **options: Any
) -> Seen:
    """`weft.generate` on an engine that keeps its logits, with steps of at most `budget` tokens."""
    kept: list[Keeping] = []

    def keeping_logits(*args: Any, **kwargs: Any) -> Keeping:
        kept.append(Keeping(make_executor(*args, **kwargs, keep_logits=True)))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "make_executor", keeping_logits)
        patch.setattr("weft.transforms.engine.options._num_tokens", lambda _: budget)
        completions = weft.generate(model, prompts, **options)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for work, out in kept[0].steps:
        for index, (name, samples) in enumerate(zip(work.requests, work.samples, strict=True)):
            if samples:
                logits[int(name)].append(out.logits[index])
    # Tokens sampled before the host knew that the request had ended do not belong to it.
    behind = [
        torch.stack(request_logits[: len(c.token_ids)])
        for request_logits, c in zip(logits, completions, strict=True)
    ]
    return Seen(completions, behind, [work for work, _ in kept[0].steps], kept[0])


def assert_equal_to_theirs(result: Seen, expected: Sequence[Expected]) -> None:
    for ours, logits, theirs in zip(result.completions, result.logits, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert logits.shape == theirs.logits.shape
        assert (logits - theirs.logits).abs().max() <= TOLERANCE
        chosen = theirs.logits.log_softmax(-1).gather(1, torch.tensor(theirs.token_ids)[:, None])[
            :, 0
        ]
        assert (torch.tensor(ours.logprobs) - chosen).abs().max() <= TOLERANCE
