"""Random small models, and sequences of batches that their state can serve."""

from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.batches.state import State, admit
from weft.ops.requests import LAST_TOKEN
from weft.proofs._strategies.engine.adapters import hold_adapters, slots
from weft.proofs._strategies.engine.embeds import images, with_mrope
from weft.proofs._strategies.sampling import sampling_params
from weft.stages import architectures
from weft.stages.config import ModelConfig, parse_config
from weft.stages.decoder import decoder_stage
from weft.stages.layout import StageLayout, empty_states, split_layers
from weft.stages.params import slice_params
from weft.stages.random_weights import random_params
from weft.transforms.engine.requests.prompts import PromptContent, ids_of, read_content
from weft.transforms.engine.steps.step import batch_embeds, batch_positions
from weft.values.trees import tree_map

ARCHITECTURES = tuple(
    name for name, spec in architectures.ARCHITECTURES.items() if not spec.text_types
)
"""The names of all text-only architectures."""


@st.composite
def configs(draw: st.DrawFn, min_layers: int = 1, max_layers: int = 3) -> ModelConfig:
    """Small decoders of every text architecture, with any ratio of grouped queries, any rope
    scaling, and tied or untied embeddings.

    Args:
        min_layers, max_layers: the least and the most layers.
    """
    architecture = draw(st.sampled_from(ARCHITECTURES))
    spec = architectures.ARCHITECTURES[architecture]
    kv_heads = draw(st.sampled_from((1, 2)))
    # Even, because rope rotates pairs; 6 is no power of two.
    head_dim = draw(st.sampled_from((4, 6, 8)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3)))
    raw: dict[str, Any] = {
        "architectures": [architecture],
        # At least 11, the number of token ids that `weft.proofs.serving` makes up tokens from.
        "vocab_size": draw(st.sampled_from((11, 32))),
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.sampled_from((8, 20))),
        "num_hidden_layers": draw(st.integers(min_layers, max_layers)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from(ROPES)),
    }
    # The default is a number, too large for these models. Other architectures derive it from the
    # hidden size.
    if spec.defaults["head_dim"] is not None:
        raw["head_dim"] = head_dim
    if spec.experts:
        raw |= draw(st.sampled_from(EXPERTS))
    if "attention_bias" not in spec.neutral_at:
        raw["attention_bias"] = draw(st.booleans())
    if spec.windows and not spec.window_switch:
        raw["sliding_window"] = draw(st.sampled_from((3, 1, 7, None)))
    return parse_config(raw, source="a drawn configuration")


@st.composite
def moe_fields(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    """Configuration fields of a Qwen3-MoE with 1 to 6 experts, in which some layers may have
    none."""
    num_experts = draw(st.integers(1, 6))
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "moe_intermediate_size": draw(st.sampled_from((4, 10))),
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.sampled_from((1, 1, 2))),
        "mlp_only_layers": draw(st.lists(st.integers(0, num_layers - 1), max_size=1)),
    }


@st.composite
def window_fields(draw: st.DrawFn, architecture: str, num_layers: int) -> dict[str, Any]:
    """Configuration fields of sliding-window attention in all layers, some, or none, for an
    architecture that supports it."""
    spec = architectures.ARCHITECTURES[architecture]
    # Not 1: transformers' cache (5.23) keeps `keys[-(window - 1):]`, which for 1 is all of them.
    fields: dict[str, Any] = {"sliding_window": draw(st.sampled_from((3, 2, 7, 20, None)))}
    if spec.window_switch:
        fields["use_sliding_window"] = draw(st.booleans())
    if spec.windows == "some":
        fields["max_window_layers"] = draw(st.integers(0, num_layers))
    return fields


# Experts in all layers, in every other one, and in all but one.
EXPERTS = (
    {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
    {
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 10,
        "decoder_sparse_step": 2,
    },
    {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 4,
        "mlp_only_layers": [1],
    },
)


ROPES = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        # Small, so that both ends of the scaling apply: the first wavelength (6.3) is below 32 / 4
        # and is kept, the next (over 160) is above 32 / 1 and is stretched.
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)


@attrs.frozen
class Move:
    """One step's work on one row: `prompt_tokens` tokens of the prompt, or one decode token if that
    is 0."""

    row: int
    prompt_tokens: int


@attrs.frozen(eq=False, repr=False)
class Scenario:
    """A random model and a sequence of batches that its state can serve, one after another.

    Args:
        config: the model's configuration.
        prompts: token ids, one prompt per row.
        moves: for each step, its work on each of its rows; no row twice.
        uniform: for each step, whether it is declared a uniform decode (only true for all-decode
            steps).
        page_size: the page size of the state.
        sampling: the parameters of each row's request.
        seed: the seed of the weights.
        loras: for each step, a number of active LoRAs for its descriptor, which is raised to the
            number that its rows use. Empty: exactly that number.
        adapters: for each row, the slot of its adapter, or -1 for none. Empty: the model has no
            adapters.
        prompt_contents: for each row, the prompt's parts besides token ids. Empty: the model has no
            mRoPE.
    """

    config: ModelConfig
    prompts: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[Move, ...], ...]
    uniform: tuple[bool, ...]
    page_size: int
    sampling: tuple[SamplingParams, ...]
    seed: int
    loras: tuple[int, ...] = ()
    adapters: tuple[int, ...] = ()
    prompt_contents: tuple[PromptContent, ...] = ()

    def __repr__(self) -> str:
        steps = [[(m.row, m.prompt_tokens) for m in step] for step in self.moves]
        return (
            f"Scenario({self.config.architecture}, {self.config.num_layers} layers,"
            f" prompts={self.prompts}, (row, prompt tokens) a step={steps}, uniform={self.uniform},"
            f" page_size={self.page_size}, sampling={self.sampling}"
            + (
                f", {moe}"
                if (moe := self.config.moe) is not None and moe.sharing is not None
                else ""
            )
            + (f", LoRAs a step={self.loras}" if self.loras else "")
            + (f", adapters={self.adapters}" if self.adapters else "")
            + (
                f", contents={[one.contents for one in self.prompt_contents]})"
                if self.prompt_contents
                else ")"
            )
        )

    def batches(self, device: torch.device | str = "cpu") -> list[Batch]:
        """The batch of each step."""
        done = [0] * len(self.prompts)
        batches = []
        for step, uniform in zip(self.moves, self.uniform, strict=True):
            tokens = []
            samples = []
            contents = [self.prompt_contents[m.row] for m in step if self.prompt_contents]
            starts = [done[m.row] for m in step]
            for move in step:
                chunk = self.prompts[move.row][done[move.row] : done[move.row] + move.prompt_tokens]
                tokens.append(chunk or (LAST_TOKEN,))
                done[move.row] += len(chunk)
                samples.append(done[move.row] == len(self.prompts[move.row]))
            rows = [move.row for move in step]
            batches.append(
                Batch.decode(rows, device=device)
                if uniform
                else Batch.ragged(
                    rows,
                    tokens,
                    samples=samples,
                    inputs_embeds=batch_embeds(contents, starts, tokens, device)
                    if contents
                    else None,
                    positions=batch_positions(contents, starts, tokens, device)
                    if contents
                    else None,
                    device=device,
                )
            )
        for index, step in enumerate(self.moves):
            if self.adapters:
                num_adapters = len({self.adapters[move.row] for move in step} - {-1})
            else:
                num_adapters = 0
            told = max(num_adapters, self.loras[index] if self.loras else 0)
            descriptor = attrs.evolve(batches[index].descriptor, num_active_loras=told)
            batches[index] = attrs.evolve(batches[index], descriptor=descriptor)
        return batches

    def _layouts(self, num_stages: int) -> tuple[StageLayout, ...]:
        return split_layers(self.config.num_layers, num_stages)

    def stages(self, num_stages: int, device: torch.device | str = "cpu") -> list[Any]:
        """The model's stages on a device, which return their logits."""
        layouts = self._layouts(num_stages)
        return [
            decoder_stage(self.config, layout, keep_logits=True, device=device)
            for layout in layouts
        ]

    def params(self, num_stages: int, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """The weights of each stage, with standard deviation 0.3 so that differences show."""
        # Drawn on the CPU, so that they are the same on every device.
        (whole,) = self._layouts(1)
        params = random_params(
            self.config, whole, seed=self.seed, device="cpu", dtype=torch.float32, std=0.3
        )
        params = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, params)
        stages = [
            (slice_params(params, layout), self.config, layout)
            for layout in self._layouts(num_stages)
        ]
        return tuple(
            hold_adapters(*stage, self.seed) if self.adapters else stage[0] for stage in stages
        )

    def state(
        self, num_stages: int, device: torch.device | str = "cpu", poison: float = 0.0
    ) -> tuple[State, ...]:
        """A fresh state for each stage, with the prompts admitted and `poison` in unwritten
        pages."""
        decodes = sum(1 for step in self.moves for move in step if move.prompt_tokens == 0)
        # Room for all decodes in any row: scarce pages are the subject of the engine's laws.
        pages = [-(-(len(p) + decodes) // self.page_size) for p in self.prompts]
        ends = [sum(pages[: i + 1]) for i in range(len(pages))]
        rows = range(len(self.prompts))
        page_ranges = [range(end - n, end) for end, n in zip(ends, pages, strict=True)]
        states = empty_states(
            self.config,
            self._layouts(num_stages),
            max_num_reqs=len(self.prompts),
            num_pages=ends[-1],
            max_pages=max(pages),
            page_size=self.page_size,
            # As many as `sampling_params` draws at most.
            max_biased=4,
            device=device,
        )

        def one(empty: State) -> State:
            # NaN shows a read of a page that nobody wrote; zeros might pass for masked values.
            empty.kv_pages.fill_(poison)
            deltas = [one.delta for one in self.prompt_contents] or None
            return admit(
                empty,
                rows,
                page_ranges,
                self.sampling,
                self.prompts,
                adapters=self.adapters or None,
                mrope_position_deltas=deltas,
            )

        return tuple(map(one, states))


@st.composite
def scenarios(
    draw: st.DrawFn,
    min_layers: int = 1,
    max_layers: int = 3,
    max_steps: int = 5,
    loras: bool = False,
    sampled: bool = False,
    mrope: bool = False,
) -> Scenario:
    """A model, 1 to 4 prompts, and up to `max_steps` steps that mix chunks of prompts and decodes.

    Args:
        min_layers, max_layers: the least and the most layers of the model.
        max_steps: the most steps.
        loras: whether the numbers of active LoRAs vary.
        sampled: whether no request is greedy.
        mrope: whether each prompt has positions, and some have an image.
    """
    config = draw(configs(min_layers, max_layers))
    config = with_mrope(config) if mrope else config
    token = st.integers(0, config.vocab_size - 1)
    # 1 is drawn more often: a prompt of one token has the shape of a decode.
    length = st.sampled_from((1, 1, 2, 3, 5, 9))
    prompt = length.flatmap(lambda n: st.lists(token, min_size=n, max_size=n))
    prompts = draw(st.lists(prompt, min_size=1, max_size=4))
    done = [0] * len(prompts)
    moves: list[tuple[Move, ...]] = []
    uniform: list[bool] = []
    for _ in range(draw(st.integers(1, max_steps))):
        rows = draw(st.lists(st.sampled_from(range(len(prompts))), min_size=1, unique=True))
        step = []
        for row in rows:
            left = len(prompts[row]) - done[row]
            if left:
                # Chunks of one token are frequent, because they have the shape of a decode.
                taken = draw(st.one_of(st.just(1), st.integers(1, left)))
            else:
                taken = 0
            done[row] += taken
            step.append(Move(row, taken))
        moves.append(tuple(step))
        # A one-token prefill has the shape of a decode, so the batch must declare which it is.
        uniform.append(all(move.prompt_tokens == 0 for move in step) and draw(st.booleans()))
    if mrope:
        strategies = [
            images(tuple(prompt), config.hidden_size, row) for row, prompt in enumerate(prompts)
        ]
    else:
        strategies = []
    drawn_images = [draw(image) for image in strategies]
    return Scenario(
        config,
        tuple(tuple(ids_of(image)) for image in drawn_images) or tuple(map(tuple, prompts)),
        tuple(moves),
        tuple(uniform),
        # The longest prompt spans five pages of 2 tokens, and lies within one of 16.
        draw(st.sampled_from((2, 4, 16))),
        tuple(draw(sampling_params(config.vocab_size, greedy=not sampled)) for _ in prompts),
        draw(st.integers(0, 999)),
        tuple(draw(st.integers(0, 2)) for _ in moves) if loras else (),
        # New draws go to the end: stored cases of planted bugs replay choices in order.
        draw(slots(len(prompts))),
        tuple(map(read_content, drawn_images)),
    )
