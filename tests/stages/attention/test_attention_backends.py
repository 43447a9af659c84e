"""Attention back ends: the same tokens by other means, in the graphs that they declare, and what is
refused."""

import pickle
import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from paged_cases import FIXED, Shape, assert_matches, draw_case
from torch import Tensor

import weft
from weft.errors import CaptureError, DeviceError, LoweredModeWarning, ProgramError, RequestError
from weft.ops.attention.backends import _BY_HANDLE, BACKENDS, AttentionBackend
from weft.ops.attention.capabilities import CAPABILITIES
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.setup import make_state
from weft.transforms.graphs.ladder import MODES

PROMPTS = ["The function returns a list of", "A list is", "In Python, "]
TORCH = BACKENDS["torch"]


def planned(q: Tensor, kv_pages: Tensor, slots: Tensor, table: Tensor, *rest: Any) -> Tensor:
    """As wrappers with a `plan` are: it reads the lengths on the host, and so cannot be in a graph."""
    starts, lengths, longest, scale, window = rest
    spans = starts.tolist()
    out = torch.zeros_like(q)
    for r, length in enumerate(lengths.tolist()):
        if length and spans[r] < spans[r + 1]:
            part = slice(spans[r], spans[r + 1])
            local_starts = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
            where = slots[part], table[r : r + 1], local_starts, lengths[r : r + 1]
            out[part] = TORCH.attend(q[part], kv_pages, *where, longest, scale, window)
    return out


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


def tokens(model: Model, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=16, **options)]


@pytest.mark.parametrize("shape", FIXED, ids=map(str, FIXED))
@pytest.mark.parametrize(
    "name",
    [name for name, attention_backend in BACKENDS.items() if "cpu" in attention_backend.devices],
)
def test_each_is_dense_attention(name: str, shape: Shape) -> None:
    case = draw_case(shape)
    q, k, v, pages, *where = case.args
    weft.ops.attention.paged.paged_attention(q, k, v, pages, *where)
    if shape.requests:
        assert_matches(case, BACKENDS[name].attend(q, pages, *where), pages)


@pytest.mark.one_of(6, 3)
@pytest.mark.parametrize("capability", [*CAPABILITIES[:-1], "torch"])
def test_each_serves_the_same_tokens_in_the_graphs_that_it_declares(
    model: Model, capability: str
) -> None:
    expected = tokens(model)
    backend = (
        TORCH
        if capability == "torch"
        else AttentionBackend("planned", inside_too, capability=capability)
    )
    custom_model = model.with_stages(attend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoweredModeWarning)
        for mode in MODES:
            assert tokens(custom_model, graph=mode) == expected, mode
        assert (
            tokens(custom_model, pipeline=2)
            == tokens(custom_model, speculation=Speculation(num_tokens=2))
            == expected
        )


def inside_too(q: Tensor, kv_pages: Tensor, *where: Any) -> Tensor:
    """In whole graphs of decodes in torch's operations; elsewhere with lengths on the host."""
    requests = len(where[3])
    longest = where[4]
    return (TORCH.attend if requests * longest == len(q) else planned)(q, kv_pages, *where)


@pytest.mark.parametrize("stages", [1, 2])
def test_modes_are_lowered_to_what_the_back_end_can(model: Model, stages: int) -> None:
    piecewise_model = model.with_stages(
        attend=AttentionBackend("planned", planned, capability="piecewise")
    )
    with pytest.warns(
        LoweredModeWarning, match="'full_and_piecewise' is lowered to 'piecewise'"
    ) as told:
        engine = Engine(piecewise_model, pipeline=stages)
    assert len(told) == 1
    engine.add(PROMPTS[0], max_tokens=4)
    list(engine)
    assert set(engine.stats().modes) == {"piecewise"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoweredModeWarning)
        with pytest.raises(LoweredModeWarning):
            Engine(piecewise_model)


@pytest.mark.parametrize("capability", ["uniform_single_token", "full"])
def test_a_capability_that_lies_is_named_at_the_first_capture(
    model: Model, capability: str
) -> None:
    lying = model.with_stages(attend=AttentionBackend("planned", planned, capability=capability))
    with pytest.raises(CaptureError, match="tolist") as caught:
        generate(lying, PROMPTS, max_tokens=4, graph="full_and_piecewise")
    assert (
        f"in the attention back end 'planned', of capability '{capability}'"
        in caught.value.__notes__
    )


def in_place(q: Tensor, kv_pages: Tensor, *where: Any) -> Tensor:
    """Returns the memory of its queries."""
    return q.copy_(TORCH.attend(q, kv_pages, *where))


@pytest.mark.slow
def test_a_result_in_the_queries_memory_is_replayed(model: Model) -> None:
    expected = tokens(model)
    for capability in CAPABILITIES[1:]:
        in_place_model = model.with_stages(
            attend=AttentionBackend("in place", in_place, capability=capability)
        )
        assert tokens(in_place_model, graph="piecewise") == expected, capability


def test_a_copy_is_registered_anew() -> None:
    mine = AttentionBackend("mine", planned, capability="piecewise", page_sizes=(4,))
    for copy in (pickle.loads(pickle.dumps(mine)), deepcopy(mine)):
        assert (copy.name, copy.attend, copy.capability, copy.page_sizes) == (
            "mine",
            planned,
            "piecewise",
            (4,),
        )
        assert copy.handle != mine.handle
        assert _BY_HANDLE[copy.handle] is copy
    assert pickle.loads(pickle.dumps(TORCH)) is TORCH


@pytest.mark.slow
def test_pages_have_the_size_that_all_back_ends_have(model: Model) -> None:
    paged = AttentionBackend("paged", TORCH.attend, page_sizes=(8,))
    small = model.with_stages(attend=paged)
    beside = model.with_stages(
        beside={"other": small}, logits=lambda logits, rows, extras: logits + extras["other"]
    )
    assert tokens(beside) == tokens(model)
    with pytest.raises(ProgramError, match="kernels for 8"):
        Engine(beside)
    assert (
        make_state(small, split_layers(model.config.num_layers, 1), lengths=[9])[0].kv_pages.shape[
            3
        ]
        == 8
    )
    eager = model.with_stages(attend=AttentionBackend("planned", planned, capability="none"))
    lowest = model.with_stages(
        beside={"other": eager}, logits=lambda logits, rows, extras: logits + extras["other"]
    )
    with pytest.warns(LoweredModeWarning, match="lowered to 'none'"):
        assert tokens(lowest, graph="full") == tokens(model)
    with pytest.raises(RequestError, match="attention can be in any graph"):
        Engine(model, speculation=Speculation(num_tokens=2, model=eager))


def test_what_is_refused(model: Model) -> None:
    with pytest.raises(
        DeviceError,
        match=r"'triton', which runs on cuda, not on cpu\n.*attention='auto', or one of",
    ):
        load(DEMO, "cpu", attention="triton")
    with pytest.raises(
        RequestError, match=r"attention='flash'(.|\n)*one of auto, reference, triton, torch"
    ):
        load(DEMO, "cpu", attention="flash")
    small = AttentionBackend(
        "small", planned, head_dims=(512,), page_sizes=(64,), dtypes=(torch.float32,)
    )
    with pytest.raises(ProgramError, match=r"no kernels for heads of .*, but of 512"):
        model.with_stages(attend=small)
    with pytest.raises(ProgramError, match=r"no kernels in torch\.bfloat16"):
        load(DEMO, "cpu", "bfloat16", attention=small)
    paged = AttentionBackend("paged", planned, page_sizes=(64,), capability="none")
    with pytest.raises(ProgramError, match=r"page_size=16(.|\n)*EngineLimits\(..., page_size=64\)"):
        Engine(model.with_stages(attend=paged), graph="none")
    Engine(model.with_stages(attend=paged), EngineLimits(page_size=64), graph="none")
    with pytest.raises(ProgramError, match="capability='sometimes'"):
        AttentionBackend("odd", planned, capability="sometimes")
    assert load(DEMO, "cpu", attention="reference").functions == model.functions
    assert load(DEMO, "cpu", attention="torch").functions.attend is TORCH


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("windows", "no", "True or False"),
        ("batch_invariant", 1, "True or False"),
        ("missing", "a newer GPU", "a function of a device, which returns"),
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: Any, instead: str) -> None:
    with pytest.raises(
        ProgramError, match=rf"AttentionBackend\('odd', \.\.\.\)\n  saw: {field}.*\n.*{instead}"
    ):
        AttentionBackend("odd", planned, **{field: value})


def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


def nine(
    q: Any,
    kv_pages: Any,
    slots: Any,
    table: Any,
    starts: Any,
    lengths: Any,
    longest: Any,
    a: Any,
    b: Any,
) -> Any:
    return q


def test_functions_of_other_arguments_are_refused_when_the_back_end_is_made() -> None:
    taken = (
        r"\(q, kv_pages, slot_mapping, block_table, query_start_loc, seq_lens, max_query_len,"
        r" scale, window"
    )
    for field, functions, instead in (
        ("attend", {"attend": three}, rf"9 arguments: {taken}\)"),
        ("attend", {"attend": nine, "plan": nine}, rf"10 arguments: {taken}, plan\)"),
        ("plan", {"attend": planned, "plan": three}, rf"9 arguments: {taken}\)"),
        ("missing", {"attend": nine, "missing": lambda: ""}, r"1 argument: \(device\)"),
    ):
        arguments: dict[str, Any] = functions
        with pytest.raises(
            ProgramError, match=rf"AttentionBackend\('odd', {field}=(.|\n)*a function of {instead}"
        ):
            AttentionBackend("odd", **arguments)
    AttentionBackend("plain", nine)
    AttentionBackend("bound", partial(nine))
    AttentionBackend("without a signature", max)  # a built-in function of any arguments


READ = ("kv_pages", "slot_mapping", "block_table", "query_start_loc", "seq_lens")


@pytest.mark.filterwarnings("ignore::weft.errors.LoweredModeWarning")
@pytest.mark.parametrize("capability", ["none", "piecewise", "full"])
def test_a_write_to_what_other_layers_read_is_an_error(model: Model, capability: str) -> None:
    def writes(place: int, *args: Any) -> Tensor:
        out = TORCH.attend(*args)
        args[place].add_(0)
        return out

    for mode in ("none", "piecewise", "full_and_piecewise"):
        for place, name in enumerate(READ, 1):
            backend = AttentionBackend("writer", partial(writes, place), capability=capability)
            pattern = (
                rf"'writer'(.|\n)*wrote to {name}\n|writes to batch\.{name} .*, which it does"
                r" not own"
            )
            with pytest.raises((ProgramError, CaptureError), match=pattern):
                generate(model.with_stages(attend=backend), PROMPTS, max_tokens=2, graph=mode)


@pytest.mark.slow
def test_writes_are_not_counted_where_torch_counts_none(model: Model) -> None:
    custom_model = model.with_stages(attend=AttentionBackend("mine", TORCH.attend))
    expected = tokens(model)
    with torch.inference_mode():
        assert tokens(custom_model, graph="none") == tokens(custom_model) == expected
    q, k, v, pages, *where = draw_case(FIXED[0]).args
    weft.ops.attention.paged.paged_attention(q, k, v, pages, *where)
    mine = AttentionBackend("mine", TORCH.attend)

    def call(q: Tensor) -> Tensor:
        return mine(None, q, pages, *where)

    whole = TORCH.attend(q, pages, *where)
    torch.testing.assert_close(torch.vmap(call)(torch.stack((q, q))), torch.stack((whole, whole)))
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(q), whole)
    assert torch.func.grad(lambda q: call(q).sum())(q.float()).shape == q.shape


def test_a_batch_invariant_model_refuses_attention_that_is_not() -> None:
    exact = weft.load("demo", "cpu", batch_invariant=True)
    other = weft.load("demo", "cpu", attention="torch")
    problem = "attention back end 'torch', which is not batch invariant"
    for model, options in (
        (exact, {"attend": BACKENDS["torch"]}),
        (other, {"batch_invariant": True}),
        (
            exact,
            {
                "beside": {"amateur": other},
                "logits": lambda logits, rows, extras: logits - extras["amateur"],
            },
        ),
    ):
        with pytest.raises(ProgramError) as caught:
            model.with_stages(**options)
        assert (caught.value.problem, "reference" in caught.value.instead) == (problem, True)
    wrong: Any = "yes"
    with pytest.raises(ProgramError, match="batch_invariant is a str"):
        exact.with_stages(batch_invariant=wrong)
