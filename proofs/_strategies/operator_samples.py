"""`Case`: an operator of torch's database under a transform, as a pure function of tensors, with
sample arguments."""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from weft.torchapi.private import pytree, seen_as, storage_id

# The dtypes by name.
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
}
# A function under a transform, its arguments, and other arguments of the same shapes.
_Transformed = tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...] | None]
# The seed of the samples whose new values a replay gets, relative to the seed of the first samples.
_OTHER_SEED = 1


@attrs.frozen(eq=False)
class Case:
    """A function and its arguments.

    Args:
        operator: the name of the operator and of its variant in torch's database.
        transform: the name of the transform, a key of `TRANSFORMS`.
        dtype: the name of the dtype of the samples.
        sample: the index of the sample.
        fn: the function, of as many tensors as `tensors` has.
        tensors: its arguments.
        other_tensors: arguments of the same shapes with other values; None if the database has
            none.
    """

    operator: str
    transform: str
    dtype: str
    sample: int
    fn: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    other_tensors: tuple[Tensor, ...] | None

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in self.tensors
        )
        return f"{self.transform} of {self.operator}, {self.dtype}, sample {self.sample}: {shapes}"


@attrs.frozen(eq=False)
class Sample:
    """The arguments of an operator, with the tensors separate from the rest.

    Args:
        tensors: the tensors.
        differentiable: the indices of the tensors that the database marks as requiring grad.
        rest: all leaves, with `...` in place of tensors.
        structure: the tree structure of all leaves.
    """

    tensors: tuple[Tensor, ...]
    differentiable: tuple[int, ...]
    rest: tuple[Any, ...]
    structure: Any

    def bind(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        """The operator as a function of the tensors only."""

        def call(*tensors: Tensor) -> Any:
            left = iter(tensors)
            leaves = [next(left) if leaf is ... else leaf for leaf in self.rest]
            first, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
            return operator(first, *args, **kwargs)

        return call

    def fits(self, other: "Sample | None") -> bool:
        """Whether the other's tensors have the same shapes, dtypes and layouts."""
        return other is not None and [_kind(x) for x in self.tensors] == [
            _kind(x) for x in other.tensors
        ]


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.layout, x.stride() if x.layout is torch.strided else ()


def cases(
    entry: Any, transform: str, dtype: str, device: str, count: int | None, seed: int
) -> Iterator[Case]:
    """The cases of one entry of the database, from at most `count` of its samples, spread evenly.

    There are no cases where torch does not support the dtype or the derivative.

    Args:
        entry: an entry of `operator_database()`.
        seed: the seed of the samples' values.
    """
    kind = DTYPES[dtype]
    differentiates = transform in ("backward", "jvp")
    if differentiates:
        supported = entry.supported_backward_dtypes(device)
    else:
        supported = entry.supported_dtypes(device)
    if kind not in supported or (transform == "backward" and not entry.supports_autograd):
        return
    if transform == "jvp" and not entry.supports_forward_ad:
        return
    name = full_name(entry)
    apply = TRANSFORMS[transform]
    # Not `hash`, which differs from process to process.
    start = zlib.crc32(f"{name} {seed}".encode())
    samples = samples_of(entry, device, kind, differentiates, start)
    again = samples_of(entry, device, kind, differentiates, start + _OTHER_SEED)
    for index in spread(len(samples), count):
        sample = samples[index]
        if transform == "vmap" and any(
            x.layout is not torch.strided or x.is_nested for x in sample.tensors
        ):
            continue  # torch's vmap supports only strided tensors
        # Another seed may give samples of other shapes, or fewer of them.
        if index < len(again) and sample.fits(again[index]):
            other = again[index]
        else:
            other = None
        fn, tensors, other_tensors = apply(sample.bind(entry.op), sample, other)
        yield Case(name, transform, dtype, index, fn, tensors, other_tensors)


def full_name(entry: Any) -> str:
    """The name of an operator and its variant, such as `gelu` or
    `linalg.norm.subgradients_at_zero`."""
    return ".".join(filter(None, (entry.name, entry.variant_test_name)))


def spread(length: int, count: int | None) -> Sequence[int]:
    """At most `count` indices below `length`, evenly spaced.

    >>> spread(3, None), spread(10, 3)
    ([0, 1, 2], [0, 3, 6])
    """
    if count is None or length <= count:
        return list(range(length))
    return [index * length // count for index in range(count)]


def seed_all(seed: int) -> None:
    """Seed every generator from which samples or operators draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


class NoSamplesError(Exception):
    """Torch could not make the samples of an operator on this device."""


def samples_of(
    entry: Any, device: str, dtype: torch.dtype, requires_grad: bool, seed: int
) -> list[Sample]:
    seed_all(seed)
    try:
        # The function, not `entry.sample_inputs`: that method sets the seed itself.
        samples = list(entry.sample_inputs_func(entry, device, dtype, requires_grad))
    except Exception as error:
        raise NoSamplesError(
            f"torch cannot make its samples on this device: {error!r:.300}"
        ) from error
    return [_sorted(x) for x in samples]


def _sorted(sample: Any) -> Sample:
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    rest = tuple(... if isinstance(x, Tensor) else x for x in leaves)
    differentiable = tuple(i for i, x in enumerate(tensors) if x.requires_grad)
    # Detached: a case marks tensors itself, inside the function that is captured.
    return Sample(tuple(x.detach() for x in tensors), differentiable, rest, structure)


def copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies with the same strides, offsets and flags; tensors that share a storage still share
    one."""
    storages: dict[int, Any] = {}

    def copy(x: Tensor) -> Tensor:
        if x.layout is not torch.strided or x.is_quantized or x.is_nested:
            return x.clone()
        # One storage for arguments that overlap: what is written to one of them shows in the other.
        if (identity := storage_id(x)) not in storages:
            storages[identity] = x.untyped_storage().clone()
        clone = torch.empty(0, dtype=x.dtype, device=x.device)
        return seen_as(clone.set_(storages[identity], x.storage_offset(), x.size(), x.stride()), x)

    return tuple(map(copy, tensors))


def _forward(call: Callable[..., Any], sample: Sample, other: Sample | None) -> _Transformed:
    return call, sample.tensors, other.tensors if other else None


def _backward(call: Callable[..., Any], sample: Sample, other: Sample | None) -> _Transformed:
    marked = sample.differentiable

    def gradient(*tensors: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_() if i in marked else x for i, x in enumerate(tensors)
            ]
            results = [
                x
                for x in pytree.tree_leaves(call(*inputs))
                if isinstance(x, Tensor) and x.requires_grad
            ]
            directions = [_direction(x) for x in results]
            return torch.autograd.grad(
                results, [inputs[i] for i in marked], directions, allow_unused=True
            )

    return gradient, sample.tensors, other.tensors if other else None


def _vmap(call: Callable[..., Any], sample: Sample, other: Sample | None) -> _Transformed:
    # By default vmap refuses operators that draw.
    mapped = torch.vmap(call, randomness="different")
    # Without other values both lanes are alike, and a replay has no new values to be compared on.
    second = other or sample
    pairs = [(x.detach(), y.detach()) for x, y in zip(sample.tensors, second.tensors, strict=True)]
    tensors = tuple(torch.stack(pair) for pair in pairs)
    if other:
        other_tensors = tuple(torch.stack(pair[::-1]) for pair in pairs)
    else:
        other_tensors = None
    return mapped, tensors, other_tensors


def jvp_by(function: Callable[..., Any], tensors: Sequence[Tensor], marked: Sequence[int]) -> Any:
    """A function's results, and their derivative along one direction of the arguments at the
    indices `marked`."""

    def of_marked(*values: Tensor) -> Any:
        inputs = list(tensors)
        for i, value in zip(marked, values, strict=True):
            inputs[i] = value
        return function(*inputs)

    primals = tuple(tensors[i] for i in marked)
    return torch.func.jvp(of_marked, primals, tuple(map(_direction, primals)))


def _jvp(call: Callable[..., Any], sample: Sample, other: Sample | None) -> _Transformed:
    marked = sample.differentiable

    def derivative(*tensors: Tensor) -> Any:
        return jvp_by(call, tensors, marked)

    return derivative, sample.tensors, other.tensors if other else None


TRANSFORMS: dict[str, Callable[[Callable[..., Any], Sample, Sample | None], _Transformed]] = {
    "forward": _forward,
    "backward": _backward,
    "vmap": _vmap,
    "jvp": _jvp,
}
"""The function that applies each transform to an operator as a function of a sample's tensors."""


def _direction(x: Tensor) -> Tensor:
    """The direction of a derivative: numbers from 0.5 to 1.5 in the shape of `x`."""
    if x.layout is not torch.strided:
        return torch.ones_like(x)
    # Different at each element, so that a permuted derivative shows, and never 0, which would hide
    # one.
    return torch.linspace(0.5, 1.5, x.numel(), device=x.device).to(x.dtype).reshape(x.shape)
