"""`weft.generate` on the CPU: equal to transformers' greedy search, and random choices that only seeds and positions
decide."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import weft
from weft.batch import Batch
from weft.ops.sample import sample
from weft.proofs.strategies import ARCHITECTURES, ROPES
from weft.proofs.strategies.models import moe_fields
from weft.sampling import SamplingParams
from weft.stages import decoder
from weft.stages.model import DEMO
from weft.transforms.engine import engine as engine_module
from weft.transforms.engine.requests import request_seed
from weft.transforms.engine.setup import make_stepper
from weft.transforms.engine.steppers import Stepper
from weft.transforms.engine.work import Work
from weft.transforms.generate import Completion
from weft.transforms.ladder import MODES, Limits
from weft.transforms.memo import CacheInfo
from weft.transforms.runner import make_runner, make_state

# By name: a package that shows the function `generate` would hide the module of that name.
generate_module = import_module("weft.transforms.generate")

PIPELINES = (1, 2, 3)
TOLERANCE = 1e-4
"""Of logits and logprobs, absolute: what the issue promises in float32."""

CLASSES: dict[str, tuple[Any, Any]] = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


# Equal to Hugging Face


@attrs.frozen
class Case:
    """A model as transformers' fields describe it, and what is asked of it.

    Args:
        fields: of the configuration class.
        seed: of the weights and of the prompts' tokens.
        lengths: of the prompts.
        budget: tokens of a prefill batch at most.
        shift: which graph mode each pipeline size gets.
        sharded: save it in many files.
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
        return [torch.randint(0, self.fields["vocab_size"], (n,), generator=generator).tolist() for n in self.lengths]

    def build(self) -> Any:
        """The model in transformers. All its weights are random, biases and norms too, and large: so arg maxes are
        seldom near ties, and no tensor could be left out unseen."""
        config_class, model_class = CLASSES[self.architecture]
        model = model_class(config_class(**self.fields)).eval()
        if self.architecture == "Qwen3MoeForCausalLM":  # its grouped product asks for multiples of 16 bytes
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
    """What transformers makes of one prompt: tokens, why they end, and the logits [tokens, vocab_size] behind each."""

    token_ids: list[int]
    finish_reason: str
    logits: Tensor

    @property
    def gap(self) -> float:
        """By how much the best token led the second best, where that was closest."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def complete_theirs(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[Expected]:
    """transformers' own greedy search over one batch, padded on the left as its users do."""
    width = max(map(len, prompts))
    made = model.generate(
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
    rows = zip(made.sequences[:, width:].tolist(), torch.stack(made.logits, 1), strict=True)
    return [_until_the_end(tokens, logits, ends) for tokens, logits in rows]


def _until_the_end(tokens: list[int], logits: Tensor, ends: frozenset[int]) -> Expected:
    """One row without what stands behind its end, which is padding."""
    count = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return Expected(tokens[:count], "stop" if tokens[count - 1] in ends else "length", logits[:count].float())


@attrs.frozen(eq=False)
class Seen:
    """What `weft.generate` returned, the logits [tokens, vocab_size] behind each completion, and how it ran."""

    completions: list[Completion]
    logits: list[Tensor]
    works: list[Work]
    stepper: Stepper


@attrs.define(eq=False)
class Keeping:
    """A stepper that keeps what it did."""

    inner: Stepper
    steps: list[tuple[Work, Any]] = attrs.field(factory=list)

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def graphs(self) -> Any:
        return self.inner.graphs

    def capture(self) -> None:
        self.inner.capture()

    @property
    def num_under_way(self) -> int:
        return self.inner.num_under_way

    def __call__(self, works: Sequence[Work]) -> Any:
        return self._kept(self.inner(works))

    def flush(self) -> Any:
        return self._kept(self.inner.flush())

    def _kept(self, done: Any) -> Any:
        self.steps += done
        return done


def complete(model: weft.Model, prompts: Sequence[Any], *, budget: int = 2048, **options: Any) -> Seen:
    """`weft.generate` on an engine that keeps its logits, with steps of at most `budget` tokens."""
    kept: list[Keeping] = []

    def keeping_logits(*args: Any, **kwargs: Any) -> Keeping:
        kept.append(Keeping(make_stepper(*args, **kwargs, keep_logits=True)))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "make_stepper", keeping_logits)
        patch.setattr(generate_module, "MAX_NUM_TOKENS", budget)
        completions = weft.generate(model, prompts, **options)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for work, out in kept[0].steps:
        for index, (name, samples) in enumerate(zip(work.requests, work.samples, strict=True)):
            if samples:
                logits[int(name)].append(out.logits[index])
    # What was sampled ahead of knowing that a request had ended is not its own.
    behind = [torch.stack(own[: len(c.token_ids)]) for own, c in zip(logits, completions, strict=True)]
    return Seen(completions, behind, [work for work, _ in kept[0].steps], kept[0])


def assert_equal_to_theirs(seen: Seen, expected: Sequence[Expected]) -> None:
    for ours, logits, theirs in zip(seen.completions, seen.logits, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert logits.shape == theirs.logits.shape
        assert (logits - theirs.logits).abs().max() <= TOLERANCE
        chosen = theirs.logits.log_softmax(-1).gather(1, torch.tensor(theirs.token_ids)[:, None])[:, 0]
        assert (torch.tensor(ours.logprobs) - chosen).abs().max() <= TOLERANCE


@st.composite
def cases(draw: st.DrawFn, architecture: str) -> Case:
    """Any small model of the architecture, and prompts whose ends lie around the borders of pages (of 16 tokens)."""
    kv_heads, group = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4)))
    head_dim = draw(st.sampled_from((2, 4, 6, 8, 10, 14)))
    vocab_size = draw(st.sampled_from((7, 32, 65)))
    token = st.integers(0, vocab_size - 1)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": draw(st.sampled_from((8, 20))),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(st.sampled_from(ROPES)),
        "eos_token_id": draw(st.one_of(st.none(), token, st.lists(token, min_size=1, max_size=6))),
        "bos_token_id": None,
    }
    if architecture != "Qwen2ForCausalLM":
        fields["attention_bias"] = draw(st.booleans())
    if architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = draw(st.booleans())
    if architecture == "Qwen3MoeForCausalLM":
        fields |= draw(moe_fields(fields["num_hidden_layers"]))
    if architecture.startswith("Qwen3"):  # its heads need not fill the hidden size
        fields |= {"head_dim": head_dim, "hidden_size": draw(st.sampled_from((8, 12, 20)))}
    length = st.one_of(st.integers(1, 4), st.integers(11, 17), st.integers(27, 34))
    return Case(
        architecture,
        fields,
        draw(st.integers(0, 2**20)),
        draw(st.lists(length, min_size=1, max_size=4)),
        budget=draw(st.sampled_from((2048, 2048, 21))),
        shift=draw(st.sampled_from(range(len(MODES)))),
        sharded=draw(st.booleans()),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(data=st.data())
@settings(max_examples=26)
def test_any_configuration_is_equal_to_transformers(architecture: str, data: st.DataObject) -> None:
    """Drawn, saved, loaded: logits, greedy tokens, logprobs and finish reasons, each pipeline size in another mode.

    Where transformers' own two best logits lie within twice the tolerance, either may win by right: such an example
    is given up (`assume`), so what this says holds for arg maxes that are no near ties.
    """
    case = data.draw(cases(architecture))
    model = case.build()
    expected = complete_theirs(model, case.prompts(), case.max_tokens)
    assume(all(one.gap > 2 * TOLERANCE for one in expected))
    with TemporaryDirectory() as folder:
        case.save(model, folder)
        loaded = weft.load(folder, "cpu")
    for pipeline in PIPELINES[: case.fields["num_hidden_layers"]]:
        options = {"pipeline": pipeline, "graph": MODES[(pipeline + case.shift) % len(MODES)]}
        seen = complete(loaded, case.prompts(), budget=case.budget, max_tokens=case.max_tokens, **options)
        assert_equal_to_theirs(seen, expected)


SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1]}
DEFAULT, LINEAR, LLAMA3, YARN = ROPES
LENGTHS = [30, 14, 1, 17]
CHOSEN = [
    Case("LlamaForCausalLM", {**SIZES, "attention_bias": True, "rope_parameters": LLAMA3}, 2, LENGTHS),
    Case("Qwen2ForCausalLM", {**SIZES, "tie_word_embeddings": True, "rope_parameters": YARN}, 9, LENGTHS, sharded=True),
    Case("Qwen3ForCausalLM", {**SIZES, "head_dim": 10, "rope_parameters": LINEAR}, 22, LENGTHS),
    Case("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS, "head_dim": 8, "norm_topk_prob": True}, 3, LENGTHS),
]


@attrs.frozen(eq=False)
class Pair:
    """A case's model in both libraries, and transformers' completions of its prompts."""

    case: Case
    theirs: Any
    ours: weft.Model
    expected: list[Expected]


@pytest.fixture(scope="module", params=CHOSEN, ids=lambda case: str(case.architecture))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model that has learned to stop: a token that it says to prompt 1, and not to all, ends a completion."""
    case: Case = request.param
    model, folder = case.build(), tmp_path_factory.mktemp("pair")
    without_end = complete_theirs(model, case.prompts(), case.max_tokens)
    said = [set(one.token_ids) for one in without_end]
    end = next(token for token in without_end[1].token_ids[1:] if not all(token in tokens for tokens in said))
    model.generation_config.eos_token_id = [39, end]
    case.save(model, folder)
    expected = complete_theirs(model, case.prompts(), case.max_tokens)
    assert {one.finish_reason for one in expected} == {"stop", "length"}
    assert min(one.gap for one in expected) > 2 * TOLERANCE
    return Pair(case, model, weft.load(folder, "cpu"), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_split_and_mode_is_equal_to_transformers(pair: Pair, pipeline: int, mode: str) -> None:
    """Prompts of four lengths, one of which stops early; decode crosses the borders of pages at 16 and 32 tokens."""
    seen = complete(pair.ours, pair.case.prompts(), max_tokens=6, pipeline=pipeline, graph=mode)
    assert_equal_to_theirs(seen, pair.expected)


def test_prompts_alone_are_equal_to_transformers(pair: Pair) -> None:
    """One prompt a call, in both libraries: no padding on either side."""
    for prompt in pair.case.prompts():
        assert_equal_to_theirs(complete(pair.ours, [prompt], max_tokens=6), complete_theirs(pair.theirs, [prompt], 6))


@pytest.mark.parametrize("end", [None, "int", "list"])
def test_the_end_is_the_generation_configs(pair: Pair, end: str | None, tmp_path: Path) -> None:
    """With no end all completions are full; with one, and with several, ours stop where theirs do, end included."""
    second = pair.expected[0].token_ids[1]
    model = pair.case.build()
    model.generation_config.eos_token_id = {None: None, "int": second, "list": [second, 39, 0]}[end]
    pair.case.save(model, tmp_path)
    expected = complete_theirs(model, pair.case.prompts(), 6)
    assert (expected[0].finish_reason == "stop") == (end is not None)
    assert_equal_to_theirs(complete(weft.load(tmp_path, "cpu"), pair.case.prompts(), max_tokens=6), expected)


@pytest.mark.parametrize(
    ("budget", "pipeline", "mode"),
    [(4, 1, "full"), (4, 2, "full"), (7, 3, "none"), (16, 2, "full_decode_only"), (17, 1, "full")],
)
def test_prompts_longer_than_the_budget_go_in_chunks(pair: Pair, budget: int, pipeline: int, mode: str) -> None:
    """The same completions; a budget of 4 tokens makes prefill batches that graphs of mixed classes replay."""
    prompts = pair.case.prompts()
    seen = complete(pair.ours, prompts, budget=budget, max_tokens=6, pipeline=pipeline, graph=mode)
    assert_equal_to_theirs(seen, pair.expected)
    prefills = [work.num_tokens for work in seen.works if work.kind == "prompts"]
    assert sum(prefills) == sum(map(len, prompts))
    assert max(prefills) == budget
    assert len(prefills) <= sum(-(-len(prompt) // budget) for prompt in prompts), "no more than each alone"


def test_the_models_limit_ends_a_request(tmp_path: Path) -> None:
    """A request ends with `length` when prompt and completion fill max_position_embeddings; the others go on."""
    case = Case("LlamaForCausalLM", {**SIZES, "max_position_embeddings": 24}, 4, [20, 23, 3], max_tokens=8)
    model = case.build()
    case.save(model, tmp_path)
    expected = complete_theirs(model, case.prompts(), 8)
    for pipeline, mode in ((1, "full"), (2, "full_decode_only")):
        made = weft.generate(weft.load(tmp_path, "cpu"), case.prompts(), max_tokens=8, pipeline=pipeline, graph=mode)
        assert [c.token_ids for c in made] == [e.token_ids[:n] for e, n in zip(expected, (4, 1, 8), strict=True)]
        assert [c.finish_reason for c in made] == ["length"] * 3


def test_the_demo_is_equal_to_transformers_text_included() -> None:
    prompts = ["The function returns", "An", "If the argument is not a string, then"]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = complete_theirs(AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32), encoded, 12)
    assert min(one.gap for one in expected) > 2 * TOLERANCE
    seen = complete(weft.load(DEMO, "cpu", "float32"), prompts, max_tokens=12)
    assert_equal_to_theirs(seen, expected)
    texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in expected]
    assert [c.text for c in seen.completions] == texts


# Graphs replay


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> weft.Model:
    """A model of three layers and 32 positions that no token stops."""
    folder = tmp_path_factory.mktemp("endless")
    case = Case("Qwen3ForCausalLM", {**SIZES, "head_dim": 6, "max_position_embeddings": 32}, 5, [])
    case.save(case.build(), folder)
    return weft.load(folder, "cpu")


@pytest.mark.parametrize(
    ("pipeline", "mode", "lengths", "expected"),
    [
        # One prefill of more tokens than requests, eagerly; then five decodes of five requests.
        (1, "full", [5, 1, 1, 1, 1], CacheInfo(captures=1, replays=5, eager=1, currsize=1)),
        # A prefill of a token a request has a graph too, and not that of a decode.
        (1, "full", [1, 1, 1, 1, 1], CacheInfo(captures=2, replays=6, eager=0, currsize=2)),
        (1, "full_decode_only", [1, 1, 1, 1, 1], CacheInfo(captures=1, replays=5, eager=1, currsize=1)),
        # Requests end at 32 positions: decodes of 4, 3 (padded to 4), 3, 2, 2.
        (1, "full", [31, 30, 28, 5, 5], CacheInfo(captures=2, replays=5, eager=1, currsize=2)),
        # Cohorts of 3 and 2 requests. Their prefills have 7 tokens (eagerly) and 3 (with a graph).
        (2, "full", [5, 1, 1, 1, 2], CacheInfo(captures=3, replays=11, eager=1, currsize=3)),
        # Cohorts of 2, 2 and 1 requests, whose prefills have 7 tokens (eagerly), 2 and 1; two share one of decodes.
        (3, "full", [6, 1, 1, 1, 1], CacheInfo(captures=4, replays=17, eager=1, currsize=4)),
        (3, "full_decode_only", [5, 1, 1, 1, 1], CacheInfo(captures=2, replays=15, eager=3, currsize=2)),
        (1, "none", [5, 1, 1, 1, 1], None),
        (3, "none", [5, 1, 1, 1, 1], None),
    ],
)
def test_graphs_really_replay(
    endless: weft.Model,
    pipeline: int,
    mode: str,
    lengths: list[int],
    expected: CacheInfo | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures and replays by count, and the stages' Python runs for captures and eager calls only."""
    runs = _counted(monkeypatch)
    seen = complete(endless, [[7] * n for n in lengths], max_tokens=6, pipeline=pipeline, graph=mode)
    graphs = seen.stepper.graphs
    assert len(graphs) == (0 if expected is None else pipeline)
    assert [graph.cache_info() for graph in graphs] == [expected] * len(graphs)
    microbatches = 6 * pipeline * min(pipeline, len(lengths))
    warm_up = 1
    runs_of_stages = microbatches if expected is None else pipeline * (warm_up + expected.captures + expected.eager)
    assert len(runs) == runs_of_stages


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one entry whenever a stage's layers run as Python."""
    runs: list[None] = []
    layers: Callable[..., Tensor] = decoder.layers

    def counting(*args: Any) -> Tensor:
        runs.append(None)
        return layers(*args)

    monkeypatch.setattr(decoder, "layers", counting)
    return runs


# Random choices


def serve(
    model: weft.Model, prompts: Sequence[list[int]], seeds: Sequence[int], order: Sequence[int], **options: Any
) -> list[list[int]]:
    """Six tokens for each prompt at temperature 1, where row i holds prompt i and every batch names its rows in
    `order`."""
    runner = make_runner(model, Limits(len(prompts), 2048), **options)
    state = make_state(model, runner.layouts, [len(p) + 6 for p in prompts], [SamplingParams(seed=s) for s in seeds])
    batches = [Batch.ragged(order, [prompts[row] for row in order]), *(Batch.decode(order) for _ in range(5))]
    made: list[list[int]] = [[] for _ in prompts]
    for batch in batches:
        state, out = runner.step(runner.params, state, batch)
        for row, token in zip(order, out.token_ids.tolist(), strict=True):
            made[row].append(token)
    return made


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    return draw(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=18), min_size=2, max_size=4))


@given(
    prompts=prompt_lists(),
    seed=st.integers(10, 2**62),
    temperature=st.sampled_from((0.3, 1.0, 3.0)),
    shift=st.sampled_from(range(len(MODES))),
)
@settings(max_examples=6)
def test_a_seed_fixes_the_tokens_in_any_split_mode_and_company(
    endless: weft.Model, prompts: list[list[int]], seed: int, temperature: float, shift: int
) -> None:
    """Whatever runs request i, and whoever stands behind it, its stream is that of the seed and i."""
    options: dict[str, Any] = {"max_tokens": 6, "temperature": temperature}
    expected = tokens_of(weft.generate(endless, prompts, seed=seed, graph="none", **options))
    for pipeline in PIPELINES:
        mode = MODES[(pipeline + shift) % len(MODES)]
        made = tokens_of(weft.generate(endless, prompts, seed=seed, pipeline=pipeline, graph=mode, **options))
        assert made == expected
    for company in (prompts[:1], [*prompts, [1], [2, 3, 4]]):
        made = tokens_of(weft.generate(endless, company, seed=seed, **options))
        assert made[: len(prompts)] == expected[: len(made)]


@given(data=st.data(), prompts=prompt_lists(), pipeline=st.sampled_from(PIPELINES), mode=st.sampled_from(MODES))
@settings(max_examples=8)
def test_the_order_in_a_batch_and_the_row_change_no_token(
    endless: weft.Model, data: st.DataObject, prompts: list[list[int]], pipeline: int, mode: str
) -> None:
    rows = range(len(prompts))
    expected = serve(endless, prompts, rows, rows, mode="none")
    order = data.draw(st.permutations(rows))
    assert serve(endless, prompts, rows, order, num_stages=pipeline, mode=mode) == expected
    moved = serve(endless, [prompts[i] for i in order], order, rows, num_stages=pipeline, mode=mode)
    assert moved == [expected[i] for i in order]


def test_each_token_is_drawn_with_its_requests_seed_and_its_own_position(endless: weft.Model) -> None:
    """`sample` on the logits that were kept, for the seed of the row and the position of the token before."""
    prompts = [[1, 2, 3], [4], [5] * 17]
    seen = complete(endless, prompts, max_tokens=6, temperature=1.0, seed=40)
    seeds = [request_seed(40, index) for index in range(3)]
    rows = zip(prompts, seeds, seen.logits, seen.completions, strict=True)
    for prompt, seed, logits, completion in rows:
        positions = len(prompt) - 1 + torch.arange(6)
        drawn, logprobs = sample(logits, torch.ones(6), torch.full((6,), seed), positions)
        assert drawn.tolist() == completion.token_ids
        assert logprobs.tolist() == pytest.approx(completion.logprobs, abs=1e-6)


def test_seeds_differ(endless: weft.Model) -> None:
    """Equal prompts of one call draw apart from each other, another seed draws apart, and so does no seed."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "graph": "none"}
    calls = [tokens_of(weft.generate(endless, [[7]] * 8, seed=seed, **options)) for seed in (0, 100, None, None)]
    assert len({tuple(ids) for made in calls for ids in made}) == 32


def test_greedy_ignores_the_seed(endless: weft.Model) -> None:
    calls = [weft.generate(endless, [[7, 8], [9]], max_tokens=6, seed=seed) for seed in (0, 1, None)]
    assert calls[0] == calls[1] == calls[2]
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    drawn, _ = sample(logits, torch.zeros(50), torch.arange(50), torch.arange(50) * 3)
    assert torch.equal(drawn, logits.argmax(-1))


# The distribution of the samples: a chi-square test refuses a right one in 1 of 10,000 cases, and the seeds are fixed.

LOGITS = torch.tensor([1.5, -2.0, 0.0, 0.5, 3.0, -0.5, 1.0])
DRAWS = 20_000


def draw_tokens(temperature: float, seeds: Tensor, positions: Tensor) -> Tensor:
    count = len(seeds)
    return sample(LOGITS.expand(count, -1), torch.full((count,), temperature), seeds, positions)[0]


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test of counts against fully known probabilities."""
    expected = probabilities.double() * counts.sum()
    assert expected.min() >= 5, "the test needs five expected draws a cell"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2, dtype=torch.double), statistic / 2))


STREAMS = {
    "positions of one seed": (torch.full((DRAWS,), 77), torch.arange(DRAWS)),
    "seeds at one position": (torch.arange(DRAWS), torch.full((DRAWS,), 5)),
    "far seeds": (torch.arange(DRAWS) * 0x1234567 - 2**62, torch.full((DRAWS,), 0)),
    "seeds and positions together": (torch.arange(DRAWS), torch.arange(DRAWS)),
}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("stream", STREAMS)
def test_samples_are_distributed_as_softmax(stream: str, temperature: float) -> None:
    drawn = draw_tokens(temperature, *STREAMS[stream])
    counts = torch.bincount(drawn, minlength=len(LOGITS))
    assert p_value(counts, (LOGITS / temperature).softmax(-1)) > 1e-4


@pytest.mark.parametrize(
    "step", [(0, 1), (1, 0), (1, -1), (1, 1), (0, 16)], ids=lambda s: f"seed{s[0]:+}position{s[1]:+}"
)
def test_neighbours_draw_independently(step: tuple[int, int]) -> None:
    """All pairs of tokens of two neighbouring streams, against the product of their probabilities."""
    seeds, positions = torch.arange(DRAWS) // 100 * 2, torch.arange(DRAWS) % 100 * 32 + 1
    first = draw_tokens(2.0, seeds, positions)
    second = draw_tokens(2.0, seeds + step[0], positions + step[1])
    probabilities = (LOGITS / 2.0).softmax(-1)
    counts = torch.bincount(first * len(LOGITS) + second, minlength=len(LOGITS) ** 2)
    assert p_value(counts, torch.outer(probabilities, probabilities).flatten()) > 1e-4


def test_rows_of_a_batch_are_sampled_each_at_its_own_temperature() -> None:
    """Greedy and random rows side by side draw what they draw alone; logprobs are those of temperature 1."""
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0, 1e-6])
    logits, seeds, positions = LOGITS.expand(5, -1), torch.arange(5), torch.arange(5)
    tokens, logprobs = sample(logits, temperature, seeds, positions)
    alone = [
        sample(logits[i : i + 1], temperature[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0] for i in range(5)
    ]
    assert torch.equal(tokens, torch.cat(alone))
    assert tokens[[0, 2, 4]].tolist() == [4, 4, 4]
    assert torch.equal(logprobs, LOGITS.log_softmax(-1)[tokens])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-44])
def test_the_limit_of_small_temperatures_is_greedy(temperature: float) -> None:
    """However small a temperature is, up to the smallest that float32 holds."""
    drawn = draw_tokens(temperature, torch.arange(20), torch.arange(20))
    assert drawn.tolist() == [4] * 20


def test_generated_tokens_are_distributed_as_the_models_probabilities(endless: weft.Model) -> None:
    """The whole path: the first tokens of 600 equal prompts, against the softmax of one greedy run's logits."""
    [logits] = complete(endless, [[3, 1, 4]], max_tokens=1).logits
    probabilities = (logits[0] / 1.5).softmax(-1)
    made = weft.generate(endless, [[3, 1, 4]] * 600, max_tokens=1, temperature=1.5, seed=0)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in made]), minlength=len(probabilities))
    rare = probabilities * 600 < 5
    cells = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, probabilities)]
    assert p_value(*cells) > 1e-4
