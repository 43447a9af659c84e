"""What an engine is made of: its limits, resolved against a model and a device; its steps; the checks of requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments import is_int, kind_of, names_arguments
from weft.descriptor import BatchDescriptor
from weft.effects import Schema
from weft.equivalents import LIMITS
from weft.errors import RequestError
from weft.outputs import IntermediateTensors
from weft.stages.adapters import Adapter, stage_params
from weft.stages.decoder import decoder_stage, empty_states
from weft.stages.layout import StageLayout, split_model
from weft.stages.model import Model
from weft.state import State, advance
from weft.transforms.engine.host import Budget
from weft.transforms.engine.intake import is_count
from weft.transforms.engine.runner import graph_step
from weft.transforms.engine.speculation import Speculation
from weft.transforms.engine.steppers import Stepped, Stepper, Streamed
from weft.transforms.engine.weights import Weights
from weft.transforms.engine.work import advance_work, edited
from weft.transforms.graphs.ladder import MODES, Ladder, Limits, lora_rungs, make_ladder
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.pipeline_checks import wrong_transport
from weft.transforms.pipelines.transports import Transport
from weft.trees import tree_leaves, tree_map

_MEMORY_SHARE = 0.85
"""Of a GPU's free memory, for the KV cache and graphs; temporaries get the rest."""
_PLENTY = 0.25
"""Of that memory: graphs are not estimated beside a cache of less, which leaves them most of it."""
_MARGIN = 1.25
"""Of the graphs' estimate, which is interpolated: with a draft model, whose classes differ in more than their size,
graphs were found to take up to a fifth more."""
_CPU_BYTES = 2**30
"""Of the KV cache on a CPU, at most."""
_MAX_CONTEXT = 4096


@names_arguments(**LIMITS)
@attrs.frozen(kw_only=True)
class EngineLimits:
    """What an engine holds at most.

    Args:
        max_num_reqs: requests under way at once.
        max_num_tokens: tokens of a step.
        max_model_len: tokens of a request, those to generate included, up to the end of their last page; None: what the
            model has positions for, at most 4,096.
        page_size: tokens a page.
        num_pages: of the KV cache; None: what memory there is beside the graphs, which are estimated where it is short
            (`Graphified.memory_estimate`), and no more than all rows could fill.
        num_cohorts: groups of requests that are stepped in turn; None: one a stage.
        mixed: whether decodes share a step with prompts, where there are some to be read: what bounds either then
            bounds both, once. Without it they take turns, and decodes stay uniform: the best for those that decode.

    Raises:
        RequestError: a number that is none, or below 1.
    """

    max_num_reqs: int = 64
    max_num_tokens: int = 2048
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    num_cohorts: int | None = None
    mixed: bool = True

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(EngineLimits):
            value = getattr(self, field.name)
            call, seen = f"weft.EngineLimits({field.name}={value!r})", f"{field.name}={value!r}"
            if field.name == "mixed" and not isinstance(value, bool):
                raise RequestError(call, seen, "True or False")
            if field.name != "mixed" and not is_count(value) and (value is not None or field.default is not None):
                instead = "a whole number >= 1" + (", or None" if field.default is None else "")
                raise RequestError(call, seen, instead)

    def resolve(
        self,
        model: Model,
        num_stages: int,
        transport: Transport,
        speculation: Speculation | None = None,
        stepper: Callable[["Resolved"], Stepper] | None = None,
    ) -> "Resolved":
        """These, for a model on its device; the same on every rank.

        Args:
            stepper: makes what would step under such limits, whose graphs' memory pages leave alone; None: nothing.

        Raises:
            RequestError: no room for a request.
        """
        length = self.max_model_len or min(model.config.max_position_embeddings, _MAX_CONTEXT)
        max_pages = -(-length // self.page_size)
        lens = (1,) if speculation is None else speculation.query_lens
        cohorts = self.num_cohorts or num_stages
        if self.max_num_tokens < (least := -(-self.max_num_reqs // cohorts)):
            seen = f"max_num_tokens={self.max_num_tokens}, where a step may be of {least} requests"
            raise RequestError("weft.EngineLimits(...)", seen, f"max_num_tokens={least} or more, or fewer requests")
        budget = Budget(self.max_num_reqs, self.max_num_tokens, max_pages, cohorts, self.mixed, lens)
        most = max_pages * self.max_num_reqs
        small = Resolved(budget, 1, self.page_size, speculation)
        if self.num_pages is not None:
            return attrs.evolve(small, num_pages=transport.share(self.num_pages))
        every = split_model(model.config, num_stages)
        here = [every[rank] for rank in transport.ranks(num_stages)]
        drafts = 0 if speculation is None or not here[0].first else speculation.page_bytes(self.page_size)
        page = _page_bytes(model, here, self.page_size) + drafts
        fitting = _fitting_pages(model.device, page, most, lambda: _bytes_beside(stepper and stepper(small)))
        return attrs.evolve(small, num_pages=min(most, *transport.collect(fitting)))


@attrs.frozen
class Resolved:
    """Limits in numbers."""

    budget: Budget
    num_pages: int
    page_size: int
    speculation: Speculation | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What all ranks must say alike: the draft model is the first rank's, and the others know its configuration."""
        budget, own = attrs.asdict(self.budget, recurse=False), self.speculation
        drafts = None if own is None else (own.num_tokens, own.ngram, getattr(own.model, "config", own.model))
        return {**budget, "num_pages": self.num_pages, "page_size": self.page_size, "speculation": drafts}


def _page_bytes(model: Model, here: Sequence[StageLayout], page_size: int) -> int:
    config = model.config
    layers = sum(len(layout.layers) for layout in here)
    return 2 * layers * page_size * config.num_kv_heads * config.head_dim * model.dtype.itemsize


def _fitting_pages(device: torch.device, page: int, most: int, beside: Callable[[], int]) -> int:
    """Pages of so many bytes that there is memory for, and for what is `beside` them; at least one."""
    free = free_bytes(device)
    if free is None:
        return max(1, _CPU_BYTES // page)
    if page * most <= _PLENTY * free:
        return most
    reserved = beside()
    return max(1, int(_MEMORY_SHARE * (free_bytes(device) or 0) - reserved) // page)


def free_bytes(device: torch.device) -> int | None:
    """The memory of a GPU that nobody has; None of a CPU, of whose an engine takes a fixed part."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()  # what dropped tensors and graphs had
    return torch.cuda.mem_get_info(device)[0]


def _bytes_beside(stepper: Stepper | None) -> int:
    """What a stepper takes beside pages: its tables, and its graphs once they are captured."""
    if stepper is None:
        return 0
    tables = sum(x.nbytes for x in tree_leaves(stepper.state) if isinstance(x, Tensor))
    return tables + int(_MARGIN * sum(estimate.total_bytes for estimate in stepper.memory_estimates()))


def engine_ladder(graph: str, budget: Budget, num_adapters: int) -> Ladder[BatchDescriptor]:
    """The classes of an engine, of one cohort's steps."""
    loras = lora_rungs(min(num_adapters, budget.cohort_size))
    return make_ladder(graph, Limits(budget.cohort_size, budget.max_num_tokens, budget.query_lens, loras))


def make_states(model: Model, layouts: Sequence[StageLayout], limits: Resolved) -> tuple[State, ...]:
    """An empty state for each stage that runs here."""
    speculation = limits.speculation
    spare = 0 if speculation is None else speculation.spare_pages(limits.page_size)
    states = empty_states(
        model.config,
        layouts,
        max_num_reqs=limits.budget.max_num_reqs,
        num_pages=limits.num_pages,
        max_pages=limits.budget.max_pages + spare,
        page_size=limits.page_size,
        dtype=model.dtype,
        device=model.device,
    )
    return states if speculation is None else speculation.states(states, layouts)


def make_weights(
    model: Model,
    num_stages: int,
    transport: Transport,
    adapters: Mapping[str, Adapter],
    speculation: Speculation | None,
) -> Weights:
    """The parameters of the stages that run here, with the adapters in slots, in this order."""
    every = split_model(model.config, num_stages)
    layouts = [every[rank] for rank in transport.ranks(num_stages)]
    params = stage_params(model, layouts, [*adapters.values()])
    drafts = None if speculation is None or not layouts[0].first else speculation.params
    stages = tuple(zip(layouts, params, strict=True))
    return Weights(model, stages, drafts, {name: slot for slot, name in enumerate(adapters)})


def assert_same_engines(
    assert_equal: Callable[[str, str], None],
    model: Model,
    limits: Resolved,
    options: Mapping[str, Any],
    adapters: Mapping[str, Adapter],
) -> None:
    """Note what all ranks must say alike of their engines."""
    said = {**model.facts, **limits.options, **options}
    said |= {f"adapter {name!r}": own.weights for name, own in adapters.items()}
    for subject, value in said.items():
        assert_equal(subject, str(value))


def make_stepper(
    weights: Weights,
    limits: Resolved,
    num_stages: int,
    ladder: Ladder[BatchDescriptor],
    transport: Transport,
    *,
    num_logprobs: int = 0,
    keep_logits: bool = False,
    backend: str | None = None,
) -> Stepper:
    """What does an engine's work: of one stage, its step as one graph; of more, a pipeline of graphified stages.

    Args:
        ladder: the classes that are captured; an empty one: everything runs eagerly.
        keep_logits: whether outputs hold logits.
    """
    model, speculation = weights.model, limits.speculation
    layouts = [layout for layout, _ in weights.stages]
    drafts = 0 if speculation is None else speculation.num_tokens
    extras: dict[str, Any] = {"num_logprobs": num_logprobs, "keep_logits": keep_logits, "num_drafts": drafts}
    every = split_model(model.config, num_stages)
    stages: list[Any] = [decoder_stage(model.config, layout, **extras) for layout in every]
    params: tuple[Any, ...] = tuple(own for _, own in weights.stages)
    state = make_states(model, layouts, limits)
    if speculation is not None:
        stages = speculation.stages(stages)
        params = ((params[0], weights.drafts), *params[1:]) if layouts[0].first else params
    params = tree_map(_constant, params)
    if num_stages == 1:
        return Stepped(graph_step(compose(stages, advance=advance), ladder, backend), params, state, model.device)
    x = _example(model, drafts)
    spanned = [graph_step(stage, ladder, backend) for stage in stages]
    step = pipeline([edited(s) for s in spanned], advance=advance_work, schema=Schema.of(x), transport=transport)
    here = transport.ranks(num_stages)
    graphs = [(spanned[rank], x if rank else None) for rank in here] if len(ladder) else []
    return Streamed(step, params, state, model.device, graphs)


def _constant(leaf: Any) -> Any:
    """A parameter that is not being trained: an engine's steps would keep all that backward() could ask for."""
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _example(model: Model, drafts: int) -> IntermediateTensors:
    """What one stage sends to the next, of one token."""
    ids = torch.zeros(1, dtype=torch.int64, device=model.device)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    has_mrope = model.config.rope.mrope_section is not None
    return IntermediateTensors(hidden, ids if drafts else None, ids.new_zeros(1, 3) if has_mrope else None)


def check_engine(call: str, model: Any, graph: str, stages: int, seed: int | None, transport: Any) -> None:
    """Refuse an engine that cannot be.

    Raises:
        RequestError: no model, an unknown mode, more stages than layers, a seed that is no whole number, or no
            transport.
    """
    if (wrong := wrong_transport(transport)) is not None:
        raise RequestError(call, *wrong)
    if not isinstance(model, Model):
        raise RequestError(call, f"model is {kind_of(model)}", "model = weft.load(folder)")
    if seed is not None and not is_int(seed):
        raise RequestError(call, f"seed={seed!r}", "a whole number, or None")
    if graph not in MODES:
        raise RequestError(call, f"graph={graph!r}", f"one of {', '.join(MODES)}")
    if not is_count(stages) or stages > model.config.num_layers:
        raise RequestError(
            call, f"pipeline={stages!r}; the model has {model.config.num_layers} layers", "from 1 stage to one a layer"
        )


def check_options(
    call: str, model: Model, limits: Any, run_ahead: Any, num_logprobs: Any, adapters: Any, speculation: Any
) -> None:
    """Refuse options of an engine that are none.

    Raises:
        RequestError: it is so.
    """
    if not (is_count(run_ahead) or (run_ahead == 0 and isinstance(run_ahead, int))):
        raise RequestError(call, f"run_ahead={run_ahead!r}", "a whole number of steps, or 0")
    vocab = model.config.vocab_size
    if num_logprobs != 0 and not (is_count(num_logprobs) and num_logprobs <= vocab):
        raise RequestError(call, f"num_logprobs={num_logprobs!r}", f"a whole number from 0 to {vocab}")
    if not isinstance(limits, EngineLimits | None):
        raise RequestError(call, f"limits is {kind_of(limits)}", "weft.EngineLimits(...), or None")
    if not isinstance(speculation, Speculation | None):
        raise RequestError(call, f"speculation is {kind_of(speculation)}", "weft.Speculation(...), or None")
    named = isinstance(adapters, Mapping) and all(isinstance(name, str) for name in adapters)
    if adapters is not None and not (named and all(isinstance(each, Adapter) for each in adapters.values())):
        raise RequestError(call, f"adapters={adapters!r:.200}", "{name: weft.load_adapter(model, folder)}, or None")
