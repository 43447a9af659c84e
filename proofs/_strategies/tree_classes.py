"""Random classes for `weft.pytree`, with every feature of attrs that runs while a value is made,
and a value of each class."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.values.trees import pytree, static

# The options of `attrs.frozen` that change how values are made, with the values to draw from.
CLASS_OPTIONS: dict[str, tuple[Any, ...]] = {
    "slots": (True, False),
    "weakref_slot": (True, False),
    "cache_hash": (False, True),
    "init": (True, False),
    "field_transformer": (None, lambda cls, fields: fields),
}

# The other options of `attrs.frozen`, each with the reason why it is not drawn.
CLASS_OPTIONS_NOT_DRAWN = {
    "kw_only": "always True, so that fields with and without defaults come in any order",
    "these": "another way to list the fields",
    "frozen": "False is refused by name",
    "getstate_setstate": "how it is pickled",
    "on_setattr": "attrs refuses it in a frozen class",
    "auto_attribs": "how the fields are found",
    "auto_detect": "which methods attrs writes",
    "auto_exc": "an exception is no tree",
    "force_kw_only": "as kw_only",
} | dict.fromkeys(
    ("repr", "str", "eq", "order", "hash", "unsafe_hash", "match_args"),
    "a method that is not called while a value is made",
)

# The options of `attrs.field` that are drawn; `metadata` is `weft.static()`.
FIELD_OPTIONS = ("default", "factory", "validator", "init", "converter", "alias", "metadata")

# The other options of `attrs.field`, each with the reason why it is not drawn.
FIELD_OPTIONS_NOT_DRAWN = {
    "type": "an annotation",
    "kw_only": "the class says it",
    "on_setattr": "attrs refuses it in a frozen class",
} | dict.fromkeys(
    ("repr", "hash", "eq", "order"), "a part of a method that is not called while a value is made"
)

# The methods of a user's class that run while a value is made.
HOOKS = ("__attrs_pre_init__", "__attrs_post_init__", "__new__")


def options_of(function: Callable[..., Any]) -> set[str]:
    """The names of a function's options."""
    return {name for name in inspect.signature(function).parameters if name != "maybe_cls"}


@attrs.frozen(eq=False)
class TreeValue:
    """A value of a random class, and a record of the user code that has run.

    Args:
        value: the value.
        options: the options of the class and of each field; `repr` shows them.
        children, statics: the values of its fields, by name.
        calls: which converters, validators, default factories and hooks have run, in order.
    """

    value: Any = attrs.field(repr=False)
    options: dict[str, Any]
    children: dict[str, Tensor] = attrs.field(repr=False)
    statics: dict[str, Any] = attrs.field(repr=False)
    calls: list[str] = attrs.field(repr=False)


@st.composite
def tree_values(draw: st.DrawFn) -> TreeValue:
    """A value of a random class registered with `weft.pytree`.

    The class may have slots, a base class and hooks. Its fields may have converters, validators,
    defaults and aliases, be static, or be left out of `__init__`."""
    calls: list[str] = []
    options = {name: draw(st.sampled_from(values)) for name, values in CLASS_OPTIONS.items()}
    fields = {}
    drawn: dict[str, Any] = {}
    for index in range(draw(st.integers(1, 3))):
        name = f"field_{index}"
        drawn[name] = draw(st.sets(st.sampled_from(FIELD_OPTIONS)))
        if index == 0:
            drawn[name].discard("metadata")  # torch.func refuses a tree without a tensor
        fields[name] = _field(drawn[name], name, calls)
    hooks = draw(st.sets(st.sampled_from(HOOKS)))
    cls = _class(options, fields, hooks, draw(st.booleans()), calls)
    arguments = {
        f.alias: "word" if f.metadata else torch.arange(4.0)
        for f in attrs.fields(cls)
        if f.init and f.default is attrs.NOTHING
    }
    value = cls(**arguments)
    # attrs leaves a field with `init=False` and no default unset, so it gets its value here.
    for f in attrs.fields(cls):
        if not hasattr(value, f.name):
            object.__setattr__(value, f.name, "word" if f.metadata else torch.arange(4.0))
    # From here on the record is of what `pytree` runs, and no longer of how the value was made.
    calls.clear()
    by_role = {
        is_static: {
            f.name: getattr(value, f.name)
            for f in attrs.fields(cls)
            if bool(f.metadata) is is_static
        }
        for is_static in (False, True)
    }
    return TreeValue(
        value, {**options, **drawn, "hooks": hooks}, by_role[False], by_role[True], calls
    )


def _field(chosen: set[str], name: str, calls: list[str]) -> Any:
    """A field with these options, whose converter changes a value each time it runs."""
    is_static = "metadata" in chosen

    def converted(value: Any) -> Any:
        calls.append("converter")
        if is_static:
            return f"{value}!"
        return value * 3

    def factory() -> Any:
        calls.append("factory")
        if is_static:
            return "made"
        return torch.ones(4)

    arguments: dict[str, Any] = {"metadata": static() if is_static else None}
    if "converter" in chosen:
        arguments["converter"] = converted
    if "validator" in chosen:
        arguments["validator"] = lambda self, attribute, value: calls.append("validator")
    if "alias" in chosen:
        arguments["alias"] = f"other_{name}"
    if "init" in chosen:
        arguments["init"] = False
    if "default" in chosen:
        arguments["default"] = "word" if is_static else torch.full((4,), 5.0)
    elif "factory" in chosen:
        arguments["factory"] = factory
    return attrs.field(**arguments)


def _class(
    options: dict[str, Any],
    fields: dict[str, Any],
    hooks: set[str],
    has_base: bool,
    calls: list[str],
) -> Any:
    """A class with these fields, the first of them in the base class if there is one."""
    class_options = {**options, "kw_only": True}
    namespace: dict[str, Any] = {hook: _hook(hook, calls) for hook in hooks}
    if not class_options["init"]:
        namespace["__init__"] = _own_init
        class_options["cache_hash"] = False  # attrs refuses it without its own __init__
    bases: tuple[type, ...] = ()
    if has_base and len(fields) > 1:
        first = next(iter(fields))
        base_options = {
            "slots": class_options["slots"],
            "weakref_slot": class_options["weakref_slot"],
            "kw_only": True,
        }
        bases = (attrs.make_class("Base", {first: fields.pop(first)}, frozen=True, **base_options),)
        class_options["weakref_slot"] = class_options["weakref_slot"] and class_options["slots"]
    cls = attrs.make_class("Drawn", fields, bases, namespace, frozen=True, eq=True, **class_options)
    return pytree(cls)


def _hook(name: str, calls: list[str]) -> Any:
    if name == "__new__":

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return object.__new__(cls)

        return new

    def hook(self: Any) -> None:
        calls.append(name)

    return hook


def _own_init(self: Any, **arguments: Any) -> None:
    self.__attrs_init__(**arguments)
