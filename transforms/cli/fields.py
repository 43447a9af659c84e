"""Declares a command's options as the fields of a class, and the rules between them; the parser is
made from these fields.

Importing this module imports neither torch, rich nor numpy.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import attrs

from weft.batches.sampling import CHECKS, SamplingParams
from weft.errors import RequestError, WeftError
from weft.transforms.cli.flags import SWITCH, Kind, value

# The groups of options in the order of `--help`. Exactly one option of the group `model` must be
# given.
GROUPS = (
    "model",
    "options",
    "prompts",
    "sampling",
    "what is measured",
    "the load",
    "the machine",
    "how it runs",
    "the network",
)

# Each option has no effect without one of these, of which a command may have only some.
NEEDS = {
    "draft": ("speculate",),
    "system": ("chat",),
    "input_len": ("output_len",),
    "output_len": ("input_len",),
    "certificates": ("batch_invariant",),
    "experts": ("tp", "gpus"),
    "reduction_leaves": ("batch_invariant",),
}

# For each option, the options that have no effect beside it.
IDLE = {
    "eval": (
        "workload",
        "input_len",
        "output_len",
        "num_prompts",
        "temperature",
        "seed",
        "speculate",
        "draft",
    ),
    "input_len": ("workload",),
    "output_len": ("workload",),
    "gpus": ("pp", "tp"),
    "batch_invariant": ("compiler",),
}


def option(
    group: str,
    help: str,
    kind: Kind | Iterable[str],
    default: Any = None,
    *,
    also: Mapping[str, Kind] = {},
) -> Any:
    """A field that is set by the flag of its name, such as `--max-tokens` for `max_tokens`.

    Args:
        group: one of `GROUPS`.
        help: the text in `--help`; the default is appended, unless the text mentions it.
        kind: how the value is parsed; or the values to choose from.
        default: `attrs.NOTHING` if the flag is required.
        also: other flags that set the field, with their kinds.
    """
    if not isinstance(kind, Mapping):
        kind = {"choices": kind}
    return attrs.field(
        default=default, metadata={"group": group, "help": help, "kind": kind, "also": also}
    )


def sampling_option(name: str, metavar: str) -> Any:
    """A field that sets the one of `SamplingParams` of this name, whose values, default and text it
    takes.

    Args:
        metavar: the placeholder of the value in `--help`; empty for a switch.
    """
    field: Any = attrs.fields_dict(SamplingParams)[name]
    allowed, instead = CHECKS[name]
    help = argument_texts(SamplingParams)[name]

    def convert(text: str) -> Any:
        number = field.type(text)
        if field.converter is None:
            return number
        return field.converter(number)

    if field.type is bool:
        kind: Kind = SWITCH
    elif field.type in (int, float):
        kind = value(metavar, convert, allowed, instead)
    else:
        one = value(metavar, str, lambda text: allowed((text,)), instead)
        kind = {**one, "action": "append"}
        help += "; may be repeated"
    return option("sampling", help, kind, field.default)


def argument_texts(documented: type) -> dict[str, str]:
    """What a class's docstring says of each of its arguments, without the last full stop.

    >>> argument_texts(SamplingParams)["ignore_eos"]
    "whether to continue after the model's end-of-sequence tokens"
    """
    _, _, after = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")
    arguments = textwrap.dedent(after.partition("\n\n")[0])
    entries = re.findall(r"^(\w+): (.*(?:\n .*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def flag_of(name: str) -> str:
    """The flag that sets an option."""
    return f"--{name.replace('_', '-')}"


@attrs.frozen(kw_only=True)
class Options:
    """The options of a command; a subclass's docstring is its description in `--help`.

    Args:
        explicit: the names of the options that the user wrote.
    """

    command: ClassVar[str]
    usage: ClassVar[str] = "[options]"
    summary: ClassVar[str]

    explicit: frozenset[str] = frozenset()

    def refuse(self, flag: str, problem: str, instead: str) -> NoReturn:
        """Raise an error about a flag, given as the user wrote it.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"weft {self.command} {flag:.300}".strip(), problem, instead)

    @contextmanager
    def about(self, flag: str, kind: type[WeftError] = RequestError) -> Iterator[None]:
        """Within, turn errors of one kind into errors about a flag, given as the user wrote it."""
        try:
            yield
        except kind as error:
            self.refuse(flag, error.problem, error.instead)

    def check(self) -> None:
        """Refuse options that have no effect, because another one is missing or overrides them.

        Raises:
            RequestError: about the first such option.
        """
        fields = attrs.fields_dict(type(self))
        # In the order of the fields: a set has another order in each process, and so would have the
        # error.
        for name in filter(self.explicit.__contains__, fields):
            flag = flag_of(name)
            # A field without metadata has no flag in this command, such as `batch_invariant` of
            # `verify`: it cannot be missing.
            needed = [one for one in NEEDS.get(name, ()) if one in fields and fields[one].metadata]
            written = f"{flag} {getattr(self, name)}"
            other_flags = [
                flag_of(other)
                for other, idle in IDLE.items()
                if other in self.explicit and name in idle
            ]
            if both := " and ".join(other_flags):
                instead = "leave out one of the two"
                if len(other_flags) > 1:
                    instead = f"leave out {flag}, or {both}"
                self.refuse(written, f"{flag} has no effect with {both}", instead)
            if needed and self.explicit.isdisjoint(needed):
                usage, *other_flags = (_usage(fields[one]) for one in (name, *needed))
                missing = " and no ".join(map(flag_of, needed))
                self.refuse(written, f"no {missing}", f"{usage} {', or '.join(other_flags)}")


def _usage(field: "attrs.Attribute[Any]") -> str:
    """A field's flag and its value's placeholder, as in `--draft DIR`."""
    kind = field.metadata["kind"]
    return (
        f"{flag_of(field.name)} {kind.get('metavar') or '|'.join(kind.get('choices', ()))}".strip()
    )


def flagged(options_class: type[Options]) -> list["attrs.Attribute[Any]"]:
    """A command's fields that flags set, in the order of `--help`."""
    fields = [field for field in attrs.fields(options_class) if field.metadata]
    return sorted(fields, key=lambda field: GROUPS.index(field.metadata["group"]))
