"""torch's tests of random numbers, modules and optimizers in CUDA graphs, as scenarios of
`graphify`, on tapes too.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import captures
from torch import Tensor, nn

from weft.errors import CaptureError
from weft.transforms.graphs.graphify import graphify


def seed(device: str, value: int) -> torch.Generator:
    """Seed the default generator of a device, and return one of the same seed."""
    torch.manual_seed(value)
    return torch.Generator(device).manual_seed(value)


# Random numbers
# -------------------------------------------------------------------------------------------------------


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.1),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", NOISE)
def test_replays_and_eager_draws_share_a_sequence(name: str, device: str) -> None:
    """torch: TestCuda.test_graph_rng_functional"""
    noise = NOISE[name]
    g = graphify(lambda x: noise(noise(x)))
    x = torch.randn(1000, device=device)
    g(x)
    for value in (5, 6, 128, 9999):
        seed(device, value)
        expected = x
        for _ in range(6):
            expected = noise(expected)
        seed(device, value)
        assert torch.equal(g(noise(noise(g(x)))), expected)
    assert captures(g) == 1


P = torch.full((1000,), 0.3)

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "normal": lambda x: torch.normal(x + 1, 1.0),
    "poisson": torch.poisson,
    "rand": lambda x: torch.rand(1000, device=x.device),
    "randint": lambda x: torch.randint(0, 3, (1000,), device=x.device),
    "randn": lambda x: torch.randn(1000, device=x.device),
    "bernoulli_": lambda x: x.clone().bernoulli_(x),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "normal_": lambda x: x.clone().normal_(),
    "random_": lambda x: x.clone().random_(),
    "uniform_": lambda x: x.clone().uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_distribution_draws_on(name: str, device: str) -> None:
    """torch: TestCuda.test_graph_rng_distributions"""
    draw, x = DRAWS[name], P.to(device)
    g = graphify(lambda x: (draw(x), draw(x)))
    seed(device, 5)
    first = g(x)
    for value in (5, 6, 314, 271):
        seed(device, value)
        _, *expected = draw(x), draw(x), draw(x)
        seed(device, value)
        draw(x)
        assert [torch.equal(a, b) for a, b in zip(g(x), expected, strict=True)] == [True, True]
    assert not torch.equal(*first)
    assert captures(g) == 1


def test_two_generators_advance_apart(device: str) -> None:
    """torch: TestCuda.test_graphsafe_set_get_rng_state; differs: generators are arguments, and no
    state is set inside"""

    def draws(x: Tensor, a: torch.Generator, b: torch.Generator) -> Any:
        return [torch.rand(5, device=x.device, generator=generator) for generator in (b, a, a)]

    g = graphify(draws)
    x = torch.ones(1, device=device)
    mine = [torch.Generator(device).manual_seed(n) for n in (0, 1)]
    theirs = [torch.Generator(device).manual_seed(n) for n in (0, 1)]
    for _ in range(3):
        for result, expected in zip(g(x, *mine), draws(x, *theirs), strict=True):
            assert torch.equal(result, expected)
        for graph_generator, other in zip(mine, theirs, strict=True):
            assert torch.equal(graph_generator.get_state(), other.get_state())


def test_a_seed_inside_is_refused(device: str) -> None:
    """torch: TestCuda.test_graph_manual_seed_mismatch_raises"""
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match="it seeds a random generator"):
        graphify(lambda x: (torch.manual_seed(1), x + torch.rand(1, device=x.device))[1])(
            torch.ones(2, device=device)
        )
    assert torch.equal(torch.get_rng_state(), before)


def gradient_of_checkpoint(x: Tensor, preserve: bool) -> Tensor:
    def noisy(x: Tensor) -> Tensor:
        return x * torch.sigmoid(torch.randn(1, device=x.device))

    leaf = x.detach().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(
        noisy, leaf, use_reentrant=False, preserve_rng_state=preserve
    )
    return torch.autograd.grad(y.sum(), leaf)[0]


def test_a_checkpoint_that_restores_the_generator_is_refused(device: str) -> None:
    """torch: TestCuda.test_graph_checkpoint_preserve_rng_state; refused: it sets the generator's
    state in the backward"""
    with pytest.raises(CaptureError, match="it seeds a random generator, or sets its state"):
        graphify(gradient_of_checkpoint, static_argnames="preserve")(
            torch.ones(3, device=device), True
        )


def test_a_checkpoint_that_draws_again(device: str) -> None:
    """torch: TestCuda.test_graph_checkpoint_preserve_rng_state (preserve_rng_state=False)"""
    g = graphify(gradient_of_checkpoint, static_argnames="preserve")
    x = torch.ones(3, device=device)
    for value in (1, 2):
        seed(device, value)
        expected = gradient_of_checkpoint(x, False)
        seed(device, value)
        assert torch.equal(g(x, False), expected)


# Modules, gradients, optimizers
# ---------------------------------------------------------------------------------------


def test_an_lstm_with_dropout() -> None:
    """torch: TestCuda.test_graph_cudnn_dropout (on the tape)"""
    model = nn.LSTM(8, 8, 2, dropout=0.5)
    x = torch.ones(10, 4, 8)
    g = graphify(model)
    with torch.no_grad():
        for value in (1, 2):
            seed("cpu", value)
            expected = model(x)[0], model(x)[0]
            seed("cpu", value)
            assert torch.equal(g(x)[0], expected[0])
            assert torch.equal(model(x)[0], expected[1])


@pytest.mark.gpu
def test_an_lstm_with_dropout_on_a_gpu() -> None:
    """torch: TestCuda.test_graph_cudnn_dropout; refused: cuDNN draws from a state of its own,
    seeded on the host"""
    model = nn.LSTM(8, 8, 2, dropout=0.5).cuda()
    x = torch.ones(10, 4, 8, device="cuda")
    with torch.no_grad():
        model(x)
        with pytest.raises(CaptureError, match="read on the host"):
            graphify(model)(x)
        model.eval()
        expected = model(x)[0]
        g = graphify(model)
        for _ in range(2):
            torch.testing.assert_close(g(x)[0], expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_training_a_module_with_dropout(autocast: bool, device: str) -> None:
    """torch: TestCuda.test_graph_make_graphed_callables; differs: modules run inline under
    autograd, and a step with its gradient inside replays"""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2), nn.Dropout(0.2)).to(
        device
    )

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return nn.functional.mse_loss(
                torch.func.functional_call(model, params, (x,)).float(), y
            )

    def step(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        gradients, value = torch.func.grad_and_value(loss)(weights, x, y)
        return {name: w - 0.1 * gradients[name] for name, w in weights.items()}, value

    g = graphify(step, donate_argnames="weights")
    eager_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = {name: p.clone() for name, p in eager_weights.items()}
    batches = [
        (torch.randn(6, 4, device=device), torch.randn(6, 2, device=device)) for _ in range(5)
    ]
    seed(device, 7)
    losses = []
    for x, y in batches:
        eager_weights, value = step(eager_weights, x, y)
        losses.append(value)
    seed(device, 7)
    for (x, y), expected in zip(batches, losses, strict=True):
        other, value = g(other, x, y)
        torch.testing.assert_close(value, expected)
    torch.testing.assert_close(other, eager_weights)
    assert captures(g) == 1


def test_backward_through_a_graphified_module_runs_it_inline(device: str) -> None:
    """torch: TestCuda.test_graph_make_graphed_callables,
    test_graph_make_graphed_callables_same_pool; differs: no graph of the backward"""
    models = [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device) for _ in range(3)
    ]
    for model in models:
        x = torch.randn(3, 4, device=device)
        expected = torch.autograd.grad(model(x).norm(), [*model.parameters()])
        gradients = torch.autograd.grad(graphify(model)(x).norm(), [*model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_module_without_parameters(device: str) -> None:
    """torch: TestCuda.test_graph_make_graphed_callables_parameterless_nograd_module"""

    class Gather(nn.Module):
        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            x = inputs["x"]
            index = torch.arange(x.size(0), device=x.device).view(-1, 1).repeat(1, x.size(1))
            return {"output": torch.gather(x, 0, index)}

    model = Gather()
    g = graphify(model)
    for training in (True, False):
        model.train(training)
        for _ in range(2):
            batch = {"x": torch.randn(4, 3, device=device), "unused": torch.randn(2, device=device)}
            assert torch.equal(g(batch)["output"], batch["x"])
    assert captures(g) == 2


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"])
def test_an_optimizer_of_torch_is_refused(name: str, device: str) -> None:
    """torch: TestCuda.test_graph_optims_with_explicitly_capturable_param_groups,
    TestCudaOptims.test_graph_optims; refused: it reads `.grad` and writes to parameters that the
    function does not own"""
    weight = nn.Parameter(torch.ones(3, device=device))
    options = {"capturable": True} if device == "cuda" and name not in ("SGD", "Adagrad") else {}
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
    weight.grad = torch.ones_like(weight)
    # Where torch has CUDA, some optimizers ask about a capture themselves.
    with pytest.raises(
        RuntimeError, match=r"grad of a tensor from outside|does not own|capturable is False"
    ):
        graphify(optimizer.step)()
    assert weight.tolist() == [1, 1, 1]


def test_a_loss_scaler(device: str) -> None:
    """torch: TestCudaOptims.test_graph_grad_scaling; differs: the scale is an argument, because a
    graph keeps no state"""

    def scaled_gradient(w: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return torch.func.grad(lambda w: (w * x).sum() * scale)(w) / scale

    g = graphify(scaled_gradient)
    w, x = torch.ones(3, device=device), torch.arange(3.0, device=device)
    for scale in (4.0, 2.0):
        assert torch.equal(g(w, x, torch.tensor(scale, device=device)), x)
    assert captures(g) == 1


def test_the_running_statistics_of_a_batch_norm_are_refused(device: str) -> None:
    """torch: TestCuda.test_graph_make_graphed_callables (with batch norm); refused: the module's
    buffers are not arguments"""
    with torch.no_grad(), pytest.raises(CaptureError, match="writes to a tensor from outside it"):
        graphify(nn.BatchNorm1d(2).to(device))(torch.ones(3, 2, device=device))
