"""The laws as a table: each with the strategy that draws its cases, so that CI, a GPU and the
mutants run the same checks.

`LAWS`, at the end, is the table. Its entries name a law of `weft.proofs._laws` through a function
`(data, device)`, which draws a case and passes it to the law; those functions come first.
"""

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from weft.errors import ArgumentError, CaptureError, LoweredModeWarning
from weft.proofs import strategies
from weft.proofs._laws.captures import (
    graph_is_eager_on_tensor_programs,
    hazards_are_right_or_refused,
)
from weft.proofs._laws.compiler import compiled_graphs_are_their_functions
from weft.proofs._laws.compositions import compositions_mean_their_parts
from weft.proofs._laws.derivatives import (
    derivatives_are_of_the_step,
    graphs_of_gradients_are_gradients,
)
from weft.proofs._laws.dispatch import (
    class_is_kept,
    dispatch_is_least,
    nothing_is_captured_after_start,
    own_classes_are_dispatched,
)
from weft.proofs._laws.engine.agreement import differences_are_refused
from weft.proofs._laws.engine.bits import bits_are_of_the_request
from weft.proofs._laws.engine.completions import engine_serves_as_alone, run_ahead_is_none
from weft.proofs._laws.engine.fairness import served_in_turn
from weft.proofs._laws.engine.faults import faults_end_their_own_request
from weft.proofs._laws.engine.own_stages import own_stages_serve_as_alone
from weft.proofs._laws.engine.pages import (
    pages_are_of_the_parameters,
    pages_are_read_by_whom_they_were_written_for,
)
from weft.proofs._laws.engine.requests import WAYS, order_is_free, seed_and_position_fix_the_sample
from weft.proofs._laws.engine.serving import hosts_agree, speculation_changes_nothing, stages_agree
from weft.proofs._laws.engine.versions import HOW, PARTS, changed_parameters_compute_all
from weft.proofs._laws.func import (
    TRANSFORMS,
    functions_of_graphs_are_functions,
    graphs_of_functions_are_functions,
)
from weft.proofs._laws.graph import (
    graph_is_eager,
    graph_is_eager_on_calls,
    graph_is_eager_on_functions,
    graph_is_eager_on_images,
    graph_is_eager_on_padded_functions,
)
from weft.proofs._laws.loop_bodies import loop_bodies_are_pythons
from weft.proofs._laws.loops import loops_are_python_loops
from weft.proofs._laws.memory import dropped_graphs_are_not_in_use, memory_is_estimated
from weft.proofs._laws.ownership import (
    borrowed_results_are_right,
    capture_leaves_no_trace,
    capture_leaves_no_trace_on_functions,
    graph_keeps_what_it_reads,
    ownership_is_kept,
)
from weft.proofs._laws.padding import (
    image_padding_is_inert,
    padding_is_inert,
    stage_padding_is_inert,
)
from weft.proofs._laws.pieces import pieces_are_the_whole, pieces_are_the_whole_on_functions
from weft.proofs._laws.pipeline import (
    microbatches_are_one,
    pipeline_is_composition,
    pipeline_is_composition_on_functions,
    transforms_commute,
    transforms_commute_on_functions,
)
from weft.proofs._laws.schedule import (
    broken_programs_are_refused,
    checker_is_right,
    own_schedules_are_compositions,
    schedules_are_right,
)
from weft.proofs._laws.shards import (
    TRANSFORMS as SHARD_TRANSFORMS,
    derivatives_of_shards_are_derivatives,
    disagreeing_ranks_are_refused,
    false_replicas_are_refused,
    shards_are_the_function,
    shards_commute,
    shares_are_the_model,
    shares_have_the_same_bits,
    stages_of_shards_are_stages,
    surroundings_of_shards_change_nothing,
)
from weft.proofs._strategies.captures.calls import call_sequences
from weft.proofs._strategies.captures.hazards import hazards
from weft.proofs._strategies.captures.tensor_programs import tensor_programs
from weft.proofs._strategies.compiled import (
    CompiledCase,
    compiled_mappings,
    compiled_models,
    compiled_programs,
    inductor_cases,
)
from weft.proofs._strategies.compositions.composition import compositions
from weft.proofs._strategies.engine.agreement import conversations
from weft.proofs._strategies.engine.attention import other_attentions
from weft.proofs._strategies.engine.drafts import Drafts, lookups, models
from weft.proofs._strategies.engine.engines import loads, small_model
from weft.proofs._strategies.engine.invariant import invariant_loads
from weft.proofs._strategies.engine.odd import odd_loads
from weft.proofs._strategies.engine.own_stages import (
    own_stages,
    patched_stages,
    request_extras,
    token_patches,
)
from weft.proofs._strategies.engine.traces import timed_traces, traces
from weft.proofs._strategies.images import image_scenarios, resolution_ladders
from weft.proofs._strategies.loops import loop_bodies, loops
from weft.proofs._strategies.programs import broken_programs, edited_programs
from weft.proofs._strategies.schedules import woven_programs
from weft.proofs._strategies.shards import disagreements
from weft.proofs._strategies.shares import cut_scenarios, shared_scenarios
from weft.proofs._strategies.sized_functions import sized_functions
from weft.proofs._strategies.surrounded import surrounded_shards
from weft.proofs.checks.difference import LawViolation
from weft.transforms.graphs.ladder import MODES


@attrs.frozen
class Law:
    """A law and how one case of it is drawn and checked.

    Args:
        number: as in `L1`.
        name: what must hold.
        check: `(data, device)`: draws a case and raises LawViolation if it breaks the law.
        weight: how many times as many cases as those of other laws a run of all laws checks. Below
            1 where a case is a long run: of an engine, or of a training step.
    """

    number: str
    name: str
    check: Callable[[st.DataObject, str], None]
    weight: float = 1

    def __str__(self) -> str:
        return f"{self.number} {self.name}"


def _with_ladder(
    law: Callable[..., None], min_layers: int = 1, loras: bool = False
) -> Callable[[st.DataObject, str], None]:
    def check(data: st.DataObject, device: str) -> None:
        scenario = data.draw(strategies.scenarios(min_layers=min_layers, loras=loras))
        law(
            scenario,
            # A ladder that covers all batches captures all; one that does not also runs steps
            # without a graph.
            data.draw(strategies.ladders(scenario.batches(), covered=data.draw(st.booleans()))),
            device,
        )

    return check


def _on_functions(law: Callable[..., None]) -> Callable[[st.DataObject, str], None]:
    return lambda data, device: law(data.draw(strategies.pure_functions()), device)


def _pipelined(data: st.DataObject, device: str) -> None:
    scenario = data.draw(strategies.scenarios())
    num_stages = data.draw(st.integers(1, scenario.config.num_layers))
    ladder = data.draw(st.one_of(st.none(), strategies.ladders(scenario.batches())))
    pipeline_is_composition(scenario, num_stages, data.draw(st.integers(1, 3)), ladder, device)


def _pipelined_functions(data: st.DataObject, device: str) -> None:
    functions = data.draw(strategies.stage_lists())
    rows = data.draw(st.integers(1, 6))
    # Rows that all differ, so that none can stand for another.
    x = torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 4).cos()
    pipeline_is_composition_on_functions(functions, x, data.draw(st.integers(1, 3)), device)


def _on_programs(
    law: Callable[..., None], cases: st.SearchStrategy[Any]
) -> Callable[[st.DataObject, str], None]:
    return lambda data, device: law(data.draw(cases))


def _microbatched(data: st.DataObject, device: str) -> None:
    microbatches_are_one(data.draw(strategies.scenarios()), data.draw(st.integers(1, 4)), device)


def _padded_functions(data: st.DataObject, device: str) -> None:
    function = data.draw(strategies.pure_functions())
    rungs = data.draw(st.sets(st.integers(1, 8), min_size=1, max_size=3))
    graph_is_eager_on_padded_functions(function, rungs, device)


def _estimated(data: st.DataObject, device: str) -> None:
    memory_is_estimated(
        data.draw(strategies.pure_functions()), data.draw(st.integers(1, 12)), device
    )


def _dropped(data: st.DataObject, device: str) -> None:
    dropped_graphs_are_not_in_use(
        data.draw(strategies.pure_functions()), data.draw(st.integers(1, 2)), device
    )


def _dispatched(data: st.DataObject, device: str) -> None:
    descriptor = data.draw(strategies.descriptors())
    limits = data.draw(strategies.limits())
    dispatch_is_least(descriptor, limits, data.draw(st.sampled_from(MODES)))


def _started(data: st.DataObject, device: str) -> None:
    mode = data.draw(st.sampled_from(MODES))
    nothing_is_captured_after_start(data.draw(strategies.scenarios(max_layers=2)), mode, device)


def _on_call_sequences(data: st.DataObject, device: str) -> None:
    graph_is_eager_on_calls(data.draw(call_sequences()), device)


def _on_images(law: Callable[..., None]) -> Callable[[st.DataObject, str], None]:
    return lambda data, device: law(
        data.draw(image_scenarios()), data.draw(resolution_ladders()), device
    )


def _commuted(data: st.DataObject, device: str) -> None:
    scenario = data.draw(strategies.scenarios(max_layers=2))
    ladder = data.draw(strategies.ladders(scenario.batches()))
    microbatches = data.draw(st.integers(1, 3))
    if microbatches > 1:
        # Splitting a ragged batch reads the host, which a graph cannot do.
        ladder = tuple(d for d in ladder if d.is_uniform)
    transforms_commute(
        scenario,
        data.draw(st.integers(1, scenario.config.num_layers)),
        microbatches,
        ladder,
        device,
    )


def _commuted_functions(data: st.DataObject, device: str) -> None:
    functions = data.draw(strategies.stage_lists())
    rows = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    inputs = [torch.arange(n * 4, dtype=torch.float32).reshape(n, 4).cos() for n in rows]
    transforms_commute_on_functions(functions, inputs, data.draw(st.integers(1, 3)), device)


def _on_kept_inputs(data: st.DataObject, device: str) -> None:
    graph_keeps_what_it_reads(
        data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)), device
    )


def _with_func(law: Callable[..., None]) -> Callable[[st.DataObject, str], None]:
    def check(data: st.DataObject, device: str) -> None:
        transform = data.draw(st.sampled_from(sorted(TRANSFORMS)))
        law(data.draw(strategies.mappings(device)), transform)

    return check


def _derived(data: st.DataObject, device: str) -> None:
    scenario = data.draw(strategies.scenarios(max_layers=2, max_steps=2))
    derivatives_are_of_the_step(
        scenario, data.draw(st.one_of(st.none(), st.integers(0, 63))), device
    )


def _learned(data: st.DataObject, device: str) -> None:
    graphs_of_gradients_are_gradients(
        data.draw(strategies.scenarios(max_layers=1, max_steps=2)), device
    )


def _sampled(data: st.DataObject, device: str) -> None:
    scenario = data.draw(strategies.scenarios(max_layers=2, sampled=True))
    ladder = data.draw(strategies.ladders(scenario.batches()))
    way = data.draw(st.sampled_from(WAYS))
    stages = data.draw(st.integers(1, scenario.config.num_layers))
    seed_and_position_fix_the_sample(
        scenario, way, stages, data.draw(st.integers(1, 3)), ladder, device
    )


def _served(**options: Any) -> Callable[[st.DataObject, str], None]:
    def check(data: st.DataObject, device: str) -> None:
        trace = data.draw(traces(**options))
        num_stages = trace.config.num_layers - data.draw(
            st.integers(0, trace.config.num_layers - 1)
        )
        stages_agree(
            trace, num_stages, data.draw(st.sampled_from(("none", *MODES, "none"))), device
        )

    return check


def _drafted(drafts: st.SearchStrategy[Drafts]) -> Callable[[st.DataObject, str], None]:
    def check(data: st.DataObject, device: str) -> None:
        trace = data.draw(traces(drafts=drafts))
        num_stages = trace.config.num_layers - data.draw(
            st.integers(0, trace.config.num_layers - 1)
        )
        # Hypothesis shrinks towards the first: a smallest case runs without graphs where it still
        # fails.
        mode = data.draw(st.sampled_from(("none", *MODES, "none")))
        speculation_changes_nothing(trace, num_stages, mode, device)

    return check


def _scheduled(data: st.DataObject, device: str) -> None:
    hosts_agree(data.draw(traces(max_layers=1)), 2, device)


def _on_conversations(data: st.DataObject, device: str) -> None:
    differences_are_refused(*data.draw(conversations()))


def _on_shared_pages(data: st.DataObject, device: str) -> None:
    trace = data.draw(traces(max_layers=1, alone=0, page_sizes=(4, 8, 2, 8)))
    pages_are_read_by_whom_they_were_written_for(trace)


def _changed(data: st.DataObject, device: str) -> None:
    trace = data.draw(traces(max_layers=1, alone=0, page_sizes=(4, 8, 2, 8)))
    changes = data.draw(st.sets(st.sampled_from((3, 1, 2, 5, 7, 4)), min_size=1, max_size=2))
    pages_are_of_the_parameters(trace, changes)


def _changed_engine(data: st.DataObject, device: str) -> None:
    load = data.draw(loads(("none", "none", "full")))
    step = data.draw(st.sampled_from((2, 3, 1, 4, 6)))
    how = data.draw(st.sampled_from((*HOW, HOW[-1])))
    changed_parameters_compute_all(load, step, how, data.draw(st.sampled_from(PARTS)))


def _engine(masks: bool) -> Callable[[st.DataObject, str], None]:
    return lambda data, device: engine_serves_as_alone(data.draw(loads(masks=masks)))


def _own_stages(data: st.DataObject, device: str) -> None:
    load = data.draw(loads(adapters=False))
    model = small_model()
    stages = data.draw(own_stages(model.config.num_layers))
    own_stages_serve_as_alone(
        load, stages, [data.draw(request_extras(model)) for _ in load.calls], device
    )


def _patched(data: st.DataObject, device: str) -> None:
    load = data.draw(loads(adapters=False))
    model = small_model()
    stages = data.draw(patched_stages(model.config.num_layers))
    patches = [data.draw(token_patches(model, len(call.prompt))) for call in load.calls]
    own_stages_serve_as_alone(load, stages, patches, device)


def _attended(data: st.DataObject, device: str) -> None:
    load = data.draw(loads(adapters=False))
    model = small_model()
    attention = data.draw(other_attentions(model.config.num_layers))
    with warnings.catch_warnings():
        # Back ends that cannot be in a graph lower the mode, which is right, and part of what is
        # drawn.
        warnings.simplefilter("ignore", LoweredModeWarning)
        try:
            own_stages_serve_as_alone(load, attention, [None] * len(load.calls), device)
        except CaptureError as error:  # a graph that its capability does not promise
            raise LawViolation(f"L21 own stages serve as alone: {error}") from error


def _faulty(data: st.DataObject, device: str) -> None:
    faults_end_their_own_request(data.draw(odd_loads()))


def _on_run_ahead(data: st.DataObject, device: str) -> None:
    run_ahead_is_none(data.draw(loads(("none", "full"))))


def _same_bits(data: st.DataObject, device: str) -> None:
    bits_are_of_the_request(data.draw(invariant_loads()), device)


def _in_turn(data: st.DataObject, device: str) -> None:
    served_in_turn(data.draw(traces(max_layers=1)))


def _reordered(data: st.DataObject, device: str) -> None:
    scenario = data.draw(strategies.scenarios(max_layers=2))
    orders = [data.draw(st.permutations(range(len(step)))) for step in scenario.moves]
    order_is_free(scenario, orders, data.draw(strategies.ladders(scenario.batches())), device)


def _looped(data: st.DataObject, device: str) -> None:
    loops_are_python_loops(data.draw(loops()), device)


def _bodies_looped(data: st.DataObject, device: str) -> None:
    loop_bodies_are_pythons(data.draw(loop_bodies()), device)


def _on_tensor_programs(data: st.DataObject, device: str) -> None:
    graph_is_eager_on_tensor_programs(data.draw(tensor_programs(device)), device)


def _on_hazards(data: st.DataObject, device: str) -> None:
    hazards_are_right_or_refused(data.draw(hazards(device)), device)


def _composed(data: st.DataObject, device: str) -> None:
    compositions_mean_their_parts(data.draw(compositions()), device)


def _on_compiled(
    cases: Callable[[str], st.SearchStrategy[CompiledCase]],
) -> Callable[[st.DataObject, str], None]:
    return lambda data, device: compiled_graphs_are_their_functions(
        data.draw(cases(device)), device
    )


def _sharded(data: st.DataObject, device: str) -> None:
    shards_are_the_function(data.draw(strategies.rank_functions()).to(device))


def _shards_transformed(data: st.DataObject, device: str) -> None:
    parts = data.draw(st.integers(1, 2))
    function = data.draw(strategies.rank_functions(multiple=parts)).to(device)
    shards_commute(function, parts, data.draw(st.integers(1, 3)))


def _shards_pipelined(data: st.DataObject, device: str) -> None:
    mesh = data.draw(strategies.meshes())
    parts = data.draw(st.integers(1, 2))
    columns = data.draw(st.integers(1, 2))
    stage = strategies.rank_functions(mesh, max_steps=4, multiple=parts, columns=columns)
    functions = data.draw(st.lists(stage, min_size=1, max_size=3))
    stages_of_shards_are_stages([function.to(device) for function in functions], parts)


def _shards_derived(data: st.DataObject, device: str) -> None:
    function = data.draw(
        strategies.rank_functions(updates=("state: functional", "state: unchanged"))
    )
    derivatives_of_shards_are_derivatives(
        function.to(device), data.draw(st.sampled_from(sorted(SHARD_TRANSFORMS)))
    )


def _shards_surrounded(data: st.DataObject, device: str) -> None:
    surroundings_of_shards_change_nothing(data.draw(surrounded_shards()))


def _ranks_disagree(data: st.DataObject, device: str) -> None:
    disagreeing_ranks_are_refused(data.draw(disagreements()))


def _replicas_claimed(data: st.DataObject, device: str) -> None:
    false_replicas_are_refused(data.draw(strategies.rank_functions()).to(device))


def _shared(data: st.DataObject, device: str) -> None:
    scenario, num_ranks = data.draw(shared_scenarios())
    num_stages = data.draw(st.integers(1, scenario.config.num_layers))
    shares_are_the_model(scenario, num_ranks, num_stages, data.draw(st.booleans()))


def _shared_bits(data: st.DataObject, device: str) -> None:
    shares_have_the_same_bits(data.draw(cut_scenarios()))


LAWS = (
    Law("L1", "graph is eager, on models", _with_ladder(graph_is_eager)),
    Law("L1", "graph is eager, on pure functions", _on_functions(graph_is_eager_on_functions)),
    Law("L1", "graph is eager, on functions under a ladder", _padded_functions),
    Law("L1", "graph is eager, on calls that differ in one thing", _on_call_sequences),
    Law("L1", "loops are Python's", _looped),
    Law("L1", "loops are Python's, on drawn bodies", _bodies_looped),
    Law("L1", "graph is eager, on images under a ladder", _on_images(graph_is_eager_on_images)),
    Law("L2", "padding is inert", _with_ladder(padding_is_inert)),
    Law(
        "L2",
        "padding is inert, between stages",
        _with_ladder(stage_padding_is_inert, min_layers=2),
    ),
    Law("L2", "padding is inert, on images", _on_images(image_padding_is_inert)),
    Law("L3", "pipeline is composition, on models", _pipelined),
    Law("L3", "pipeline is composition, on pure functions", _pipelined_functions),
    Law("L4", "transforms commute, on models", _commuted),
    Law("L4", "transforms commute, on pure functions", _commuted_functions),
    Law("L5", "pieces are the whole, on models", _with_ladder(pieces_are_the_whole)),
    Law(
        "L5",
        "pieces are the whole, on pure functions",
        _on_functions(pieces_are_the_whole_on_functions),
    ),
    Law("L6", "dispatch is least", _dispatched),
    Law("L6", "nothing is captured after start", _started),
    Law("L6", "own classes are dispatched, on images", _on_images(own_classes_are_dispatched)),
    Law("L7", "class is kept", _with_ladder(class_is_kept, loras=True)),
    Law("L8", "capture leaves no trace, on models", _with_ladder(capture_leaves_no_trace)),
    Law(
        "L8",
        "capture leaves no trace, on pure functions",
        _on_functions(capture_leaves_no_trace_on_functions),
    ),
    Law("L9", "ownership is kept", _with_ladder(ownership_is_kept)),
    Law("L9", "borrowed results are right", _on_functions(borrowed_results_are_right)),
    Law("L9", "graph keeps what it reads", _on_kept_inputs),
    Law("L9", "dropped graphs are not in use", _dropped),
    Law("L9", "pages are read by whom they were written for", _on_shared_pages),
    Law("L10", "schedules are right", _on_programs(schedules_are_right, strategies.programs())),
    Law(
        "L10",
        "the checker is right",
        _on_programs(checker_is_right, edited_programs()),
    ),
    Law(
        "L10",
        "broken programs are refused",
        _on_programs(broken_programs_are_refused, broken_programs()),
    ),
    Law(
        "L10",
        "own schedules are compositions",
        _on_programs(own_schedules_are_compositions, woven_programs()),
    ),
    Law("L11", "stages agree, and requests are served as if alone", _served(), weight=0.5),
    Law("L11", "requests with adapters are served as if alone", _served(adapters=True), weight=0.5),
    Law(
        "L11",
        "requests with embeddings and positions are served as if alone",
        _served(embeds=True, drafts=st.one_of(st.none(), lookups())),
        weight=0.5,
    ),
    Law("L11", "hosts agree", _scheduled, weight=0.5),
    Law("L11", "what differs is refused with the first message", _on_conversations),
    Law("L11", "an engine serves each completion as alone", _engine(masks=False), weight=0.5),
    Law("L11", "completions with masks are served as if alone", _engine(masks=True), weight=0.5),
    Law("L11", "faults end their own request, and nothing forbidden is said", _faulty, weight=0.5),
    Law("L12", "speculation changes nothing, by prompt lookup", _drafted(lookups()), weight=0.5),
    Law("L12", "speculation changes nothing, by a draft model", _drafted(models()), weight=0.5),
    Law("L13", "micro-batches are one", _microbatched),
    Law("L14", "memory is estimated", _estimated),
    Law(
        "L15",
        "functions of graphs are functions",
        _with_func(functions_of_graphs_are_functions),
    ),
    Law(
        "L15",
        "graphs of functions are functions",
        _with_func(graphs_of_functions_are_functions),
    ),
    Law("L15", "derivatives are of the models' steps", _derived),
    Law("L15", "graphs of the steps' gradients are gradients", _learned, weight=0.5),
    Law("L16", "seed and position fix the sample", _sampled),
    Law("L17", "order is free", _reordered),
    Law("L18", "requests are served in turn, and end", _in_turn),
    Law(
        "L18",
        "steps keep their time",
        lambda data, _: served_in_turn(data.draw(timed_traces())),
    ),
    Law("L19", "run-ahead is none", _on_run_ahead, weight=0.5),
    Law("L20", "bits are of the request alone", _same_bits, weight=0.5),
    Law("L21", "own stages serve as alone", _own_stages, weight=0.5),
    Law("L21", "own stages serve as alone, with inputs of tokens", _patched, weight=0.5),
    Law("L21", "own stages serve as alone, with another attention", _attended, weight=0.5),
    Law("L22", "shards are the function", _sharded),
    Law("L22", "shards commute with graphs, micro-batches and scans", _shards_transformed),
    Law("L22", "stages of shards are stages", _shards_pipelined),
    Law("L22", "derivatives of shards are derivatives", _shards_derived),
    Law("L22", "surroundings of shards change nothing", _shards_surrounded),
    Law("L22", "ranks that disagree are refused", _ranks_disagree),
    Law("L22", "false replicas are refused", _replicas_claimed),
    Law("L22", "shares of a model are the model", _shared, weight=0.5),
    Law("L22", "shares of cut sums have the same bits", _shared_bits, weight=0.3),
    Law("L23", "pages are of the parameters that there are", _changed),
    Law("L23", "changed parameters compute all that follows", _changed_engine, weight=0.5),
    Law("L24", "graph is eager, on random programs of tensors", _on_tensor_programs, weight=5),
    Law("L24", "hazards are right or refused", _on_hazards, weight=3),
    Law("L25", "nests of transforms mean what their parts mean", _composed, weight=3),
    Law(
        "L26",
        "compiled programs of tensors are eager",
        _on_compiled(compiled_programs),
        weight=0.6,
    ),
    Law(
        "L26",
        "classes of a ladder share compilations",
        _on_compiled(lambda device: sized_functions()),
        weight=0.4,
    ),
    Law("L26", "compiled derivatives are derivatives", _on_compiled(compiled_mappings), weight=0.4),
    Law(
        "L26",
        "compiled models are the models",
        _on_compiled(lambda device: compiled_models()),
        weight=0.2,
    ),
    Law("L26", "Inductor's code is eager", _on_compiled(inductor_cases), weight=0.2),
)


def find(number: str, part: str = "") -> Law:
    """The law of that number whose name is `part`, or the only one whose name contains it.

    Raises:
        ArgumentError: there is no such law, or more than one.
    """
    matches = [law for law in LAWS if law.number == number and part in law.name]
    # A whole name comes first, since some laws' names begin with another's.
    matches = [law for law in matches if law.name == part] or matches
    if len(matches) != 1:
        if matches:
            problem = f"{len(matches)} such laws: {', '.join(map(str, matches))}"
        else:
            problem = "no such law"
        raise ArgumentError(
            f"find({number!r}, {part!r})", problem, "a part of the name of one law of that number"
        )
    return matches[0]
