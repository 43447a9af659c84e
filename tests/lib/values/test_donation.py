"""Donation: using the old value is an error, the new one has its storage, and nothing else changes."""

import copy
import inspect
import pickle
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

import attrs
import pytest
import torch
from refusal import refused
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import weft
from weft import transforms
from weft.batches.state import State
from weft.errors import ArgumentError, DonatedError
from weft.proofs import assert_equal
from weft.proofs.evidence.pages.reference import names_of
from weft.transforms.pipelines.parts import join, split
from weft.transforms.transform import Carried
from weft.values.donation import clone, donatable, donate, donated_argnames, donates, refuse_donated
from weft.values.trees import OF_THIS_VALUE, pytree, static, tree_leaves, tree_map

INSTEAD = "use the value that it returned, or pass a copy (weft.clone) to keep the old one"


def state() -> State:
    return State.zeros(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        max_num_reqs=1,
        num_pages=1,
        max_pages=1,
        page_size=2,
    )


@donatable
@pytree
@attrs.frozen(eq=False)
class Pair:
    x: Tensor
    name: str = attrs.field(default="", metadata=static())
    _taken_by: str = attrs.field(default="", init=False, repr=False, metadata=OF_THIS_VALUE)


def test_a_state_is_moved_from() -> None:
    old = state()
    places = [leaf.data_ptr() for leaf in tree_leaves(old) if leaf is not None]
    new = donate(old, to="step(state)")
    assert len(places) > 6
    assert [leaf.data_ptr() for leaf in tree_leaves(new) if leaf is not None] == places
    for field in ("kv_pages", "positions", "sampling"):
        with pytest.raises(DonatedError) as error:
            getattr(old, field)
        assert (
            str(error.value)
            == f"State.{field}\n  saw: this State was donated to step(state)\n  instead: {INSTEAD}"
        )
    assert isinstance(error.value, RuntimeError)


USES: dict[str, Callable[[Any], Any]] = {
    "flatten": tree_leaves,
    "flatten, nested": lambda s: tree_leaves({"a": [1, (s,)]}),
    "map": lambda s: tree_map(lambda x: x, s),
    "clone": clone,
    "evolve": lambda s: attrs.evolve(s, positions=None),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "donate": lambda s: donate(s, to="second(state)"),
    "donate, nested": lambda s: donate({"a": [s]}, to="second(state)"),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_dead_state_names_the_first_taker(use: str) -> None:
    old = state()
    donate(old, to="first(state)")
    with pytest.raises(DonatedError, match=r"this State was donated to first\(state\)"):
        USES[use](old)


def test_a_living_state_copies_and_pickles() -> None:
    s = state()
    for other in (copy.copy(s), copy.deepcopy(s), pickle.loads(pickle.dumps(s)), clone(s)):
        assert_equal("a copy", other, s)


def test_names_that_never_were_are_attribute_errors_dead_or_alive() -> None:
    s = state()
    for _ in range(2):
        with pytest.raises(AttributeError, match="'State' object has no attribute 'kv_page'"):
            attrgetter("kv_page")(s)
        assert getattr(s, "page", None) is None
        donate(s, to="step(state)") if not s._taken_by else None


def test_a_class_of_ones_own() -> None:
    old = Pair(torch.ones(2), "cat")
    new = donate({"deep": [old]}, to="f(pair)")["deep"][0]
    assert (new.x.tolist(), new.name) == ([1, 1], "cat")
    with pytest.raises(
        DonatedError, match=r"Pair\.name\n  saw: this Pair was donated to f\(pair\)"
    ):
        _ = old.name


def test_plain_tensors_are_marked_and_refused() -> None:
    old = torch.ones(2, 3)
    new = donate(old, to="f(x)")
    assert (new is old, new.data_ptr() == old.data_ptr()) == (False, True)
    refuse_donated(new, call="g(...)")
    refuse_donated("no tensor", call="g(...)")
    with pytest.raises(DonatedError) as error:
        refuse_donated(old, call="g(...)")
    assert (
        str(error.value)
        == f"g(...)\n  saw: a tensor of shape (2, 3) that was donated to f(x)\n  instead: {INSTEAD}"
    )
    with pytest.raises(
        DonatedError, match=r"^g\(x\)\n  saw: a tensor of shape \(2, 3\) that was donated to f\(x\)"
    ):
        donate([old], to="g(x)")


def test_a_chain_of_donations_kills_each_link_but_the_last() -> None:
    links = [torch.zeros(1)]
    for i in range(4):
        links.append(donate(links[-1], to=f"f{i}(x)"))
    refuse_donated(links[-1], call="g")
    for i, dead in enumerate(links[:-1]):
        with pytest.raises(DonatedError, match=rf"donated to f{i}\(x\)"):
            refuse_donated(dead, call="g")


def test_what_is_no_tensor_passes_and_structure_is_kept() -> None:
    tree = {"n": 3, "none": None, "s": "x", "t": (torch.ones(1), [torch.zeros(1)])}
    assert_equal("donated", donate(tree, to="f(x)"), tree)


def test_a_refused_donation_takes_nothing() -> None:
    dead = torch.zeros(2)
    live = torch.ones(2)
    table = Pair(torch.ones(1))
    donate(dead, to="first(x)")
    with pytest.raises(DonatedError, match=r"donated to first\(x\)"):
        donate([live, table, dead], to="second(x)")
    refuse_donated(live, call="g")
    assert table.x.tolist() == [1]


def test_one_tensor_twice_in_a_tree_is_said_to_be_that() -> None:
    """The error does not claim that the value was donated before, unlike the error for a dead
    value."""
    tied = torch.zeros(2)
    with pytest.raises(DonatedError) as caught:
        donate({"embed": tied, "head": tied}, to="f(state)")
    assert (
        str(caught.value)
        == "f(state)\n  saw: the same tensor at ['embed'] and ['head']: after the donation the two"
        " places cannot have different values\n  instead: donate it once, and use it in both places"
        " inside the function (a copy would become a second value)"
    )
    refuse_donated(tied, call="g")


def test_clone_has_storage_of_its_own_and_keeps_the_rest() -> None:
    tree = {"t": torch.ones(2), "p": Pair(torch.ones(1), "cat"), "n": 3}
    other = clone(tree)
    other["t"].fill_(5)
    other["p"].x.fill_(5)
    assert (tree["t"].tolist(), tree["p"].x.tolist(), other["p"].name, other["n"]) == (
        [1, 1],
        [1],
        "cat",
        3,
    )
    donate(tree, to="f(x)")
    refuse_donated(other["t"], call="g")


# The decorator
# -------------------------------------------------------------------------------------------------------


def test_the_decorator_donates_what_it_names_however_it_is_passed() -> None:
    @donates("s", "t")
    def f(x: Tensor, s: Tensor, *, t: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Doc."""
        return s.add_(x), t

    x, first, second = (torch.ones(2) for _ in range(3))
    f(x, first)
    f(x, s=second, t=x.clone())
    refuse_donated(x, call="g")
    for dead in (first, second):
        with pytest.raises(
            DonatedError,
            match=r"^f\(s\)\n  saw: a tensor of shape \(2,\) that was donated to f\(s\)",
        ):
            f(x, dead)
    assert (f.__name__, f.__doc__, donated_argnames(f)) == ("f", "Doc.", ("s", "t"))


def test_a_default_is_not_donated() -> None:
    default = torch.zeros(1)
    f = donates("s")(lambda s=default: s)
    assert (f() is default, f() is default) == (True, True)


def test_arguments_that_are_not_there_are_refused_at_once() -> None:
    problem = "f(state: torch.Tensor) -> torch.Tensor, which has no argument 'stat'"
    with refused(ArgumentError, "donates('state', 'stat')", problem, "one of state"):

        @donates("state", "stat")
        def f(state: Tensor) -> Tensor:
            return state

    problem = "g() -> None, which has no argument 'state'"
    with refused(ArgumentError, "donates('state', 'more')", problem, "one of (), for it has none"):

        @donates("state", "more")
        def g() -> None:
            """Nothing."""

    with refused(
        ArgumentError, "donates(f)", "an argument that is not a string", '@donates("state"), <any>'
    ):

        @donates  # type: ignore[arg-type]
        def f(state: Tensor) -> Tensor:
            return state


def test_a_call_that_does_not_bind_names_the_function() -> None:
    @donates("state")
    def f(state: Tensor, x: Tensor) -> Tensor:
        return state

    with pytest.raises(TypeError, match=r"^f\(state: .*: missing a required argument: 'x'"):
        f(torch.zeros(1))  # type: ignore[call-arg]


def test_a_wrong_call_donates_nothing() -> None:
    f = donates("s")(lambda s, x: s + x)
    s = torch.zeros(1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        f(s)
    assert f(s, 1).item() == 1


def test_decorators_one_upon_the_other_declare_both() -> None:
    assert set(donated_argnames(donates("b")(donates("a")(lambda a, b: (a, b))))) == {"a", "b"}


def test_undecorated_functions_donate_nothing() -> None:
    assert donated_argnames(lambda s: s) == ()


# torch.func
# ----------------------------------------------------------------------------------------------------------

X = torch.tensor([1.0, 2.0])
TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "grad": lambda f: grad(lambda s: f(s, X).sum())(X.clone()),
    "jvp": lambda f: jvp(lambda s: f(s, X), (X.clone(),), (torch.ones(2),)),
    "jacfwd": lambda f: torch.func.jacfwd(lambda s: f(s, X))(X.clone()),
    "jacrev": lambda f: torch.func.jacrev(lambda s: f(s, X))(X.clone()),
    "hessian": lambda f: hessian(lambda s: f(s, X).sum())(X.clone()),
    "vmap": lambda f: vmap(f)(torch.eye(2), torch.eye(2)),
    "vmap of grad": lambda f: vmap(grad(lambda s, x: f(s, x)))(X.clone(), X),
    "grad of grad": lambda f: grad(lambda a: grad(lambda b: (f(a * b, X)).sum())(X).sum())(
        X.clone()
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_donating_function_under_a_transform_is_the_function(name: str) -> None:
    def f(s: Tensor, x: Tensor) -> Tensor:
        return s**3 * x

    assert_equal(
        "donation changes no derivative", TRANSFORMS[name](donates("s")(f)), TRANSFORMS[name](f)
    )


def test_gradients_flow_through_a_donated_tensor() -> None:
    w = torch.ones(2, requires_grad=True)
    donates("s")(lambda s: (s * 3).sum())(w * 2).backward()
    assert_equal("gradient", w.grad, torch.full((2,), 6.0))


# the public transforms
# ------------------------------------------------------------------------------------------------

# Names of arguments that are trees of tensors, of a method.
TREES = {"params", "state", "batch", "batches", "tree", "args"}


def step(params: Any, state: Any, batch: Any) -> Any:
    return state, batch


def stage(params: Any, state: Any, batch: Any, x: Any) -> Any:
    return state, batch


def unchanged(state: Any, batch: Any, out: Any) -> Any:
    return state


def each_of(call: Callable[[Any, Any, Any], Any]) -> list[Callable[[Any], Any]]:
    """Calls of a step that have a tensor in one of their arguments."""
    return [
        lambda x: call([{"w": x}], [None], torch.ones(2)),
        lambda x: call([None], [{"w": x}], torch.ones(2)),
        lambda x: call([None], [None], {"w": x}),
    ]


PIPELINED = weft.pipeline([stage], advance=unchanged)
GRAPH = weft.graphify(step)
PIECES = weft.piecewise(lambda x: (x + 1).sort().values, split_at="aten::sort")
TRANSFORM = transforms.Transform(
    init=lambda params, state: None,
    apply=lambda f, transform_state, *rest: (transform_state, *f(*rest)),
)
ON_TWO = weft.Mesh(tensor=2)
SHARDED = weft.shard(lambda x: x, ON_TWO, weft.Replicate(), weft.Replicate())
# The public functions and methods that take trees of tensors: calls that are given one tensor.
REFUSE: dict[str, list[Callable[[Any], Any]]] = {
    "admit": [lambda x: weft.admit(x, [0], [[0]], [weft.SamplingParams()], [[1]])],
    "advance": [lambda x: weft.advance(x, weft.Batch.decode([0]), None)],
    "clone": [lambda x: weft.clone({"w": x})],
    "compose": each_of(weft.compose([stage])),
    "distribute": [lambda x: weft.distribute({"w": x}, ON_TWO, {"w": weft.Shard(0)})],
    "donate": [lambda x: weft.donate([x], to="f(x)")],
    "donates": [weft.donates("x")(lambda x: x)],
    "graphify": each_of(GRAPH),
    "launch": [lambda x: transforms.launch(print, 1, {"w": x})],
    "microbatch": each_of(weft.microbatch(step, 2)),
    "pad": [lambda x: weft.pad([x, weft.Batch.decode([0])], weft.BatchDescriptor.uniform(2))],
    "piecewise": [PIECES],
    "pipeline": each_of(weft.pipeline([stage], microbatches=2)),
    "scan": [*each_of(weft.scan(step, 2)), *each_of(weft.scan(PIPELINED, 2))],
    "shard": [SHARDED],
    "unpad": [lambda x: weft.unpad([x, weft.Batch.decode([0])], weft.BatchDescriptor.uniform(1))],
    "while_loop": [lambda x: weft.while_loop(lambda x: x.sum() < 1, lambda x: x, x)],
    "Compiled.__call__": [lambda x: PIECES.lower(torch.ones(2)).compile()(x)],
    "Graphified.__call__": each_of(GRAPH),
    "Graphified.capture": each_of(GRAPH.capture),
    "Graphified.compile_ahead": each_of(lambda *args: GRAPH.compile_ahead(*args)),
    "Graphified.explain": each_of(GRAPH.explain),
    "Graphified.lower": each_of(GRAPH.lower),
    "Graphified.memory_estimate": each_of(GRAPH.memory_estimate),
    "Pipelined.__call__": each_of(PIPELINED),
    "Pipelined.session": each_of(
        lambda p, s, b: PIPELINED.session(p, s).submit([b], [transforms.Job()])
    ),
    "Pipelined.stream": each_of(lambda p, s, b: PIPELINED.stream(p, s, [b])),
    "Session.submit": [lambda x: PIPELINED.session([None], [None]).submit([x], [transforms.Job()])],
    "Sharded.__call__": [SHARDED],
    "Sharded.programs": [SHARDED.programs],
    "Transform.__call__": each_of(lambda p, s, b: TRANSFORM(step)(p, Carried(s, None), b)),
    "Transform.carry": each_of(lambda p, s, b: TRANSFORM.carry([p, b], s)),
}
# What public functions call, which says the same to those who call it themselves.
PARTS: dict[str, list[Callable[[Any], Any]]] = {
    "join": [lambda x: join([{"x": x}], [x]), lambda x: join([x, x], [x, x])],
    "split": [lambda x: split(x, 1), lambda x: split({"x": x}, 2)],
}
# Those that accept a donated tensor, or take none, by the reason.
OTHERS = {
    "operators, which read tensors as torch's do": (
        "all_gather all_reduce all_to_all ppermute reduce_scatter"
    ),
    "it reads no value": "inert",
    "another function is called as it is": "lift",
    "a whole model, which the steps of an engine take": (
        "generate logprobs make_runner make_state verify Engine.update"
    ),
    "no tensors": (
        """assert_max_captures axes axis_index axis_size batch_invariant check check_borrowed clear_caches
    compare decode_jobs descriptor_field dispatch dispatch_table interleaved load load_adapter
    make_ladder make_programs make_timeline measure no_capture plan_cohorts pytree simulate static weave"""
    ),
}


def public_calls() -> set[str]:
    """The public functions, and the methods that take trees."""
    names: set[str] = set()
    for face in ("weft", "weft.transforms"):
        for name in names_of(face):
            value = getattr(import_module(face), name)
            if inspect.isfunction(value):
                names.add(name)
            methods = vars(value).items() if inspect.isclass(value) else ()
            for method, function in methods:
                takes = (
                    TREES & inspect.signature(function).parameters.keys()
                    if inspect.isfunction(function)
                    else ()
                )
                if takes and (method == "__call__" or not method.startswith("_")):
                    names.add(f"{name}.{method}")
    return names


def test_each_public_function_refuses_donated_tensors_or_says_why_not() -> None:
    exempt = " ".join(OTHERS.values()).split()
    # Which takes a step, and returns one
    assert public_calls() | {"Transform.__call__"} == {
        *REFUSE,
        *exempt,
    }
    assert not {*REFUSE} & {*exempt}


@pytest.mark.parametrize(
    ("name", "index"),
    [(name, i) for name, calls in (REFUSE | PARTS).items() for i in range(len(calls))],
)
def test_a_donated_tensor_is_refused_by(name: str, index: int) -> None:
    call = (REFUSE | PARTS)[name][index]
    old = torch.ones(2)
    donate(old, to="first(x)")
    with pytest.raises(
        DonatedError, match=r"a tensor of shape \(2,\) that was donated to first\(x\)"
    ):
        call(old)


UNDER: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda f, x: grad(f)(x),
    "vmap": lambda f, x: vmap(f)(x),
    "grad in vmap": lambda f, x: vmap(grad(f))(x),
}


@pytest.mark.parametrize("name", UNDER)
def test_a_transform_of_torch_func_does_not_hide_that_a_tensor_was_donated(name: str) -> None:
    old = torch.ones(2)
    donate(old, to="first(x)")
    scanned = weft.scan(lambda params, state, batch: (state, batch.sum()), 1)
    for f in (weft.graphify(lambda x: x.sum()), lambda x: scanned(None, None, x)[1][0]):
        with pytest.raises(DonatedError, match=r"that was donated to first\(x\)"):
            UNDER[name](f, old)
