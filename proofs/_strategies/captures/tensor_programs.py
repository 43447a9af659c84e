"""Random programs on tensors, as Python code: `tensor_programs()` draws `TensorProgram`s to run
eagerly and in graphs."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.proofs._strategies.captures.operations import OPERATIONS, Operation
from weft.torchapi.private import storage_id

# Mostly matrices, often with three columns: many operations need a matrix, and `layer` takes 3.
_SHAPES = ((2, 3), (3, 3), (4,), (3, 2), (2, 3), (3, 3), (5, 3), (), (1, 3), (0, 3))
# Mostly float32, because most operations need real numbers.
_DTYPES = (
    "float32",
    "float32",
    "float32",
    "float32",
    "float32",
    "float64",
    "int64",
    "complex64",
    "bool",
)
# The ways to make an argument from one of one or two base tensors, which other arguments may share.
ALIASES = (
    "{base}.clone()",
    "{base}",
    "{base}[1:]",
    "{base}.t()",
    "{base}[..., ::2]",
    "{base}.expand(2, *{base}.shape)",
    "{base}[:-1]",
    "torch.nn.Parameter({base}, requires_grad=False)",
    "{base}.diagonal()",
    "{base}.as_strided((2, 2), (1, 1))",
    "torch.nn.Parameter({base}.clone())",
    "{base}.clone().requires_grad_()",
)

# The surroundings of a call, as code, each with the code that defines its names.
SURROUNDINGS: dict[str, str] = {
    "contextlib.nullcontext()": "",
    "torch.no_grad()": "",
    "torch.inference_mode()": "",
    "torch.autocast(device, dtype=torch.bfloat16)": "",
    "torch.device(device)": "",
    "doubling": (
        """
class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") in ("mul", "sin", "matmul") else result

doubling = Doubling()
"""
    ),
    "default_dtype(torch.float64)": (
        """
@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
"""
    ),
    "deterministic()": (
        """
@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
"""
    ),
    "doubled_when_saved()": (
        """
def double(x):
    return x * 2 if x.is_floating_point() else x  # an index would point outside

def same(x):
    return x

def doubled_when_saved():
    return torch.autograd.graph.saved_tensors_hooks(double, same)
"""
    ),
}
# Surroundings that apply to all threads of the process.
OF_ALL_THREADS = ("default_dtype", "deterministic")

# Changes to closed-over tensors between two calls.
EVENTS = (
    "held.add_(1)",
    "held = held * 2",
    "held.data = held.data.clone().neg_()",
    "layer.weight.mul_(2)",
    "layer.weight.data = layer.weight.data + 1",
    "layer.bias = torch.nn.Parameter(layer.bias - 1, requires_grad=False)",
)

_HELD = """
held = torch.arange(3, dtype=torch.float32, device=device).cos()
"""
_GENERATOR = """
generator = torch.Generator(device).manual_seed(0)
"""
# The last argument of a function that draws from a generator: none (it uses the closed-over one),
# the closed-over generator, or a new one for each call.
_GENERATORS = ("", "generator", "torch.Generator(device).manual_seed(call)")
_LAYER = """
layer = torch.nn.Linear(3, 2, device=device).requires_grad_(False)
torch.nn.init.constant_(layer.weight, 0.3)
torch.nn.init.constant_(layer.bias, -0.1)
"""


@attrs.frozen
class TensorProgram:
    """A random function of tensors, with its arguments and calls, as Python code.

    Args:
        code: defines `f`; `arguments(call)`, which makes the arguments of call number `call`;
            `around(call)`, the context of that call; `before(call)`, which runs before it; and
            perhaps `graph`, if that is not `graphify(f)`.
        calls: the number of calls, each with new values.
        donated: the names of the donated arguments, which come first. The first results are their
            next values.
        static: the names of the arguments that are not tensors.
        borrow: whether results are borrowed.
        chained: whether the donated arguments of a call are the results of the call before.
        threads: the number of threads that make all calls at once at the end; 0 means none.
        draws: whether the states of random generators can be compared, because no other thread
            draws.
        compiler: of the graph; None: nothing is compiled.

    Its `repr` is a script to paste and run. For each call it prints the function's result, then the
    graph's.
    """

    code: str
    calls: int
    donated: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    borrow: bool = False
    chained: bool = False
    threads: int = 0
    draws: bool = True
    compiler: str | None = None

    def options(self) -> dict[str, Any]:
        """The options of `graphify`."""
        return {
            "donate_argnames": self.donated,
            "static_argnames": self.static,
            "outputs": "borrow" if self.borrow else "safe",
            "compiler": self.compiler,
        }

    def run(self) -> dict[str, Any]:
        """Run the definitions and return them by name: new tensors and functions each time."""
        return run_code(self.code)

    def __repr__(self) -> str:
        return f"{self.code}\n\nimport weft\n{self._calls()}"

    def _calls(self) -> str:
        options = "".join(
            f", {name}={value!r}"
            for name, value in self.options().items()
            if value not in ((), "safe", None)
        )
        if self.donated:
            plain = f"weft.donates{self.donated!r}(f)"
        else:
            plain = "f"
        if "\ngraph = " in self.code or "\ndef graph(" in self.code:
            graph = ""
        else:
            graph = f"graph = weft.graphify(f{options})\n"
        if self.threads:
            more = f"# {self.threads} threads make these calls at once too\n"
        else:
            more = ""
        more += (
            "# the first argument is the first result of the call before\n" if self.chained else ""
        )
        return (
            f"{graph}{more}for call in range({self.calls}):\n    before(call)\n    with"
            f" around(call):\n        print({plain}(*arguments(call)), graph(*arguments(call)),"
            " sep='\\n')\n"
        )


def run_code(code: str) -> dict[str, Any]:
    """Run a program's definitions in a new namespace, and return that."""
    names: dict[str, Any] = {"__name__": "a_random_program"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "<a random program>", "exec"), names)
    return names


@attrs.define
class _Body:
    """The statements of a function while it is being written, and the tensors that they made.

    `foreign` holds the storages that no statement may write: those of arguments that are not
    donated, and of the closed-over tensor."""

    names: dict[str, Any]
    tensors: dict[str, Tensor]
    foreign: set[int]
    lines: list[str] = attrs.field(factory=list)

    def add(self, operation: Operation, first: int, second: int) -> None:
        """Add a statement on tensors that fit it, unless there are none or it raises."""
        chosen = self._choose(operation, first, second)
        if chosen is None:
            return
        name = f"y{len(self.tensors)}"
        text = operation.text.format(out=name, a=chosen[0], b=chosen[1])
        if not operation.writes and name not in text:
            text = f"{name} = {text}"
        try:
            exec(text, self.names | self.tensors, namespace := dict[str, Any]())
        except Exception:
            return
        self.lines += text.splitlines()
        if not operation.writes:
            self.tensors[name] = namespace[name]

    def _choose(self, operation: Operation, first: int, second: int) -> tuple[str, str] | None:
        if operation.arity < 2:
            pairs = [(a, "") for a in self.tensors]
        else:
            pairs = []
        if operation.arity == 2:
            pairs = [(a, b) for a in self.tensors for b in self.tensors]
        fitting = [pair for pair in pairs if self._fits(operation, pair)]
        if fitting:
            # Numbers from 0 to 7 are drawn instead of names: which tensors fit is known only here.
            return fitting[(first * 8 + second) % len(fitting)]
        return None

    def _fits(self, operation: Operation, names: tuple[str, str]) -> bool:
        tensors = [self.tensors[name] for name in names[: max(operation.arity, 1)]]
        return operation.fits(*tensors) and not (
            operation.writes and storage_id(tensors[0]) in self.foreign
        )


def _base(index: int, shape: tuple[int, ...], dtype: str) -> str:
    """Code for a tensor whose values depend on the call."""
    count = torch.Size(shape).numel()
    if dtype in ("int64", "bool"):
        values = (
            f"torch.arange({count}, device=device).add(call +"
            f" {index}).remainder({2 if dtype == 'bool' else 5})"
        )
        return f"{values}.reshape({shape}).to(torch.{dtype})"
    start = f"torch.arange({count}, dtype=torch.float64, device=device)"
    return f"{start}.mul(0.7).add(1.3 * call + {index}).sin().reshape({shape}).to(torch.{dtype})"


def _definitions(surroundings: Sequence[str], device: str) -> str:
    helpers = "".join(SURROUNDINGS[text] for text in dict.fromkeys(surroundings))
    return f"import contextlib\n\nimport torch\n\ndevice = {device!r}\n{helpers}"


def _choosing(name: str, values: Sequence[str], first: str = "") -> str:
    """Code of a function that runs the statement at the index of its argument, the call's
    number."""
    lines = [
        f"    if call == {index}:\n        {value}"
        for index, value in enumerate(values)
        if value != "pass"
    ]
    return (
        f"def {name}(call):\n"
        + "\n".join([*([first] if first else []), *lines, "    return None"])
        + "\n"
    )


_STATEMENTS = st.one_of(
    [
        st.tuples(st.sampled_from(kind), st.integers(0, 7), st.integers(0, 7))
        for kind in OPERATIONS.values()
    ]
)


@st.composite
def tensor_programs(
    draw: st.DrawFn, device: str = "cpu", max_calls: int = 5, max_statements: int = 8
) -> TensorProgram:
    """A random function of one to three tensors and perhaps a generator, with calls of it in random
    surroundings.

    The function's statements are of all kinds in `weft.proofs._strategies.captures.operations`:
    views, in-place writes, random numbers, derivatives, inner surroundings and others. Arguments
    may be the same tensor or views of one tensor, and one argument may be donated. A closed-over
    tensor may change between calls.

    >>> from hypothesis import find
    >>> program = find(tensor_programs(), lambda program: True)
    >>> program.calls, program.run()["f"]  # doctest: +ELLIPSIS
    (2, <function f at 0x...>)
    """
    shapes = draw(st.lists(st.sampled_from(_SHAPES), min_size=1, max_size=2))
    dtypes = [draw(st.sampled_from(_DTYPES)) for _ in shapes]
    bases = [
        _base(i, shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    aliases = draw(
        st.lists(
            st.tuples(st.sampled_from(ALIASES), st.sampled_from(range(len(bases)))),
            min_size=1,
            max_size=3,
        )
    )
    # The largest number stands for what is seldom, since examples shrink towards 0.
    donated = draw(st.integers(0, 5)) == 5
    way = draw(st.integers(0, 7))
    # Unless `alone`, other arguments may be views of the donated one.
    borrow = way == 7
    alone = way != 6
    calls = draw(st.integers(2, max_calls))
    # At most two for all calls, so that a later call often comes back to those of an earlier one.
    some = st.sampled_from(draw(st.lists(st.sampled_from([*SURROUNDINGS]), min_size=1, max_size=2)))
    surroundings = [draw(some) for _ in range(calls)]
    # Torch itself refuses in-place writes to an inference tensor outside inference mode.
    if donated:
        surroundings = [around.replace("inference_mode", "no_grad") for around in surroundings]
    events = [draw(st.sampled_from(("pass", "pass", "pass", *EVENTS))) for _ in range(calls)]
    statements = draw(st.lists(_STATEMENTS, min_size=1, max_size=max_statements))
    if donated:
        statements = [
            statement for statement in statements if "inference_mode" not in statement[0].text
        ]
    returned = draw(st.lists(st.integers(0, 15), min_size=1, max_size=3))
    generator = draw(st.sampled_from(_GENERATORS))
    threads = draw(st.sampled_from((0, 0, 0, 2)))
    head = _definitions(surroundings, device) + _HELD + _GENERATOR + _LAYER
    texts = _arguments(bases, aliases, copied=donated and alone)
    names = [f"x{i}" for i in range(len(texts))]
    body = _body(head + _making(bases, texts), names, donated, statements)
    outputs = _outputs(body, names, returned, donated)
    text = "".join(f"    {line}\n" for line in body.lines)
    if "torch.func" in text:  # torch.func does not support hooks on saved tensors
        surroundings = [
            around.replace("doubled_when_saved()", "torch.no_grad()") for around in surroundings
        ]
    if "layer" not in text:
        head = head.removesuffix(_LAYER)
        events = ["pass" if "layer" in event else event for event in events]
    if "generator" not in text:
        head = head.replace(_GENERATOR, "")
        generator = ""
    if generator:
        texts = [*texts, generator]
        names = [*names, "generator"]
    code = (
        f"{head}\n{_making(bases, texts)}\n\ndef f({', '.join(names)}):\n{text}    return"
        f" {outputs}\n\n\n"
        + _choosing("around", [f"return {text}" for text in surroundings])
        + "\n\n"
        + _choosing("before", events, "    global held")
    )
    shared = any(text.startswith(OF_ALL_THREADS) for text in surroundings)
    alone = shared or donated or borrow or any(event != "pass" for event in events) or _draws(text)
    # Torch keeps the level of forward-mode derivatives in a variable shared by all threads.
    alone = alone or "torch.func.jvp" in text
    return TensorProgram(
        code,
        calls,
        ("x0",) if donated else (),
        borrow=borrow,
        chained=donated,
        threads=0 if alone else threads,
    )


def _draws(text: str) -> bool:
    """Whether a function draws random numbers, whose order among threads is undefined."""
    return any(part in text for part in ("rand", "dropout", "bernoulli", "normal_", "uniform_"))


def _arguments(bases: Sequence[str], aliases: Sequence[tuple[str, int]], copied: bool) -> list[str]:
    """The code of each tensor argument: an alias of a base or, if it cannot be made, the base
    itself. With `copied`, the first one is a copy."""
    example = {"torch": torch, "device": "cpu", "call": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example |= {f"base{i}": eval(base, example) for i, base in enumerate(bases)}
        texts = [
            _possible(alias.format(base=f"base{base}"), f"base{base}", example)
            for alias, base in aliases
        ]
    if copied and not texts[0].endswith(".clone()"):
        return [f"{texts[0]}.clone()", *texts[1:]]
    return texts


def _making(bases: Sequence[str], texts: Sequence[str]) -> str:
    lines = [*(f"base{i} = {base}" for i, base in enumerate(bases)), f"return {', '.join(texts)},"]
    return "\n\ndef arguments(call):\n" + "".join(f"    {line}\n" for line in lines)


def _possible(text: str, otherwise: str, names: dict[str, Any]) -> str:
    try:
        eval(text, dict(names))
    except Exception:
        return otherwise
    return text


def _body(
    code: str, names: list[str], donated: bool, statements: Sequence[tuple[Operation, int, int]]
) -> _Body:
    """The function's statements, each of which was tried on the arguments of call 0."""
    # Statements are tried on the CPU, whatever the device of the program.
    module = run_code(code.replace("device = 'cuda'", "device = 'cpu'"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        tensors = module["arguments"](0)
        foreign = {storage_id(x) for x in (*tensors[donated:], module["held"])}
        inputs = dict(zip((*names, "held"), (*tensors, module["held"]), strict=True))
        body = _Body(module, inputs, foreign)
        for operation, first, second in statements:
            body.add(operation, first, second)
    return body


def _outputs(body: _Body, names: list[str], returned: Sequence[int], donated: bool) -> str:
    """The returned names, drawn from the newest, after the next value of a donated argument."""
    newest = [*body.tensors][::-1]
    outputs = [newest[index % len(newest)] for index in returned]
    if donated:
        old = body.tensors[names[0]]
        alike = [
            n
            for n, x in body.tensors.items()
            if x.shape == old.shape and x.dtype == old.dtype and n[0] == "y"
        ]
        outputs.insert(0, alike[-1] if alike else names[0])
    return ", ".join(outputs) + ("," if len(outputs) == 1 else "")
