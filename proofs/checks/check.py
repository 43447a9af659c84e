"""`check`: checks weft's laws of pure functions on a user's function."""

import pickle
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import attrs
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.errors import CheckError
from weft.proofs.checks.code import Writer
from weft.proofs.checks.difference import ATOL, RTOL, LawViolation
from weft.proofs.checks.elements import Tolerance
from weft.proofs.checks.equivalence import Counterexample
from weft.proofs.checks.fresh import FreshProcesses
from weft.proofs.checks.search import (
    as_given,
    check_arguments,
    check_numbers,
    copies,
    is_strategy,
    name_of,
    once,
    remember,
    remembered,
    search,
)
from weft.proofs.checks.subject import Arguments, Outcome, Subject, kinds
from weft.proofs.checks.user_laws import LAWS, UserLaw
from weft.stages.choices import pick_device
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.options import GraphifyOptions

# The most calls in one example, which is a sequence of calls.
MOST_CALLS = 4


@attrs.define(eq=False)
class Row:
    """A law and its outcome.

    Args:
        outcome: a word or two.
        examples: the number of examples, up to the first that broke the law.
        compared: the number of results that were compared.
        error: the violation, or the exception that the function itself raised.
        note: the reason why there is no evidence.
    """

    law: UserLaw
    outcome: str
    examples: int = 0
    compared: int = 0
    error: Exception | None = None
    note: str = ""


def check(
    f: Callable[..., Any],
    args: Any,
    *,
    laws: str | Iterable[str] | None = None,
    batch_invariant: bool = False,
    atol: float = ATOL,
    rtol: float = RTOL,
    device: torch.device | str | None = None,
    max_examples: int | None = None,
    console: Console | None = None,
    **options: Unpack[GraphifyOptions],
) -> None:
    """Check weft's laws on your function, and raise an error with the smallest calls that break
    one.

    It prints a row for each law. An example is a sequence of calls, so that replays of different
    calls follow one another: on tapes if the arguments are on a CPU, on CUDA graphs if they are on
    a GPU. Each call gets the donated arguments that the previous one returned.

    A function may keep a value from its first call for later ones. This is detected in two ways.
    First, a call of each kind is captured before the function itself is called, and a capture
    refuses kept tensors and host reads. Second, on Linux, `pure` compares the last call of each
    example with the same call in a forked process that has seen no other call, if the arguments and
    the result are on the CPU, can be pickled, and are not large.

    Args:
        f: the function, or the result of `graphify` with its options.
        args: a strategy that draws a tuple of arguments, or a dict of them by name; or such a
            tuple or dict, whose entries may be strategies. A list of tuples or dicts is one
            sequence of calls, without Hypothesis.
        laws: names among `pure`, `graph`, `replay`, `trace`, `pad`, `func`, `microbatch` and
            `bits`. None: all but the last two. `microbatch` is for functions separable by rows,
            `(params, state, batch) -> (state, out)`; `bits` for those and for functions with a
            ladder.
        batch_invariant: check `bits`, too: in `weft.batch_invariant()`, no bit of a result may
            depend on padding or on the rest of the batch. If one does, the error names the first
            operator whose result differs. Only the drawn sizes are checked: draw the sizes that you
            serve, with the ladder that pads them.
        atol, rtol: the tolerance for laws that compare runs of different shapes (`pad`,
            `microbatch`). All other comparisons are bitwise.
        device: the device of the arguments, `"cuda"` for CUDA graphs; None: the device they were
            drawn on.
        max_examples: the examples for each law; None: a quarter of the active Hypothesis profile's,
            since an example has up to four calls.
        console: where to print the table; None: the terminal.
        options: options of `graphify`: `ladder`, `donate_argnames`, `static_argnames`, `split_at`.

    Raises:
        Counterexample: a law does not hold. It names the law, shows the difference, and has the
            smallest calls found as code to paste.
        CheckError: there is no such law or argument, or a law in `laws` cannot be checked.
        DeviceError: this machine has no such device.
        Exception: whatever the function itself raises, with a note of the arguments.

    >>> import torch
    >>> check(lambda x: x.tanh(), (torch.ones(2),), laws=("pure", "graph"))
    2 laws of f
    law        what must hold                  outcome  examples  compared
    pure       equal arguments, equal results  holds           1         3
    graph  L1  a graph of it is it, bitwise    holds           1         2
    """
    __tracebackhide__ = True
    call = f"weft.proofs.check({name_of(f)}, ...)"
    check_numbers(call, max_examples, atol, rtol)
    if device is None:
        device = None
    else:
        device = pick_device(device, call=call)
    if isinstance(f, Graphified):
        graph: Graphified[..., Any] = f
    else:
        graph = graphify(f, **options)
    if graph is f and options:
        problem = f"a graphified function, and {', '.join(options)}"
        raise CheckError(
            call, problem, "the function itself with these options, or the graphified one without"
        )
    subject = Subject(graph, name_of(graph.__wrapped__), Tolerance(atol, rtol))
    chosen = _chosen(call, subject, laws)
    examples = _examples(call, args)
    if batch_invariant:
        chosen += [law for law in _chosen(call, subject, "bits") if law not in chosen]

    def prepared(arguments: Any) -> Arguments:
        bound: Arguments = copies(subject.bind(check_arguments(arguments, call, "drew ")), device)
        return bound

    rows: list[Row] = []
    _warm_up()
    # Processes are forked before the function's first call, which they must not have seen.
    with warnings.catch_warnings(), FreshProcesses(subject.answer) as processes:
        subject = attrs.evolve(subject, processes=processes)
        first_calls = _FirstCalls(subject)
        # Drawn params differ from call to call, so many captures are expected here.
        warnings.filterwarnings("ignore", ".*calls captured a graph", RuntimeWarning)
        for law in chosen:
            rows.append(_row(subject, law, examples, prepared, max_examples, rows, first_calls))
    _show(subject, rows, console or Console(highlight=False))
    _raise_first(f, rows, options)


def _warm_up() -> None:
    """Do the one-time work of a first capture before processes are forked, which would all repeat
    it."""
    # Pickled and read, as questions and answers are.
    example = pickle.loads(pickle.dumps(Outcome(copies(torch.ones(1)))))
    graphify(lambda x: x + 1)(example.result)


def _chosen(call: str, subject: Subject, laws: str | Iterable[str] | None) -> list[UserLaw]:
    """The requested laws, in the order of `LAWS`."""
    if laws is None:
        return [law for law in LAWS if not law.on_request]
    names = (laws,) if isinstance(laws, str) else tuple(laws)
    if unknown := [name for name in names if name not in {law.name for law in LAWS}]:
        law_names = [law.name + f" ({law.number})" * bool(law.number) for law in LAWS]
        raise CheckError(call, f"laws={unknown[0]!r}", f"some, by name, of {', '.join(law_names)}")
    chosen = [law for law in LAWS if law.name in names]
    for law in chosen:
        if needs := law.needs(subject):
            raise CheckError(
                call,
                f"laws={law.name!r}, which {needs}",
                f"check({subject.name}, ..., ladder=[...])",
            )
    return chosen


def _examples(call: str, args: Any) -> Any:
    """A strategy that draws sequences of calls; or one sequence, if `args` has no strategy."""
    if isinstance(args, list) and args:
        return [check_arguments(arguments, call, "holds ") for arguments in args]
    drawn = as_given(args, call)
    if not is_strategy(drawn):
        return [drawn]
    from hypothesis import strategies as st

    return st.lists(drawn, min_size=1, max_size=MOST_CALLS)


def _count(max_examples: int | None) -> int:
    if max_examples is not None:
        return max_examples
    from hypothesis import settings

    return -(-settings().max_examples // MOST_CALLS)


def _row(
    subject: Subject,
    law: UserLaw,
    examples: Any,
    prepared: Callable[[Any], Arguments],
    max_examples: int | None,
    before: Sequence[Row],
    first_calls: "_FirstCalls",
) -> Row:
    """Check one law, unless it does not apply, or the function is known not to be pure."""
    if needs := law.needs(subject):
        return Row(law, needs)
    # The other laws presuppose purity, and would only report its violation in other words.
    if any(row.error is not None and row.law.name == "pure" for row in before):
        return Row(law, "not checked")
    total, last = 0, [Arguments()]

    def run(drawn: list[Any]) -> None:
        nonlocal total, last
        calls = last = [prepared(arguments) for arguments in drawn]
        try:
            first_calls.audit(calls, refuse=law.captures)
            total += law.run(subject, calls)
        except LawViolation as error:
            raise _Broken(error, calls) from error.__cause__
        except Exception as error:
            remember(error, calls)
            raise

    title = f"check({subject.name}), law {law.name!r}"
    # An earlier law has met a call that cannot be captured: no search is needed.
    if law.captures and first_calls.refused is not None:
        result = once(run, [first_calls.refused])
    elif is_strategy(examples):
        result = search(run, examples, title, (subject.graph,), _count(max_examples))
    else:
        result = once(run, examples)
    if not result.examples:
        return Row(
            law,
            "not searched",
            note="was searched for no example: the Hypothesis profile has no Phase.generate",
        )
    outcome = "holds" if total else "no evidence"
    if result.error is not None:
        if isinstance(result.error, _Broken):
            outcome = "broken"
        else:
            outcome = "raises"
    if outcome == "no evidence":
        note = _why_no_replay(subject, last[0])
    else:
        note = ""
    return Row(law, outcome, result.examples, total, result.error, note)


def _why_no_replay(subject: Subject, call: Arguments) -> str:
    """The reason why a captured call is not replayed; empty if it is replayed."""
    graphed = subject.fresh()
    subject.call(graphed, copies(call))
    explanation = subject.call(graphed.explain, copies(call))
    if explanation.captured:
        return ""
    return str(explanation)


@attrs.define(eq=False)
class _FirstCalls:
    """Captures calls before the function itself is called, to detect a cache that the first call
    fills.

    If processes can be forked, each call is the first one in its process. Otherwise it comes before
    all other calls of its kind in this process.

    Args:
        subject: the function.
        audits: for each kind of call that was captured, the kind and what the capture refused.
        refused: the first call that a capture refused during a law that captures nothing itself.
    """

    subject: Subject
    audits: list[tuple[Any, str]] = attrs.field(factory=list)
    refused: Arguments | None = None

    def audit(self, calls: Sequence[Arguments], *, refuse: bool) -> None:
        """Capture calls of new kinds.

        Raises:
            LawViolation: a call cannot be captured, and `refuse`.
        """
        for call in calls:
            text = self._audit(call)
            if text and refuse:
                raise LawViolation(text)
            if text and self.refused is None:
                self.refused = call

    def _audit(self, call: Arguments) -> str:
        kind = kinds(call)
        for audited, text in self.audits:
            if audited == kind:
                return text
        answer = self.subject.ask(("refusal", [call]))
        if answer is None:
            text = self.subject.refusal(call)
        else:
            text = answer
        self.audits.append((kind, text))
        return text


class _Broken(LawViolation):
    """A violation of a law, with the calls that violate it."""

    def __init__(self, violation: LawViolation, calls: list[Arguments]) -> None:
        super().__init__(str(violation))
        self.calls = calls


def _show(subject: Subject, rows: Sequence[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("law", "", "what must hold", "outcome"):
        table.add_column(name)
    for name in ("examples", "compared"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (f"{row.examples:,}", f"{row.compared:,}")
        table.add_row(row.law.name, row.law.number, row.law.promise, escape(row.outcome), *counts)
    console.print(f"{len(rows)} law{'s' * (len(rows) != 1)} of {subject.name}", markup=False)
    console.print(table)
    # Several laws may have the same note.
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(f"no evidence: {subject.name} {note}", markup=False)


def _raise_first(f: Callable[..., Any], rows: Sequence[Row], options: Any) -> None:
    """Raise the first violation, with code for its calls."""
    __tracebackhide__ = True
    error, law = next(((row.error, row.law) for row in rows if row.error is not None), (None, None))
    if error is None or law is None:
        return
    named_values = {
        name: value
        for name, value in options.items()
        if not isinstance(value, str | bool | int | None)
    }
    option_texts = [
        f"{name}={name if name in named_values else repr(value)}" for name, value in options.items()
    ]
    last = f"weft.proofs.check({name_of(f)}, {', '.join(['calls', f'laws={law.name!r}', *option_texts])})"
    if isinstance(error, _Broken):
        if law.number:
            number = f" ({law.number})"
        else:
            number = ""
        text = f"law {law.name!r}{number} does not hold of {name_of(f)}: {law.promise}\n"
        text += textwrap.indent(str(error), "  ")
        values = [("calls", error.calls), *named_values.items()]
        raise Counterexample(text, values, last) from error.__cause__
    if remembered(error) is None:
        raise error
    code = Writer({"import weft.proofs"}).block([("calls", remembered(error))])
    error.add_note(f"{name_of(f)} itself raised this, for\n{textwrap.indent(code, '    ')}")
    raise error
