"""Custom functions in the stages of a decoder (`StageFunctions`), and the checks of them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int, other_signature
from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.outputs import IntermediateTensors, Output
from weft.batches.state import State
from weft.errors import ProgramError
from weft.ops.attention.backends import (
    AttentionBackend,
    can_run_inside,
    check_kernel_pages,
    is_paged_operator,
)
from weft.ops.attention.capabilities import CAPABILITIES
from weft.ops.products.fp8 import Quantized
from weft.stages.config import ModelConfig
from weft.stages.params import DecoderParams, LayerParams

_PAGE_SIZE = 16

DecoderStage = Callable[
    [DecoderParams, State, Batch, IntermediateTensors | None],
    tuple[State, IntermediateTensors | Output],
]
Transform = Callable[[DecoderStage], DecoderStage]
Tables = tuple[Tensor, Tensor]
# A decoder layer: `(params, kv_pages, batch, tables, hidden) -> (hidden, kv_pages)`, with the
# shapes of `layers`, except that `kv_pages` holds this layer's pages only.
Layer = Callable[[LayerParams, Tensor, ResolvedBatch, Tables, Tensor], tuple[Tensor, Tensor]]
# `(config, layer, q, kv_pages, batch) -> mixed`: attention over the pages, as `weft.stages.attend`.
Attend = Callable[[ModelConfig, LayerParams, Tensor, Tensor, ResolvedBatch], Tensor]
# The logits [n, vocab_size] that a model run beside the main one gives some tokens of the batch.
LogitsAt = Callable[[Tensor | slice], Tensor]
# Models that read the same tokens: `(state, batch) -> (state, logits by name)`.
Beside = Callable[[State, ResolvedBatch], tuple[State, dict[str, LogitsAt]]]
# `(logits [n, vocab_size], rows [n], extras) -> logits`: a function on logits. `extras` holds the
# extras of each row's request.
ChangeLogits = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]


# For each custom function: the number of its positional arguments, its keyword arguments, and its
# signature.
_CALLS = {
    "attention": (6, (), "(config, layer, kv_pages, batch, tables, x) -> (added, kv_pages)"),
    "attend": (5, (), "(config, layer, q, kv_pages, batch) -> mixed"),
    "feed_forward": (4, (), "(config, layer, batch, x) -> added"),
    "norm": (4, ("quantized",), "(weight, eps, added, hidden, *, quantized) -> (normed, hidden)"),
    "logits": (3, (), "(logits, rows, extras) -> logits"),
    "layers": (1, (), "(layer) -> layer"),
}
# The signature of a decoder layer, and what it returns.
LAYER = "(params, kv_pages, batch, tables, hidden) -> (hidden, kv_pages)"

LEAVES: Rule = (
    lambda leaves: is_int(leaves, 1) and leaves & (leaves - 1) == 0,
    "a power of two: 1, 2, 4, 8",
)
# How to treat the leading tokens of a request that are in the prefix cache (`StageFunctions`).
PREFIX_CACHING = ("full", "recompute", "snapshot", "none")


@attrs.frozen(eq=False)
class Normed:
    """The result of a norm, [num_tokens, hidden_size]; also in FP8 if the weights that read it
    are."""

    plain: Tensor
    quantized: Quantized | None = None


@attrs.frozen
class StageFunctions:
    """The custom functions in a decoder's stages; None: the decoder's own. Each is pure, runs in
    every graph of the step, and has the signature of the function of the same name in
    `weft.stages.decoder`.

    Args:
        attention: `(config, layer, kv_pages, batch, tables, x) -> (added, kv_pages)`, as
            `attention`.
        feed_forward: `(config, layer, batch, x) -> added`, as `feed_forward`.
        norm: `(weight, eps, added, hidden, *, quantized) -> (normed, hidden)`, as `norm`, for the
            norms inside layers.
        logits: `(logits, rows, extras) -> logits`, called before biases, masks and penalties.
            `logits` is [n, vocab_size]; `rows` [n] int64 is the row of the state that each belongs
            to; `extras` has, by name and [n, ...], the extras of its request, the captures of its
            token, and the logits of the models in `beside`. A value that it does not read is not
            computed. Logprobs are those of its result. If ranks share the layers, each calls it
            with some of the rows.
        layers: a dict from a layer's index in the model to `f(layer) -> layer`, where a layer is a
            `Layer`.
        extras: a dict from the name of each per-request input to its default value. The functions
            read the requests' values as `batch.per_token(batch.extras[name])` [num_tokens, ...].
        token_extras: a dict from the name of each per-token input of a prompt to its default value,
            which generated tokens have. The functions read the values in
            `batch.token_extras[name]` [num_tokens, ...].
        captures: a dict from the name of each value that the functions capture per token (`sow`) to
            an example of it.
        carries: a dict from the name of each value that a request carries from token to token
            (`carry`) to its value before the first token. `batch.carried[name]` has, for each
            request, the value after the last token before the batch; `batch.scan_tokens` starts
            from it.
        prefix_caching: how to treat the leading tokens of a request that are in the prefix cache.
            `"full"`: they are not computed. `"recompute"`: their pages are shared, and they are
            recomputed without writing, so that they are captured and carried through.
            `"snapshot"`: they are not computed, and the request's carried values start from the
            snapshot kept with the last full page. `"none"`: they are computed, in pages that the
            request does not share. None: `"none"` if anything is captured or carried, otherwise
            `"full"`.
        attend: `(config, layer, q, kv_pages, batch) -> mixed`, as `weft.stages.attend`: the part of
            attention between the query, key and value product and the output projection. This
            step's keys and values are already in the pages. `q` and `mixed` are [num_tokens,
            num_heads, head_dim]. Or an `AttentionBackend`, which computes the same result another
            way.
        beside: models by name that read the same tokens, so that `logits` can read their logits.
        batch_invariant: whether the stages run in `weft.batch_invariant()`. To test whether custom
            functions of torch's operators are batch invariant, use `weft.proofs.check`.
        reduction_leaves: the number of leaves into which each sum that ranks may share is cut
            (`weft.ops.products.leaves`): a power of two; more than 1 needs `batch_invariant`. The
            bits are then the same on 1 rank and on any number of ranks that divides it. With 1, the
            bits depend on the number of ranks.
    """

    attention: Callable[..., tuple[Tensor, Tensor]] | None = None
    feed_forward: Callable[..., Tensor] | None = None
    norm: Callable[..., tuple[Normed, Tensor]] | None = None
    logits: ChangeLogits | None = None
    layers: Mapping[int, Callable[[Layer], Layer]] = attrs.field(factory=dict)
    extras: Mapping[str, Tensor] = attrs.field(factory=dict)
    captures: Mapping[str, Tensor] = attrs.field(factory=dict)
    carries: Mapping[str, Tensor] = attrs.field(factory=dict)
    token_extras: Mapping[str, Tensor] = attrs.field(factory=dict)
    prefix_caching: str | None = None
    attend: Attend | AttentionBackend | None = None
    beside: Mapping[str, Any] = attrs.field(factory=dict)
    batch_invariant: bool = False
    reduction_leaves: int = 1

    @property
    def _readers(self) -> list["StageFunctions"]:
        """The functions of all models that run in a step, this model's first."""
        return [self, *(model.functions for model in self.beside.values())]

    @property
    def _backends(self) -> list[AttentionBackend]:
        return [
            reader.attend for reader in self._readers if isinstance(reader.attend, AttentionBackend)
        ]

    def __str__(self) -> str:
        named = {
            name: getattr(self, name)
            for name in ("attention", "attend", "feed_forward", "norm", "logits")
        }
        named |= {f"layer {index}": change for index, change in sorted(self.layers.items())}
        parts = [f"{name}={name_of(f)}" for name, f in named.items() if f is not None]
        kinds = ("extra", self.extras), ("token extra", self.token_extras)
        for kind, tensors in (*kinds, ("captured", self.captures), ("carried", self.carries)):
            parts += [
                f"{kind} {name}: {list(x.shape)} {x.dtype}" for name, x in sorted(tensors.items())
            ]
        parts += [f"beside {name}" for name in sorted(self.beside)]
        parts += ["batch invariant"] if self.batch_invariant else []
        parts += [f"{self.reduction_leaves} reduction leaves"] if self.reduction_leaves != 1 else []
        parts += [] if self.prefix_caching is None else [f"prefix_caching={self.prefix_caching}"]
        return ", ".join(parts) or "the decoder's own"


def capability_of(functions: StageFunctions) -> str:
    """The graphs in which the attention can run, one of
    `weft.ops.attention.capabilities.CAPABILITIES`."""
    # The back end with the fewest graphs decides; CAPABILITIES begins with the fewest.
    return min(
        (backend.capability for backend in functions._backends),
        key=CAPABILITIES.index,
        default="full",
    )


def runs_inside(functions: StageFunctions) -> Callable[[int | None], bool] | None:
    """A function from a query length (None: ragged) to whether the attention runs inside a
    graph of that class, so that a piecewise graph would have no operator to be cut at; None if
    the attention is that operator."""
    if any(each.attend is None and each.attention is None for each in functions._readers):
        return None
    if any(is_paged_operator(each) for each in functions._backends):
        return None
    return lambda query_len: all(
        can_run_inside(backend, query_len) for backend in functions._backends
    )


def default_page_size(functions: StageFunctions) -> int:
    """The default number of tokens per page: 16 if the attention has kernels for it."""
    sizes = [each.page_sizes for each in functions._backends if each.page_sizes]
    return next((each[0] for each in sizes if _PAGE_SIZE not in each), _PAGE_SIZE)


def caching_policy(functions: StageFunctions) -> str:
    """One of `PREFIX_CACHING`."""
    return functions.prefix_caching or (
        "none" if functions.captures or functions.carries else "full"
    )


def check_page_size(functions: StageFunctions, call: str, page_size: int) -> None:
    """Raise ProgramError unless the attention has kernels for pages of this size."""
    for backend in functions._backends:
        check_kernel_pages(backend, call, page_size)


# No custom functions: the decoder's own.
OWN = StageFunctions()


def _after(
    first: Callable[[Layer], Layer] | None, second: Callable[[Layer], Layer]
) -> Callable[[Layer], Layer]:
    """The composition of two changes of a layer."""
    if first is None:
        return second
    return lambda layer: second(first(layer))


def updated(functions: StageFunctions, new: StageFunctions) -> StageFunctions:
    """The functions updated with new ones: a function or a policy replaces the old one, named
    values are added, and a change of a layer is applied after the old one. Default values are
    copied, as the user may write to the originals later."""
    changed: dict[str, Any] = {}
    for field in attrs.fields(StageFunctions):
        old_value = getattr(functions, field.name)
        new_value = getattr(new, field.name)
        if field.name == "layers":
            changed["layers"] = {
                **old_value,
                **{
                    index: _after(old_value.get(index), change)
                    for index, change in new_value.items()
                },
            }
        elif field.name in ("extras", "token_extras", "carries"):
            changed[field.name] = {
                **old_value,
                **{name: x.detach().clone() for name, x in new_value.items()},
            }
        elif field.name == "batch_invariant":
            changed[field.name] = old_value or new_value
        elif field.name == "reduction_leaves":
            changed[field.name] = old_value if new_value == 1 else new_value
        elif isinstance(old_value, Mapping):
            changed[field.name] = {**old_value, **new_value}
        elif new_value is not None:
            changed[field.name] = new_value
    return attrs.evolve(functions, **changed)


def name_of(f: Any) -> str:
    """A function's module and qualified name, which is the same in all processes; a `repr` has an
    address."""
    if isinstance(f, AttentionBackend):
        return f"the back end {f.name!r}"
    return f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__qualname__)}"


def check_functions(call: str, functions: StageFunctions, num_layers: int) -> None:
    """Raise ProgramError for something that is not a function or has another signature, for layers
    that the model does not have, for an `attend` that a custom `attention` would not call, and for
    an invalid number of leaves."""
    # Not recursive: an AttentionBackend is an attrs class, too, and would become a dict.
    function_fields = attrs.asdict(functions, recurse=False)
    function_fields.pop("batch_invariant")
    names = (
        "reduction_leaves",
        "layers",
        "extras",
        "token_extras",
        "captures",
        "carries",
        "prefix_caching",
        "beside",
    )
    other_fields = {name: function_fields.pop(name) for name in names}
    rules: dict[str, Rule] = {
        name: (lambda f: f is None or callable(f), "a function, or None")
        for name in function_fields
    }
    rules["layers"] = (
        lambda layer_changes: (
            isinstance(layer_changes, Mapping)
            and all(
                is_int(index, 0, num_layers - 1) and callable(f)
                for index, f in layer_changes.items()
            )
        ),
        (
            f"a dict from a layer's index, 0 to {num_layers - 1}, to a function of a layer:"
            " layers={0: f}"
        ),
    )
    rules["reduction_leaves"] = LEAVES
    rules["extras"] = (
        _are_tensors,
        "a dict of the default values by name: extras={'vector': torch.zeros(hidden_size)}",
    )
    rules["token_extras"] = (
        _are_tensors,
        "a dict of one token's default by name: token_extras={'patch': torch.zeros(n)}",
    )
    rules["captures"] = (
        _are_tensors,
        "a dict of examples by name: captures={'hidden': torch.zeros(hidden_size)}",
    )
    rules["carries"] = (
        _are_tensors,
        "a dict of the values before the first token: carries={'sum': torch.zeros(())}",
    )
    rules["prefix_caching"] = (
        lambda value: value is None or value in PREFIX_CACHING,
        f"one of {', '.join(PREFIX_CACHING)}; None: it follows from captures and carries",
    )
    rules["beside"] = (
        lambda value: isinstance(value, Mapping),
        "a dict of models by name: beside={'amateur': small}",
    )
    check_values(call, rules, {**function_fields, **other_fields}, ProgramError)
    user_functions = {
        name: f
        for name, f in function_fields.items()
        if f is not None and not isinstance(f, AttentionBackend)
    }
    for name, f in (
        *user_functions.items(),
        *((f"layers[{index}]", f) for index, f in functions.layers.items()),
    ):
        count, keywords, signature = _CALLS[name.partition("[")[0]]
        if (problem := other_signature(f, count, *keywords)) is not None:
            raise ProgramError(
                f"{call} with {name}={problem.partition('(')[0]}",
                problem,
                f"a function {signature}",
            )
    if functions.attention is not None and functions.attend is not None:
        problem = "both attention=f and attend=g, but f replaces the function that calls g"
        raise ProgramError(
            call, problem, "one of them: f may call weft.stages.decoder.attention(..., attend=g)"
        )
    if functions.reduction_leaves == 1:
        return
    with_leaves = f"{call} with reduction_leaves={functions.reduction_leaves}"
    if not functions.batch_invariant:
        raise ProgramError(
            with_leaves, "a model that is not batch invariant", "batch_invariant=True, too"
        )
    if whole := [
        name for name in ("attention", "feed_forward") if getattr(functions, name) is not None
    ]:
        problem = f"a custom {whole[0]}, whose sums are not cut into leaves"
        instead = "attend=f or layers={index: f}"
        raise ProgramError(with_leaves, problem, instead)


def check_together(call: str, functions: StageFunctions) -> None:
    """Raise ProgramError for a policy under which captures or carries would lack tokens that are in
    the prefix cache, for a name that is used for two kinds of input, and for models in `beside`
    whose logits nothing reads."""
    policy = functions.prefix_caching
    captures = bool(functions.captures)
    carries = bool(functions.carries)
    with_policy = f"{call} with prefix_caching={policy!r}"
    for kinds in (
        ("extras", "token_extras"),
        ("extras", "captures"),
        ("extras", "beside"),
        ("captures", "beside"),
    ):
        names = [set(getattr(functions, kind)) for kind in kinds]
        if both := sorted(names[0] & names[1]):
            problem = f"{both[0]!r} in {' and in '.join(kinds)}"
            instead = "another name for one of them"
            raise ProgramError(call, problem, instead)
    if functions.beside and functions.logits is None:
        problem = "models in beside=, but no logits=f to read their logits"
        instead = "logits=f, too: it reads the logits of a model as extras[name]"
        raise ProgramError(call, problem, instead)
    if policy == "full" and carries and not captures:
        problem = "carries: tokens that the prefix cache skips have no carried values"
        instead = "prefix_caching='recompute' or 'none'"
    elif policy in ("full", "snapshot") and captures:
        problem = "captures: tokens that the prefix cache skips have no captured values"
        instead = "prefix_caching='recompute' or 'none'"
    elif policy == "snapshot" and not carries:
        problem = "no carries, so a snapshot would be empty"
        instead = "carries={name: default}, or leave it out"
    else:
        return
    raise ProgramError(with_policy, problem, instead)


def _are_tensors(values: Any) -> bool:
    if not isinstance(values, Mapping):
        return False
    return all(isinstance(name, str) and isinstance(x, Tensor) for name, x in values.items())
