"""`Operation`: one statement of a random program, as text with placeholders for tensors;
`OPERATIONS` lists them by kind."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Operation:
    """One statement of a random program.

    Args:
        text: an expression, or statements that name `{out}`; `{a}` and `{b}` stand for tensors.
        fits: whether the operation applies to given tensors; it is called before the text is run.
        writes: whether it writes to `{a}`.
    """

    text: str
    fits: Callable[..., bool]
    writes: bool = False

    @property
    def arity(self) -> int:
        """The number of tensors that it takes."""
        return ("{a}" in self.text) + ("{b}" in self.text)


def _any(a: Tensor) -> bool:
    return True


def _real(a: Tensor) -> bool:
    return a.dtype in (torch.float32, torch.float64)


def _number(a: Tensor) -> bool:
    return a.dtype != torch.bool


def _complex(a: Tensor) -> bool:
    return a.is_complex()


def _rows(a: Tensor) -> bool:
    """Whether a real tensor has a last dimension that can be sorted."""
    return _real(a) and a.dim() > 0 and a.shape[-1] > 0


def _matrix(a: Tensor) -> bool:
    return a.dim() == 2 and _real(a)


def _square(a: Tensor) -> bool:
    return _matrix(a) and a.shape[0] == a.shape[1] > 0


def _sized(a: Tensor) -> bool:
    return a.dim() > 0 and a.shape[0] > 0


def _two(a: Tensor) -> bool:
    return a.dim() == 2


def _broadcast(a: Tensor, b: Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return (
        not a.is_complex() and not b.is_complex() and all(n == m or 1 in (n, m) for n, m in pairs)
    )


def _into(a: Tensor, b: Tensor) -> bool:
    """Whether b can be written into a."""
    return _broadcast(a, b) and _real(a) and torch.broadcast_shapes(a.shape, b.shape) == a.shape


def _of_three(a: Tensor) -> bool:
    return a.dtype == torch.float32 and a.dim() > 0 and a.shape[-1] == 3


def _product(a: Tensor, b: Tensor) -> bool:
    return _matrix(a) and _matrix(b) and a.dtype == b.dtype and a.shape[1] == b.shape[0]


def _linear(a: Tensor, b: Tensor) -> bool:
    return _matrix(a) and _matrix(b) and a.dtype == b.dtype and a.shape[1] == b.shape[1]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.dim() > 0


def _operations(
    fits: Callable[..., bool], *texts: str, writes: bool = False
) -> tuple[Operation, ...]:
    return tuple(Operation(text, fits, writes) for text in texts)


# Losses whose derivatives save tensors, sort, or branch on values: what a capture could freeze.
_LOSSES = (
    "q.square().sum()",
    "q.norm()",
    "(q.sin() * q).sum()",
    "q.cumsum(-1).amax(-1).sum()",
    "q.softmax(-1)[..., 0].sum()",
    "q.sort(-1).values[..., 0].sum()",
    "(q.t() @ q).sum()",
    "torch.where(q > 0, q, 0.1 * q).sum()",
)
_MAPPED = (
    "q * 2",
    "q.sin() + q.sum(-1, keepdim=True)",
    "q.clone().mul_(3)",
    "q[..., :1] - q",
    "q.cumprod(-1)",
)


def _derivatives(texts: Sequence[str]) -> tuple[Operation, ...]:
    return tuple(
        Operation(text.replace("LOSS", loss), _matrix if ".t()" in loss else _rows)
        for loss in _LOSSES
        for text in texts
    )


OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "pointwise": (
        *_operations(
            _number, "{a} + 1", "{a} * 2", "-{a}", "{a}.clone()", "{a}.square()", "{a}.abs()"
        ),
        *_operations(
            _real,
            "{a}.sin()",
            "{a}.exp()",
            "{a}.sigmoid()",
            "torch.relu({a})",
            "{a} / 3",
            "{a}.float()",
        ),
        *_operations(
            _real,
            "{a}.double()",
            "{a}.to(torch.bfloat16).float()",
            "{a}.long()",
            "{a} > 0",
            "{a} + 1j",
        ),
        *_operations(
            _real,
            "torch.where({a} > 0, {a}, -{a})",
            "torch.nn.functional.gelu({a})",
            "{a}.clamp(-0.5, 0.5)",
        ),
        *_operations(
            _broadcast,
            "{a} + {b}",
            "{a} * {b}",
            "torch.maximum({a}, {b})",
            "torch.where({a} > 0, {a}, {b})",
        ),
    ),
    "reduction": (
        *_operations(
            _real, "{a}.sum()", "{a}.mean()", "{a}.norm()", "{a}.prod()", "{a}.square().mean()"
        ),
        *_operations(
            _rows,
            "{a}.max()",
            "{a}.amax(-1)",
            "{a}.softmax(-1)",
            "{a}.cumsum(-1)",
            "{a}.logsumexp(0)",
        ),
        *_operations(
            _rows,
            "{a}.sort(-1).values",
            "{a}.argsort(-1)",
            "{a}.sum(0, keepdim=True)",
            "{a}.flip(0)",
        ),
    ),
    "matrix": (
        *_operations(_product, "{a} @ {b}", "torch.addmm({a}[:, :1], {a}, {b})"),
        *_operations(_linear, "torch.nn.functional.linear({a}, {b})", "torch.cat([{a}, {b}])"),
        *_operations(_alike, "torch.stack([{a}, {b}])", "torch.cat([{a}, {b}], -1)"),
        *_operations(
            _matrix, "{a} @ {a}.t()", "torch.nn.functional.layer_norm({a}, {a}.shape[1:])"
        ),
        *_operations(_of_three, "layer({a})", "layer({a}).relu()"),
        *_operations(_square, "{a}.tril()", "torch.linalg.matrix_power({a}, 3)"),
    ),
    "view": (
        *_operations(
            _sized,
            "{a}[:1]",
            "{a}[1:]",
            "{a}[::2]",
            "{a}[-1]",
            "{a}.unbind(0)[0]",
            "{a}.unfold(0, 1, 1)",
        ),
        *_operations(
            _two,
            "{a}.t()",
            "{a}.diagonal()",
            "{a}[:, ::2]",
            "{a}.as_strided(({a}.shape[1],), (1,))",
        ),
        *_operations(
            _any, "{a}.unsqueeze(0)", "{a}.expand(2, *{a}.shape)", "{a}.reshape(-1)", "{a}.detach()"
        ),
        *_operations(_any, "{a}.view_as({a})", "{a}.contiguous()"),
        *_operations(
            _complex,
            "{a}.real",
            "{a}.imag",
            "{a}.conj()",
            "torch.view_as_real({a})",
            "{a}.conj().imag",
        ),
    ),
    "in place": (
        *_operations(
            _real,
            "{a}.add_(1)",
            "{a}.mul_(0.5)",
            "{a}.zero_()",
            "{a}[...] = 2",
            "{a}.sin_()",
            writes=True,
        ),
        *_operations(_real, "{a}.masked_fill_({a} > 0, 0.5)", "{a}.clamp_(-1, 1)", writes=True),
        *_operations(
            _rows,
            "{a}[..., 0] += 1",
            "{a}[..., :1].copy_({a}[..., -1:])",
            "{a}[0] = -1",
            writes=True,
        ),
        *_operations(_two, "{a}.t_()", "{a}.diagonal().zero_()", writes=True),
        *_operations(_into, "{a}.add_({b})", "{a}.copy_({b})", "{a}[...] = {b}", writes=True),
        *_operations(_into, "torch.mul({a}, {b}, out={a})", writes=True),
    ),
    "random": (
        *_operations(_real, "torch.rand_like({a})", "torch.nn.functional.dropout({a}, 0.5)"),
        # `bernoulli` of NaN makes a CUDA device fail.
        *_operations(_real, "{a}.sigmoid().nan_to_num(0.5).bernoulli()"),
        *_operations(
            _real, "torch.empty_like({a}).normal_()", "{a} + torch.randn({a}.shape, device=device)"
        ),
        *_operations(_real, "{a} + torch.rand({a}.shape, generator=generator, device=device)"),
        *_operations(
            _real,
            "torch.empty_like({a}).uniform_(generator=generator)",
            "torch.randperm(3, device=device)",
        ),
    ),
    "autograd": (
        *_derivatives(("torch.func.grad(lambda q: LOSS)({a})",)),
        *_derivatives(
            (
                (
                    "with torch.enable_grad():\n    q = {a}.detach().requires_grad_()\n"
                    "    {out} = torch.autograd.grad(LOSS, q)[0]"
                ),
            )
        ),
    ),
    "torch.func": (
        *(Operation(f"torch.func.vmap(lambda q: {mapped})({{a}})", _matrix) for mapped in _MAPPED),
        *(
            Operation(
                f"torch.func.jvp(lambda q: {mapped}, ({{a}},), (torch.ones_like({{a}}),))[1]", _rows
            )
            for mapped in _MAPPED
        ),
        *_operations(
            _matrix,
            "torch.func.vmap(torch.func.grad(lambda q: (q * q).sum() / 2))({a})",
            "torch.func.vmap(torch.func.grad(lambda w, q: 0.5 * (w @ q) ** 2), (None, 0))({a}[0],"
            " {a})",
            "torch.func.vmap(lambda q: q + torch.rand_like(q), randomness='different')({a})",
            "torch.func.jacrev(lambda q: q.sin().sum(0))({a})",
        ),
    ),
    "surroundings": (
        *_operations(
            _matrix,
            "with torch.autocast(device, dtype=torch.bfloat16):\n    {out} = {a} @ {a}.t()",
            "with torch.autocast(device, enabled=False):\n    {out} = {a} @ {a}.t()",
            "with torch.no_grad():\n    {out} = {a} * 3",
            "with torch.inference_mode():\n    {out} = {a} * 3",
            "with torch.device(device):\n    {out} = {a} + torch.ones({a}.shape)",
        ),
        *_operations(
            _any, "torch.tensor([0.1, 0.2], device=device)", "torch.arange(3, device=device) / 2"
        ),
        *_operations(_any, "torch.full((2,), 0.5, device=device)", "torch.zeros(2, 2)"),
    ),
    # They read what must be in a graph's key: which arguments are one tensor, their class, strides
    # and flags.
    "identity": (
        *_operations(_broadcast, "{a} * (2 if {a} is {b} else 3)", "{a} + len({{{a}, {b}}})"),
        *_operations(
            _number,
            "{a} * (2 if isinstance({a}, torch.nn.Parameter) else 3)",
            "{a} + {a}.requires_grad",
        ),
        *_operations(_number, "{a} + {a}.is_contiguous()", "{a} + sum({a}.stride())"),
        *_operations(_number, "{a} + {a}.is_leaf", "{a} + len({a}.shape)"),
    ),
}
"""The operations of random programs, by kind. They may use the names `device`, `generator` and
`layer` (a linear layer of 3 input features), and the tensors."""
