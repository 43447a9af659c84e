"""`Call`: the arguments of one call of a graphified function, sorted by role, and their memo
key."""

import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from weft.batches.padding import padded_shape
from weft.errors import DescriptorError, DonatedError
from weft.ops.transfers.collective import current_place
from weft.settings import is_batch_invariant
from weft.torchapi.patches import without_attention_fast_path
from weft.torchapi.private import (
    children_of,
    function_modes,
    in_dispatch_mode,
    in_functorch_transform,
    saved_tensors_hooks,
    switches,
)
from weft.transforms.graphs.calls.aliasing import refuse_donated_twice, refuse_shared
from weft.transforms.graphs.calls.borrowing import refuse_stale
from weft.transforms.graphs.calls.key import (
    PLAIN,
    Key,
    KnownReferences,
    TreeKey,
    check_hashable,
    check_plain,
    check_statics,
    check_tensors,
    leaf_key,
    static_key,
)
from weft.values.donation import refuse_donated
from weft.values.trees import (
    Axes,
    TreeSpec,
    keys_in,
    leaf_axes,
    leaves_with_names,
    map_sized,
    tree_flatten,
    tree_leaves,
    tree_structure,
)

_is_training = attrgetter("training")


@attrs.frozen
class Roles:
    """The roles of a function's arguments in its graphs.

    Args:
        signature: the function's signature, for the names of its arguments.
        own_signature: the signature of the outermost function, if a decorator changed it; else the
            same as `signature`.
        static: arguments whose values are part of the key.
        donated: arguments whose storage the function takes.
        by_reference: arguments that are captured at their addresses: the donated ones, and others
            such as params. All other arguments are copied in.
        module: the module that the function is, or is a method of; None: no module. The training
            modes of its parts, and of modules among the static arguments, are part of the key.
    """

    signature: inspect.Signature
    own_signature: inspect.Signature
    static: tuple[str, ...]
    donated: tuple[str, ...]
    by_reference: tuple[str, ...]
    module: nn.Module | None = None
    is_variadic: bool = attrs.field(init=False)
    """Whether the function takes `**kwargs`, and so can tell arguments passed by keyword from those
    passed by position."""

    @is_variadic.default
    def _is_variadic(self) -> bool:
        kinds = {parameter.kind for parameter in self.own_signature.parameters.values()}
        return inspect.Parameter.VAR_KEYWORD in kinds

    def modules(self, statics: Mapping[str, Any]) -> tuple[nn.Module, ...]:
        """The parts of the modules whose training mode is part of the key of a call with these
        static arguments."""
        roots = [x for x in (self.module, *tree_leaves(dict(statics))) if isinstance(x, nn.Module)]
        # Two modules may share a part, and its mode is one fact: without the dict the key would be
        # longer, and as many comparisons slower at each call.
        return tuple(dict.fromkeys(part for root in roots for part in root.modules()))


@attrs.frozen
class Call:
    """The arguments of one call by role: static values, the caller's own tensors, and values to
    copy in.

    Args:
        num_donated: the number of donated leaves, which come first among those by reference.
        training: for each module whose mode is part of the key, whether it is in training mode.
        keywords: the names that the call passed by keyword, if the function can tell.
    """

    statics: dict[str, Any]
    references: dict[str, Any]
    copied: dict[str, Any]
    # The leaves are kept beside the trees because every later step (keys, copies, guards) walks the
    # leaves, and flattening a tree of parameters takes most of a call's time.
    reference_leaves: list[Any]
    reference_tree: TreeSpec
    copied_leaves: list[Any]
    copied_tree: TreeSpec
    num_donated: int
    training: tuple[bool, ...]
    keywords: tuple[str, ...] = ()
    cached_references: KnownReferences | None = None
    # Caches of at most one item: a list, because the class is frozen.
    _reference_key: list[TreeKey] = attrs.field(factory=list, init=False, eq=False, repr=False)
    _copied_axes: list[list[Axes | None]] = attrs.field(
        factory=list, init=False, eq=False, repr=False
    )

    def reference_key(self) -> TreeKey:
        """The part of the key for the arguments by reference."""
        if self.cached_references is not None:
            return self.cached_references.key
        if not self._reference_key:
            leaves = (leaf_key(x, None, True) for x in self.reference_leaves)
            self._reference_key.append(_tree_key(self.reference_tree, leaves))
        return self._reference_key[0]

    def take_reference_key(self, equal: TreeKey) -> None:
        """Replace the key by the equal key of an entry, so that later comparisons with that are of
        identity."""
        self._reference_key[:] = [equal]

    def copied_axes(self) -> list[Axes | None]:
        """The axes of each copied leaf, or None."""
        if not self._copied_axes:
            self._copied_axes.append(leaf_axes(self.copied))
        return self._copied_axes[0]

    def new_leaves(self) -> tuple[Any, ...]:
        """The leaves that no earlier call has checked."""
        return (*(() if self.cached_references else self.reference_leaves), *self.copied_leaves)

    def leaf_names(self) -> list[str]:
        """The path of each leaf as the caller would write it, those by reference first."""
        return _leaf_names({**self.references, **self.copied})

    def new_names(self) -> list[str]:
        """The paths of `new_leaves`."""
        return self.leaf_names()[-len(self.new_leaves()) :]


def _leaf_names(arguments: dict[str, Any]) -> list[str]:
    return [
        name + path for name, value in arguments.items() for path, _ in leaves_with_names(value)
    ]


def make_call(
    roles: Roles,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cached_references: KnownReferences | None = None,
    cached_leaves: Sequence[Any] = (),
) -> Call:
    """Bind a call's arguments to the signature, and sort them by role. If an earlier call had the
    same arguments by reference, `cached_references` is their key, and `cached_leaves` are their
    leaves, none of which was donated since.

    Raises:
        DonatedError: an argument was donated before, or is donated by this call and passed twice.
        StaleResultError: an argument is a borrowed result that was overwritten (inside
            `weft.check_borrowed()`).
    """
    statics, references, copied = _bind(roles, name, args, kwargs)
    leaves, tree = (
        (list(cached_leaves), cached_references.tree)
        if cached_references is not None
        else tree_flatten(references)
    )
    copied_leaves, copied_tree = tree_flatten(copied)
    # Leaves that an earlier call with the same addresses has checked are skipped: a model has
    # hundreds of parameters, and a decode step would check them all.
    first = 0 if cached_references is None else len(leaves)
    new = (*leaves, *copied_leaves)[first:]
    for index, leaf in enumerate(new, first):
        try:
            refuse_donated(leaf, call=f"{name}(...)")
        except DonatedError as error:
            path = _leaf_names({**references, **copied})[index]
            # The path is made only now: naming all leaves costs far more than checking them.
            raise DonatedError(error.call, f"{path}, {error.problem}", error.instead) from None
    for leaf in new:
        refuse_stale(leaf, call=f"{name}(...)")
    donated = zip(references, children_of(tree), strict=True) if roles.donated else ()
    call = Call(
        statics=statics,
        references=references,
        copied=copied,
        reference_leaves=leaves,
        reference_tree=tree,
        copied_leaves=copied_leaves,
        copied_tree=copied_tree,
        num_donated=sum(int(child.num_leaves) for name, child in donated if name in roles.donated),
        training=tuple(map(_is_training, roles.modules(statics))),
        keywords=tuple(kwargs) if roles.is_variadic else (),
        cached_references=cached_references,
    )
    if call.num_donated:
        refuse_donated_twice(
            call, name, call.num_donated if cached_references is None else len(leaves)
        )
    return call


def _bind(
    roles: Roles, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Bind arguments, and return three dicts by name: static ones, those by reference, and copied
    ones."""
    bound = bind(roles, name, args, kwargs)
    passed = {*bound.arguments}
    if (
        bound.signature is roles.own_signature
    ):  # a decorator may have other defaults than the function that it wraps
        bound.apply_defaults()
    # A default that is a function or an object cannot be hashed by value; as nobody passed it, the
    # function's own default stands in for it at the capture and at each replay.
    values = {key: x for key, x in bound.arguments.items() if key in passed or _is_value(x)}
    statics = {key: values.pop(key) for key in roles.static if key in values}
    references = {key: values.pop(key) for key in roles.by_reference if key in values}
    return statics, references, dict(values)


def _is_value(default: Any) -> bool:
    """Whether a default value can be part of the key. Any other default, such as a function, is not
    passed: the function fills it in itself."""
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in tree_leaves(default))


def bind(
    roles: Roles, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind arguments to the function's signature, or to its decorator's if they fit only that
    one."""
    try:
        return roles.signature.bind(*args, **kwargs)
    except TypeError as error:
        if roles.own_signature is not roles.signature:
            # The error to show is that of the function that the user wrote, not of its decorator.
            with suppress(TypeError):
                return roles.own_signature.bind(*args, **kwargs)
        raise TypeError(f"{name}{roles.signature}: {error}") from None


def modules_keep_training(call: Call, roles: Roles) -> Callable[[], bool] | None:
    """A function that returns whether no module of the key has switched between training and
    evaluation since the call; None if there is no module."""
    # The function's own modules live as long as the function, so they may be held strongly.
    function_modules = roles.modules({})
    training = call.training
    # Weakly: a plan must not keep the modules among its call's arguments alive.
    argument_modules = tuple(
        weakref.ref(module) for module in roles.modules(call.statics)[len(function_modules) :]
    )
    if not training:
        return None
    return lambda: (
        (
            *map(_is_training, function_modules),
            *(getattr(one(), "training", None) for one in argument_modules),
        )
        == training
    )


def invoke(
    fn: Callable[..., Any], roles: Roles, arguments: dict[str, Any], keywords: Collection[str] = ()
) -> Any:
    """Call `fn` with a dict of arguments by name: those in `keywords` are passed by keyword, others
    by position. As in every call of a graphified function, attention of torch.nn takes no fast
    path."""
    # Arguments that were bound to the decorator's signature have its names.
    named = arguments.keys() <= roles.signature.parameters.keys()
    positional: list[Any] = []
    passed: dict[str, Any] = {}
    for name, parameter in (roles.signature if named else roles.own_signature).parameters.items():
        if name not in arguments:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(arguments[name])
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional += arguments[name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            passed |= arguments[name]
        elif name in keywords or parameter.kind is parameter.KEYWORD_ONLY:
            passed[name] = arguments[name]
        else:
            positional.append(arguments[name])
    with without_attention_fast_path():
        return fn(*positional, **passed)


def enclosing_transform() -> str | None:
    """The capture, trace or torch.func transform around the current call, in words; None if there
    is none."""
    if in_functorch_transform():
        return "inside a torch.func transform"
    if in_dispatch_mode() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        # A replay inside another capture would be recorded as its kernels with this graph's
        # addresses, and inside a trace it would be invisible: the function itself must run in both.
        return "inside another capture, or a trace"
    return None


def runs_inline(call: Call) -> bool:
    """Whether the function itself must run: inside a capture, a trace or a torch.func transform, or
    because of an argument."""
    return enclosing_transform() is not None or _leaf_to_inline(call) is not None


def _leaf_to_inline(call: Call) -> int | None:
    """The index of the first new leaf that autograd must see, or that has no fixed addresses; None
    if there is none."""
    grad = torch.is_grad_enabled()
    for index, leaf in enumerate(call.new_leaves()):
        if isinstance(leaf, Tensor) and (
            # Sparse and nested tensors get new storages at each call, so there is no address to
            # capture.
            (grad and leaf.requires_grad) or leaf.layout != torch.strided or leaf.is_nested
        ):
            return index
    return None


def inline_reason(call: Call) -> str | None:
    """The reason why a call runs inline, with the argument's name; None if it does not."""
    if (inside := enclosing_transform()) is not None or (index := _leaf_to_inline(call)) is None:
        return inside
    name = call.new_names()[index]
    leaf = call.new_leaves()[index]
    if torch.is_grad_enabled() and leaf.requires_grad:
        return (
            f"{name} requires grad, and autograd must see the operators; torch.no_grad() around the"
            " call lets it replay"
        )
    return f"{name} is {'nested' if leaf.is_nested else leaf.layout}, which has no fixed addresses"


def _ambient() -> tuple[tuple[str, Any], ...]:
    """The surroundings that a result depends on besides the arguments; a replay must run in the
    same surroundings as the capture."""
    # A mode may answer any operator, and two of one class may hold different state.
    modes = tuple(_ByIdentity(mode) for mode in function_modes())
    hooks = tuple(_ByIdentity(hook) for hook in saved_tensors_hooks() or ())
    entries = (
        ("batch invariant", is_batch_invariant()),
        ("function modes", modes),
        ("hooks on saved tensors", hooks),
    )
    return (*switches(), *entries, ("rank of a mesh", current_place()))


@attrs.frozen(eq=False)
class _ByIdentity:
    """An object in a key that is equal only to itself, whatever its `==` says; a name (str) is
    compared by value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ByIdentity):
            return NotImplemented
        return (
            self.value == other.value if isinstance(self.value, str) else self.value is other.value
        )

    def __hash__(self) -> int:
        if isinstance(self.value, str):
            return hash(self.value)
        return id(self.value)

    def __repr__(self) -> str:
        return str(self.value)


def check_sizes(call: Call, descriptor: Any, name: str) -> None:
    """Raise DescriptorError if the size of a sized leaf differs from what the call's descriptor
    says."""
    pairs = zip(call.copied_leaves, call.copied_axes(), strict=True)
    for index, (leaf, spec) in enumerate(pairs, len(call.reference_leaves)):
        if spec is not None and tuple(leaf.shape) != (
            expected := padded_shape(leaf, spec, descriptor)
        ):
            path = call.leaf_names()[index]
            raise DescriptorError(
                f"{name}(...)",
                f"{path} of shape {tuple(leaf.shape)} in a batch of class '{descriptor}', which"
                f" needs {expected}",
                "give the batch the descriptor of its tensors",
            )


def _repeated(call: Call) -> tuple[int, ...]:
    """For each leaf, the index of the first leaf that is the same tensor; empty if no tensor is
    passed twice."""
    # A function may test `x is y`, or write to one of two equal arguments: its graph is right only
    # for calls that pass the same tensors twice.
    first: dict[int, int] = {}
    leaves = (*call.reference_leaves, *call.copied_leaves)
    ids = [id(x) for x in leaves if isinstance(x, Tensor)]
    if len({*ids}) == len(ids):
        return ()
    return tuple(
        first.setdefault(id(x), i) if isinstance(x, Tensor) else i for i, x in enumerate(leaves)
    )


def signature_of(call: Call) -> Key:
    """The key before dispatch, with the batch's own class and sizes."""
    # Unpadded shapes: the class that the call is padded to is not known before dispatch.
    copied = _tree_key(call.copied_tree, (leaf_key(x, None, False) for x in call.copied_leaves))
    statics = tuple((name, static_key(value)) for name, value in call.statics.items())
    # One flag if all modules agree, as they usually do: a short key is compared quickly.
    training = call.training[0] if len({*call.training}) == 1 else call.training
    form = {
        "module.training": training,
        "keywords": call.keywords,
        "tensors passed twice": _repeated(call),
    }
    return Key((*_ambient(), *form.items()), "", statics, None, call.reference_key(), copied)


def _tree_key(structure: TreeSpec, leaves: Iterable[Any]) -> TreeKey:
    return TreeKey(structure, keys_in(structure), tuple(leaves))


def hashable_signature(call: Call, name: str) -> Key:
    """The key before dispatch, checked to be hashable.

    Raises:
        CaptureError: a part of the key cannot be hashed.
    """
    signature = signature_of(call)
    check_hashable(signature, f"{name}(...)", call.leaf_names)
    return signature


def check_call(call: Call, name: str) -> None:
    """Refuse arguments for which no graph can be captured.

    Raises:
        CaptureError: an argument holds something other than tensors and plain values, or a static
            one holds a tensor.
        DonatedError: a donated argument shares its storage with another, or cannot be written here.
    """
    check_plain(call.new_leaves(), f"{name}(...)", call.new_names)
    check_tensors(call.new_leaves(), f"{name}(...)", call.new_names)
    check_statics(call.statics, f"{name}(...)")
    # Otherwise an earlier call with the same arguments by reference has passed this check.
    if call.cached_references is None:
        refuse_shared(call, name)
    # Inside inference mode, its tensors can be written in place.
    if torch.is_inference_mode_enabled():
        return
    for index, leaf in enumerate(call.reference_leaves[: call.num_donated]):
        if isinstance(leaf, Tensor) and leaf.is_inference():
            path = call.leaf_names()[index]
            problem = (
                f"{path}, which is donated, was made in inference mode, outside of which nothing"
                " can write to it"
            )
            raise DonatedError(
                f"{name}(...)",
                problem,
                "torch.inference_mode() around all calls, or pass a clone of it",
            )


def key_of(call: Call, mode: str, descriptor: Any, signature: Key | None = None) -> Key:
    """The memo key of a call padded to `descriptor`, or of the unpadded call if `descriptor` is
    None; `signature` is the key before dispatch, if it is known."""
    signature = attrs.evolve(signature or signature_of(call), mode=mode)
    if descriptor is None:
        return signature
    # The tree's structure holds the batch's descriptor; `map_sized` replaces it by that of the
    # class.
    padded = map_sized(lambda value, _: value, call.copied, descriptor)
    pairs = zip(call.copied_leaves, call.copied_axes(), strict=True)
    leaves = (
        leaf_key(x, padded_shape(x, spec, descriptor) if spec else None, False) for x, spec in pairs
    )
    return attrs.evolve(
        signature, descriptor=descriptor, copied=_tree_key(tree_structure(padded), leaves)
    )
