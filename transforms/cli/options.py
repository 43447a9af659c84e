"""The options of each command, as the fields of a class, from which its parser is made.

Importing it imports neither torch, rich nor numpy.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import attrs

from weft.errors import RequestError

MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
"""The values of `--graph`: `weft.transforms.graphs.ladder.MODES`, without its import of torch."""

DTYPES = ("float32", "bfloat16", "float16")
"""The values of `--dtype`: the names in `weft.stages.model.DTYPES`, without its import of torch."""

PRESETS = ("tiny", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b-fp8", "llama-3.1-8b")
"""The values of `--preset`: the names in `weft.stages.presets`, without its import of torch."""

WORKLOADS = {"decode": (2, 512), "prefill": (512, 64), "mixed": (512, 512)}
"""The values of `--workload`: tokens of each prompt and of each completion."""

TRANSPORTS = ("local", "threads", "gloo", "nccl", "peer")
"""The values of `--transport`."""

MODEL, GENERAL, PROMPTS, SAMPLING = "model", "options", "prompts", "sampling"
MEASURED, LOAD, MACHINE, HOW = "what is measured", "the load", "the machine", "how it runs"
GROUPS = {
    MODEL: None,  # exactly one of its options is given
    GENERAL: None,
    PROMPTS: "at least one; both flags may be repeated, in any order",
    **dict.fromkeys((SAMPLING, MEASURED, LOAD, MACHINE, HOW)),
}
"""The groups of options in the order of `--help`, and what is said of them."""

Kind = Mapping[str, Any]
"""The kind of an option's value: keywords of `argparse.ArgumentParser.add_argument`."""


def whole(metavar: str, least: int = 1, most: int = 10**9) -> Kind:
    """A whole number within limits.

    >>> whole("N")["type"]("12")
    12
    """

    def parse(text: str) -> int:
        if not re.fullmatch("[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.60}: write a whole number from {least} to {most}")
        return int(text)

    return {"metavar": metavar, "type": parse}


def number(metavar: str, allowed: Callable[[float], bool], instead: str) -> Kind:
    """A number; `instead` names those that are allowed.

    >>> number("X", lambda value: value > 0, "a number greater than 0")["type"]("2.5")
    2.5
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r:.60}: write {instead}")
        return value

    return {"metavar": metavar, "type": parse}


def _text(text: str) -> str:
    """A prompt. Python passes bytes that are not text as lone surrogates, which are refused."""
    if re.search("[\ud800-\udfff]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8: pass text, or --prompt-ids")
    if not text:
        raise argparse.ArgumentTypeError("'' is empty: write at least one letter to go on from")
    return text


def _ids(text: str) -> list[int]:
    """Token ids from `1,2,3`."""
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if not re.fullmatch("[0-9]{1,18}", part)]:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} holds {wrong[0]!r:.60}, which is not a token id: write whole numbers and commas, as in 1,2,3"
        )
    return [int(part) for part in parts]


def _splits(text: str) -> tuple[int, ...]:
    """Numbers of stages from `1,2,3`."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}(,0*[1-9][0-9]{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r:.60}: write a whole number >= 1, or several, as in 1,2,3")
    return tuple(int(part) for part in text.split(","))


DIR, FILE = {"metavar": "DIR"}, {"metavar": "FILE"}
SWITCH = {"action": "store_true"}
TEXT = {"metavar": "TEXT", "type": _text, "action": "append"}
IDS = {"metavar": "1,2,3", "type": _ids, "action": "append", "help": "token ids"}
COUNT = whole("N", 1, 2**20)
TEMPERATURE = number("T", lambda value: 0 <= value <= 1e38, "a finite number >= 0; 0 is greedy")
SEED = whole("S", -(2**63), 2**63 - 1)
SECONDS = number("S", lambda value: 0 < value <= 1e6, "a number of seconds, greater than 0 and at most 1e6, as in 30")
BANDWIDTH = number("GB/s", lambda value: 0 < value < math.inf, "a finite number > 0, in GB/s")
LINK = number("GB/s", lambda value: value > 0, "a number > 0, in GB/s")
LATENCY = number("US", lambda value: 0 <= value < math.inf, "a finite number >= 0, in microseconds")

_FOLDER = "a checkpoint folder in Hugging Face's format"
_STAGES = "pipeline stages, one process each (default 1; under torchrun, all)"
_DEVICE = "cpu, cuda or cuda:N (default: cuda if there is a GPU)"
_JSON = "print one JSON object"


def option(
    group: str,
    help: str,
    kind: Kind,
    default: Any = None,
    *,
    needs: str = "",
    without: str = "",
    also: Mapping[str, Kind] = {},
) -> Any:
    """A field that is set by the flag of its name, `--max-tokens` for `max_tokens`.

    Args:
        help: ends with the default in `--help`, unless it speaks of it, and with what the option needs.
        default: `attrs.NOTHING`: the flag is required.
        needs: an option without which this one counts for nothing.
        without: options, with spaces between them, next to which this one counts for nothing.
        also: other flags that set it, and their keywords.
    """
    about = {"group": group, "help": help, "kind": kind, "needs": needs, "without": without, "also": also}
    return attrs.field(default=default, metadata=about)


@attrs.frozen(kw_only=True)
class Options:
    """The options of a command. The docstring is the description in `--help`.

    Args:
        given: the names of the options that the user wrote.
    """

    command: ClassVar[str]
    usage: ClassVar[str] = "[options]"
    summary: ClassVar[str]

    given: frozenset[str] = frozenset()

    def refuse(self, flag: str, seen: str, instead: str) -> NoReturn:
        """Raise the error about a flag as written.

        Raises:
            RequestError: always.
        """
        raise RequestError(f"weft {self.command} {flag:.300}".strip(), seen, instead)

    @contextmanager
    def about(self, flag: str) -> Iterator[None]:
        """Within, a RequestError is about a flag as written."""
        try:
            yield
        except RequestError as error:
            self.refuse(flag, error.seen, error.instead)

    def check(self) -> None:
        """Refuse options without one that they need, or next to one with which they count for nothing.

        Raises:
            RequestError: about the first of them.
        """
        fields = attrs.fields_dict(type(self))
        for field in (fields[name] for name in fields if name in self.given):
            flag, needs = flag_of(field.name), field.metadata["needs"]
            written = f"{flag} {getattr(self, field.name)}"
            if others := [flag_of(name) for name in field.metadata["without"].split() if name in self.given]:
                both = " and ".join(others)
                self.refuse(written, f"{both}, with which {flag} counts for nothing", f"leave out {flag}, or {both}")
            if needs and needs not in self.given:
                pair = (f"{flag_of(name)} {fields[name].metadata['kind']['metavar']}" for name in (field.name, needs))
                self.refuse(written, f"no {flag_of(needs)}", " ".join(pair))


def flag_of(name: str) -> str:
    """The flag that sets an option."""
    return f"--{name.replace('_', '-')}"


@attrs.frozen(kw_only=True)
class RunOptions(Options):
    """The options of a command that runs a model: the drafts, and the place of the stages."""

    pp: int | tuple[int, ...] | None = option(HOW, _STAGES, whole("N"))
    speculate: int | None = option(
        HOW,
        "draft K tokens per step by prompt lookup, or with --draft, and verify them; the tokens stay the same",
        whole("K", 1, 1024),
        without="eval",
    )
    draft: str | None = option(
        HOW, "a checkpoint with the same vocabulary that drafts", DIR, needs="speculate", without="eval"
    )
    transport: str | None = option(
        HOW,
        "carries messages between stages (default: nccl between GPUs, gloo between processes on the CPU; local "
        "runs all stages in this process)",
        {"choices": TRANSPORTS},
    )
    timeout: float = option(
        HOW,
        "seconds that a stage may keep another one waiting before both stop (default 30); loading is not counted",
        SECONDS,
        30.0,
    )
    device: str | None = option(HOW, _DEVICE, {"metavar": "D"})
    dtype: str | None = option(
        HOW, "dtype of the weights and the KV cache (default: the checkpoint's)", {"choices": DTYPES}
    )

    @property
    def splits(self) -> tuple[int | None, ...]:
        """The numbers of stages; None: one, or torchrun's."""
        return self.pp if isinstance(self.pp, tuple) else (self.pp,)

    @property
    def stages(self) -> int | None:
        """The number of stages."""
        return self.splits[0]


@attrs.frozen(kw_only=True)
class Demo(Options):
    """Generate from three prompts with the checkpoint that weft ships: eagerly, graphified, pipelined over 2 stages,
    and both. Compare tokens, logits and state after every step, and exit with 1 if they differ."""

    command, summary = "demo", "see that graphs and pipelines change no result"

    device: str | None = option(GENERAL, _DEVICE, {"metavar": "D"})
    max_tokens: int = option(GENERAL, "tokens to generate per prompt", whole("N"), 64)


@attrs.frozen(kw_only=True)
class Doctor(Options):
    """Show what weft would run on here, and why: versions, devices, graph back ends, kernels."""

    command, summary = "doctor", "show versions, devices and back ends"

    json: bool = option(GENERAL, _JSON, SWITCH, False)


@attrs.frozen(kw_only=True)
class Generate(RunOptions):
    """Complete prompts, all in one batch, and print the completions in the order of the prompts."""

    command, usage = "generate", "--model DIR --prompt TEXT [options]"
    summary = "complete prompts with a checkpoint"

    model: str = option(GENERAL, _FOLDER, DIR, attrs.NOTHING)
    prompt: Sequence[str | list[int]] = option(PROMPTS, "a text", TEXT, (), also={"--prompt-ids": IDS})
    max_tokens: int = option(SAMPLING, "tokens to generate per prompt", whole("N"), 64)
    temperature: float = option(SAMPLING, "0, the default, is greedy", TEMPERATURE, 0.0)
    seed: int | None = option(SAMPLING, "seed of all random choices (default: a fresh one)", SEED)
    adapter: str | None = option(SAMPLING, "a LoRA adapter, as PEFT saves it", DIR)
    graph: str = option(HOW, "graph mode", {"choices": MODES}, "full")
    json: bool = option(GENERAL, "print one JSON object per completion, one per line", SWITCH, False)


@attrs.frozen(kw_only=True)
class Bench(RunOptions):
    """Serve many requests that all arrive at once, and measure when the host reads each token. With --eval, score a
    file of tasks in each graph mode and split instead, and exit with 1 if the scores differ."""

    command, usage = "bench", "(--model DIR | --preset NAME) [options]"
    summary = "measure serving, or score a file of tasks"

    model: str | None = option(MODEL, _FOLDER, DIR)
    preset: str | None = option(MODEL, "the dimensions of a known model", {"choices": PRESETS})
    load_format: str | None = option(
        GENERAL,
        "auto loads the folder's weights, dummy draws random ones (default: auto; with --preset dummy)",
        {"choices": ("auto", "dummy")},
    )
    json: bool = option(GENERAL, _JSON, SWITCH, False)
    out: str | None = option(GENERAL, "write the JSON object to a file, too", FILE)
    workload: str = option(
        MEASURED,
        f"tokens in and out: {', '.join(f'{name} {a} and {b}' for name, (a, b) in WORKLOADS.items())}",
        {"choices": WORKLOADS},
        "decode",
        without="eval input_len output_len",
    )
    input_len: int | None = option(MEASURED, "tokens of each prompt", COUNT, needs="output_len", without="eval")
    output_len: int | None = option(MEASURED, "tokens of each completion", COUNT, needs="input_len", without="eval")
    num_prompts: int = option(MEASURED, "requests", COUNT, 128, without="eval")
    temperature: float = option(MEASURED, "0 is greedy", TEMPERATURE, 1.0, without="eval")
    seed: int = option(MEASURED, "seed of random weights, prompts and samples", SEED, 0, without="eval")
    eval: str | None = option(
        MEASURED,
        'score each line of a file instead: {"text": ...} by its perplexity, {"prompt": ..., "answer": ...} by whether '
        "the greedy completion is the answer",
        FILE,
    )
    max_num_seqs: int = option(HOW, "requests that run at once", COUNT, 128)
    max_num_tokens: int | None = option(
        HOW,
        "tokens per step (default 2048; with --eval that of --max-num-seqs, so that mode full replays prompts too)",
        whole("N", 1, 2**17),
    )
    pp: int | tuple[int, ...] | None = option(
        HOW, f"{_STAGES}; with --eval several too: 1,2,3", {"metavar": "N", "type": _splits}
    )
    graph: str | None = option(
        HOW,
        "graph mode (default full_and_piecewise; with --eval all of them, one by one)",
        {"choices": (*MODES, "all")},
    )
    run_ahead: int = option(HOW, "steps that are launched before the first of them is read", whole("K", 0, 2**20), 1)

    @property
    def dummy(self) -> bool:
        """Whether the weights are random, drawn on the device."""
        return self.preset is not None or self.load_format == "dummy"

    @property
    def lengths(self) -> tuple[int, int]:
        """The tokens of each prompt, and of each completion."""
        if self.input_len is None or self.output_len is None:
            return WORKLOADS[self.workload]
        return self.input_len, self.output_len

    @property
    def tokens_per_step(self) -> int:
        """The most tokens of a step."""
        return self.max_num_tokens or (2048 if self.eval is None else self.max_num_seqs)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graph modes: one that is timed, or those that are scored."""
        if self.graph is None or self.graph == "all":
            return ("full_and_piecewise",) if self.eval is None else MODES
        return (self.graph,)


@attrs.frozen(kw_only=True)
class Plan(Options):
    """Predict a decode loop over pipeline stages from config.json alone: tokens/s and what bounds them, the split of
    the layers, the number of cohorts, the timeline and the programs. Costs are bytes over bandwidth."""

    command, usage = "plan", "(--model DIR | --preset NAME) --pp N [options]"
    summary = "predict a pipeline from a config.json"

    model: str | None = option(MODEL, "a folder with a config.json; weights are not needed", DIR)
    preset: str | None = option(MODEL, "the dimensions of a known model", {"choices": PRESETS})
    pp: int = option(GENERAL, "pipeline stages", whole("N"), attrs.NOTHING)
    json: bool = option(GENERAL, _JSON, SWITCH, False)
    svg: str | None = option(GENERAL, "write a picture of the timeline, too", FILE)
    requests: int = option(LOAD, "requests that decode together", whole("R"), 128)
    context: int | None = option(
        LOAD,
        "tokens before the one that is generated (default 1024, or half of the model's positions)",
        whole("T", 0),
    )
    cohorts: int | None = option(
        LOAD, "groups of requests that take turns (default: the number that is fastest)", whole("C", 1, 1000)
    )
    steps: int = option(LOAD, "steps of each cohort in the timeline", whole("K"), 2)
    bandwidth: float = option(
        MACHINE, "memory bandwidth of a device (default 4800, an H200's data sheet)", BANDWIDTH, 4800.0
    )
    link: float = option(MACHINE, "bandwidth between two ranks (default: no limit)", LINK, math.inf)
    latency: float = option(MACHINE, "microseconds of a transfer, whatever its size", LATENCY, 0)
    capacity: int = option(MACHINE, "messages that an edge holds", whole("M"), 2)
