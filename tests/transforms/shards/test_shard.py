"""`shard`: DTensor as the oracle, states written in place, derivatives, branches on the rank, and
programs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusal import refused
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Partial as TorchPartial,
    Replicate as TorchReplicate,
    Shard as TorchShard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from weft.effects import parse_listing
from weft.errors import DerivativeError, MeshError
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.transports.launch import launch
from weft.values.donation import donates

TWO = weft.Mesh(tensor=2)
HEADS = 4
HIDDEN = 16
VOCABULARY = 24


def tensors() -> dict[str, Tensor]:
    """Parameters, and inputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "up": (HIDDEN, 32),
        "down": (32, HIDDEN),
        "embedding": (VOCABULARY, HIDDEN),
        "x": (6, HIDDEN),
    }
    shapes |= dict.fromkeys(("q", "k", "v", "o"), (HIDDEN, HIDDEN))
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Megatron's feed-forward block, up to the sum."""
    return torch.relu(x @ params["up"]) @ params["down"]


def attention(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Attention by heads, up to the sum."""
    q, k, v = (
        (x @ params[name]).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(0, 1) for name in "qkv"
    )
    mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
    return mixed.transpose(0, 1).flatten(1) @ params["o"]


def column(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A linear layer by columns."""
    return x @ params["up"]


def embedding(params: dict[str, Tensor], ids: Tensor) -> Tensor:
    """An embedding by rows of the vocabulary, up to the sum."""
    rows = ids - weft.axis_index("tensor") * len(params["embedding"])
    holds = (rows >= 0) & (rows < len(params["embedding"]))
    return torch.where(holds[:, None], params["embedding"][torch.where(holds, rows, 0)], 0)


BY_HEADS = {"q": 1, "k": 1, "v": 1, "o": 0}
BLOCKS: dict[str, tuple[Any, dict[str, int]]] = {
    "mlp": (mlp, {"up": 1, "down": 0}),
    "attention": (attention, BY_HEADS),
    "column": (column, {"up": 1}),
    "embedding": (embedding, {"embedding": 0}),
}
IDS = torch.tensor([0, 5, 11, 12, 23, 6])


def of_dtensor(path: str, count: int) -> dict[str, Tensor]:
    """What DTensor gives for each block on this rank, whole."""
    dist.init_process_group(
        "gloo", rank=int(os.environ["RANK"]), world_size=count, store=dist.FileStore(path, count)
    )
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("tensor",))
    full_tensors = tensors()
    outputs = {}
    for name, (block, cuts) in BLOCKS.items():
        sharded_params = {
            key: distribute_tensor(full_tensors[key], mesh, [TorchShard(dim)])
            for key, dim in cuts.items()
        }
        if name == "embedding":
            ids = distribute_tensor(IDS, mesh, [TorchReplicate()])
            output = torch.nn.functional.embedding(ids, sharded_params["embedding"])
        else:
            output = block(
                sharded_params, distribute_tensor(full_tensors["x"], mesh, [TorchReplicate()])
            )
        outputs[name] = output.full_tensor()
    dist.destroy_process_group()
    return outputs


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_blocks_are_those_of_dtensor(count: int, tmp_path: Path) -> None:
    full_tensors = tensors()
    theirs = launch(of_dtensor, count, str(tmp_path / "store"), count)
    for name, (block, cuts) in BLOCKS.items():
        params = {key: full_tensors[key] for key in cuts}
        out = weft.Shard(1) if name == "column" else weft.Partial()
        step = weft.shard(
            block,
            weft.Mesh(tensor=count),
            ({k: weft.Shard(d) for k, d in cuts.items()}, weft.Replicate()),
            out,
        )
        output = step(params, IDS if name == "embedding" else full_tensors["x"])
        for rank in range(count):
            assert torch.allclose(output, theirs[rank][name], atol=1e-5), name


def test_placements_of_torch_and_a_device_mesh() -> None:
    full_tensors = tensors()
    placed = {"up": TorchShard(1), "down": TorchShard(0)}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()
    step = weft.shard(mlp, mesh, (placed, TorchReplicate()), TorchPartial())
    params = {key: full_tensors[key] for key in placed}
    assert step.mesh == TWO
    assert torch.allclose(
        step(params, full_tensors["x"]), mlp(full_tensors, full_tensors["x"]), atol=1e-5
    )


@donates("state")
def counting(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Writes its state in place."""
    state["rows"].add_(1)
    state["all"].add_(weft.all_reduce(x.sum(), "tensor"))
    return state, x


PLACED = {"rows": weft.Shard(0), "all": weft.Replicate()}


def undonated(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As `counting`, without a word of what it writes."""
    state["rows"].add_(1)
    state["all"].add_(weft.all_reduce(x.sum(), "tensor"))
    return state, x


@pytest.mark.parametrize("fn", [counting, undonated])
def test_a_state_that_is_written_in_place_is_the_same_tensor(fn: Any) -> None:
    step = weft.shard(fn, TWO, (PLACED, weft.Shard(0)), (PLACED, weft.Shard(0)))
    state = {"rows": torch.zeros(4), "all": torch.zeros(())}
    for count in (1, 2):
        new, _ = step(state, torch.ones(4))
        assert all(new[name] is state[name] for name in state)
        assert (state["rows"].tolist(), state["all"].item()) == ([count] * 4, 4 * count)


def test_on_two_axes_what_ranks_share_is_written_once() -> None:
    placed = {"rows": weft.Placements(tensor=weft.Shard(0)), "all": weft.Replicate()}
    step = weft.shard(
        counting,
        weft.Mesh(data=2, tensor=2),
        (placed, weft.Replicate()),
        (placed, weft.Replicate()),
    )
    state, _ = step({"rows": torch.zeros(4), "all": torch.zeros(())}, torch.ones(3))
    assert (state["rows"].tolist(), state["all"].item()) == ([1] * 4, 6)


def test_an_argument_that_is_returned_is_the_same_tensor() -> None:
    x = torch.ones(4)
    step = weft.shard(
        lambda x, y: (x, x[:1], y),
        TWO,
        weft.Shard(0),
        (weft.Shard(0), weft.Shard(0), weft.Shard(0)),
    )
    same, parts, other = step(x, 2 * x)
    assert same is x
    assert parts.tolist() == [1, 1]
    assert other.tolist() == [2] * 4


def test_each_rank_has_a_tree_of_its_own() -> None:
    def f(tree: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        tree["n"].add_(1)
        return tree["n"], weft.all_reduce(x * tree["n"], "tensor")

    step = weft.shard(
        f, TWO, (weft.PerRank(), weft.Replicate()), (weft.PerRank(), weft.Replicate())
    )
    trees = {"n": torch.tensor([1.0])}, {"n": torch.tensor([10.0])}
    counts, total = step(trees, torch.tensor([2.0]))
    assert [n.item() for n in counts] == [2, 11]
    assert counts[0] is trees[0]["n"]
    assert total.item() == 26


WRITERS: dict[str, Any] = {
    "all_reduce": lambda x: weft.all_reduce(x.sum(0, keepdim=True), "tensor").add_(1),
    "all_gather": lambda x: weft.all_gather(x, "tensor").mul_(2),
    "gathered": lambda x: weft.all_gather(
        weft.all_reduce(x.sum(0, keepdim=True), "tensor").add_(1), "tensor"
    )[:1],
    "all_to_all": lambda x: weft.all_gather(
        weft.all_to_all(x, "tensor", split_dim=1, concat_dim=0).mul_(2), "tensor", dim=1
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_rank_may_write_its_result_in_place(name: str) -> None:
    x = torch.arange(16.0).view(4, 4)
    one, *results = (
        weft.shard(WRITERS[name], weft.Mesh(tensor=count), weft.Shard(0), weft.Replicate())(x)
        for count in (1, 2, 4)
    )
    assert all(torch.equal(other, one) for other in results)


def test_what_a_rank_gave_is_not_written_with_its_result() -> None:
    def f(x: Tensor) -> Tensor:
        operand = x * 1
        weft.all_reduce(operand, "tensor").zero_()
        weft.reduce_scatter(operand, "tensor").zero_()
        return operand

    assert weft.shard(f, weft.Mesh(tensor=1), weft.Replicate(), weft.Replicate())(
        torch.ones(2)
    ).tolist() == [1, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_results_are_contiguous(count: int) -> None:
    def f(x: Tensor) -> Tensor:
        both = weft.all_reduce(x.t(), "tensor", reduce_op="max").contiguous().view(-1)
        return both + weft.all_gather(
            weft.reduce_scatter(x.t(), "tensor", reduce_op="max").view(-1), "tensor"
        )

    x = torch.arange(8.0).view(2, 4)
    step = weft.shard(f, weft.Mesh(tensor=count), weft.Replicate(), weft.Replicate())
    assert torch.equal(step(x), 2 * x.t().reshape(-1))


def by_func(loss: Any, x: Tensor) -> Tensor:
    """The gradient by torch.func."""
    gradient: Tensor = torch.func.grad(loss)(x)
    return gradient


def by_autograd(loss: Any, x: Tensor) -> Tensor:
    """The gradient by autograd."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]


def forwards(loss: Any, x: Tensor) -> Tensor:
    """A derivative by torch.func.jvp."""
    tangent: Tensor = torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
    return x * tangent


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("derive", [by_func, by_autograd, forwards])
def test_a_derivative_inside_does_not_pass_a_collective(derive: Any, follows: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        return weft.all_reduce(x.sum(), "tensor") ** 2 + x.sum()

    def f(x: Tensor) -> Tensor:
        result: Tensor = derive(loss, x)
        return result

    problem = (
        "a derivative inside the function that weft.shard runs, which does not come back from the"
        " other ranks"
    )
    instead = (
        "torch.func.grad(weft.shard(f, ...)); or the collective after the derivative, on its result"
    )
    with refused(DerivativeError, "'all_reduce sum among 0, 1 [mb 0]'", problem, instead):
        weft.shard(f, TWO, weft.Shard(0), weft.Shard(0))(torch.ones(4, requires_grad=follows))


@pytest.mark.parametrize("derive", [by_func, by_autograd])
def test_a_collective_may_follow_a_derivative(derive: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return weft.all_reduce(derive(lambda y: (y * y).sum(), x).sum(), "tensor")

    assert weft.shard(f, TWO, weft.Shard(0), weft.Replicate())(torch.ones(4)).item() == 8


def test_vmap_inside_passes_a_collective() -> None:
    def f(x: Tensor) -> Tensor:
        sums: Tensor = torch.vmap(lambda row: weft.all_reduce(row.sum(), "tensor"))(x)
        return sums

    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(weft.shard(f, TWO, weft.Shard(1), weft.Replicate())(x), x.sum(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_terms_of_a_result_are_added_up_as_all_reduce_does(dtype: torch.dtype) -> None:
    x = torch.tensor([[60000.0, 1.0], [60000.0, 0.002], [-60000.0, 0.003], [-60000.0, 0.004]]).to(
        dtype
    )
    mesh = weft.Mesh(tensor=4)
    whole = weft.shard(
        lambda x: weft.all_reduce(x.sum(0), "tensor"), mesh, weft.Shard(0), weft.Replicate()
    )(x)
    assert whole[0] == 0
    assert torch.equal(
        weft.shard(lambda x: x.sum(0), mesh, weft.Shard(0), weft.Partial())(x), whole
    )


def test_a_branch_on_the_rank_is_part_of_its_program() -> None:
    def f(x: Tensor) -> Tensor:
        return weft.all_reduce(x if weft.axis_index("tensor") == 0 else x * 10, "tensor")

    assert weft.shard(f, TWO, weft.Replicate(), weft.Replicate())(torch.ones(1)).item() == 11


def test_arguments_may_be_named() -> None:
    def scaled(x: Tensor, by: Tensor, *, power: int = 1) -> Tensor:
        return weft.all_reduce(x.pow(power) * by, "tensor")

    run = weft.shard(scaled, TWO, (weft.Shard(0), weft.Replicate()), weft.Replicate())
    x, by = torch.ones(4), torch.tensor(3.0)
    assert torch.equal(run(by=by, x=x), run(x, by))
    assert run.programs(x, by=by) == run.programs(x, by)
    call = "weft.shard(scaled, Mesh(tensor=2), ...)(...)"
    with refused(MeshError, call, "missing a required argument: 'by'", "the arguments of scaled"):
        run(x=x)
    instead = "functools.partial(scaled, ...), or a positional parameter"
    with refused(MeshError, call, "power, a parameter by name alone", instead):
        run(x, by, power=2)


def test_vmap_gives_a_reshape_other_strides() -> None:
    def mixed(x: Tensor) -> Tensor:
        heads = x.view(3, -1, 2, 4).transpose(1, 2)
        heads = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return weft.all_reduce(heads.transpose(1, 2).reshape(3, -1, 8), "tensor")

    run = weft.shard(mixed, TWO, weft.Shard(2), weft.Replicate())
    xs = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.func.vmap(run)(xs), torch.stack([run(x) for x in xs]))


def test_values_that_are_no_tensors_pass() -> None:
    def f(x: Tensor, scale: int, name: str) -> tuple[Tensor, str, int]:
        return x * scale, name, weft.axis_size("tensor")

    step = weft.shard(f, TWO, weft.Shard(0), (weft.Shard(0), weft.Replicate(), weft.Replicate()))
    assert [str(value) for value in step(torch.ones(2), 3, "n")] == ["tensor([3., 3.])", "n", "2"]
    assert step(torch.ones(2), 4, "n")[0].tolist() == [4, 4]


LAZY: dict[str, Any] = {"conj": torch.Tensor.conj, "neg": lambda x: x.conj().imag}


def parts(x: Tensor) -> Tensor:
    """The real and imaginary part, as an operator that takes no conjugates gives them."""
    return (
        torch.view_as_real(x.resolve_conj()) * 2
        if x.is_complex()
        else x.resolve_neg().view(torch.int32) * 1
    )


@pytest.mark.parametrize("name", LAZY)
def test_a_conjugate_and_a_negative_have_traces_of_their_own(name: str) -> None:
    """They have the shape, strides and dtype of a tensor that is neither, and other bits."""
    one = LAZY[name](torch.complex(torch.arange(4.0), torch.arange(4.0) + 1))
    assert one.is_conj() or one.is_neg()
    plain = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).copy_(one)
    step = weft.shard(parts, TWO, weft.Shard(0), weft.Shard(0))
    for argument in (plain, one, plain):
        assert torch.equal(step(argument), parts(plain))


def test_programs_print_and_parse_back() -> None:
    full_tensors = tensors()
    step = weft.shard(
        lambda params, x: weft.all_reduce(mlp(params, x), "tensor"),
        TWO,
        ({"up": weft.Shard(1), "down": weft.Shard(0)}, weft.Replicate()),
        weft.Replicate(),
    )
    programs = step.programs(
        {name: full_tensors[name] for name in ("up", "down")}, full_tensors["x"]
    )
    assert str(programs[1]).splitlines() == [
        "rank 1 of 2",
        "  run part 0 [mb 0]",
        "  all_reduce sum among 0, 1 [mb 0]: x[6, 16] float32",
        "  run part 1 [mb 0]",
    ]
    assert parse_listing(str(programs[0])) == programs[:1]
    assert parse_listing("\n".join(map(str, programs))) == programs


def test_a_graph_may_be_the_first_call() -> None:
    step = graphify(
        weft.shard(lambda x: weft.all_reduce(x + 1, "tensor"), TWO, weft.Shard(0), weft.Replicate())
    )
    assert [step(torch.full((2,), float(i))).item() for i in range(3)] == [2, 4, 6]


def test_it_prints_as_its_function_on_its_mesh() -> None:
    assert (
        repr(weft.shard(mlp, TWO, weft.Replicate(), weft.Replicate()))
        == "<Sharded mlp on Mesh(tensor=2)>"
    )
