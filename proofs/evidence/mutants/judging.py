"""Say of mutants whether a test notices them: run by `drawn.py` as a script, in a copy of the
repository.

    python judging.py job.json

The process imports what the tests import, and collects them, once. First it runs each test without
a change, and notes its time and the lines of the drawn files that it reaches. Then it forks for
each mutant. The fork puts the changed code into the functions that exist, and runs the tests that
reach the changed statement, quick ones before slow ones, until one fails. A change that has an
effect while modules are imported is tried in a fork that has imported nothing of the project yet.
Verdicts are appended to a file, so that an interrupted run goes on where it stopped.

The script imports nothing of the project itself: a mutant may be in it.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# The most seconds that a fork has until its first test begins. It may have to import everything.
_SECONDS_TO_START = 120.0

# The memory that a mutant may take in addition to that of the process that it was forked from.
# A changed bound can make a loop allocate without end, and take the machine with it.
_SPARE_BYTES = 8 << 30


class Lines:
    """The lines of certain files that run, as `(file, line)`."""

    def __init__(self, files: Sequence[str], root: Path) -> None:
        self._names = {str((root / file).resolve()): file for file in files}
        # Remembered, since a path is resolved at every call of every function while lines are
        # watched.
        self._files: dict[str, str | None] = {}
        self.reached: set[tuple[str, int]] = set()

    def start(self) -> None:
        """Look at every thread that starts from now on, and at this one."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        """Look no longer."""
        sys.settrace(None)
        threading.settrace(None)

    def file_of(self, name: str) -> str | None:
        """The drawn file that a code object's file name is; None if it is none."""
        if name not in self._files:
            self._files[name] = self._names.get(os.path.realpath(name))
        return self._files[name]

    def _call(self, frame: types.FrameType, _event: str, _argument: Any) -> Any:
        file = self.file_of(frame.f_code.co_filename)
        # No line events for other files: without this the tests would take many times as long.
        if file is None:
            return None
        self.reached.add((file, frame.f_lineno))

        def line(frame: types.FrameType, _event: str, _argument: Any) -> Any:
            self.reached.add((file, frame.f_lineno))
            return line

        return line


def code_pairs(
    before: types.CodeType, after: types.CodeType
) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """The code objects that stand at the same place of two versions of a module.

    Raises:
        ValueError: the versions define different functions.
    """
    # Code objects compare by their contents, so that only those with a change are replaced.
    if before != after:
        yield before, after
    inner_before = [
        constant for constant in before.co_consts if isinstance(constant, types.CodeType)
    ]
    inner_after = [constant for constant in after.co_consts if isinstance(constant, types.CodeType)]
    # Places are matched by their order. With a function more or less the pairs would be wrong ones.
    if [code.co_name for code in inner_before] != [code.co_name for code in inner_after]:
        raise ValueError("the change adds or removes a function")
    for one, other in zip(inner_before, inner_after, strict=True):
        yield from code_pairs(one, other)


def _place_of(code: types.CodeType) -> tuple[str, int, bytes]:
    """What tells the code objects of one file apart, also those of two lambdas of a line."""
    return code.co_qualname, code.co_firstlineno, code.co_linetable


def functions_in(files: Iterable[Path]) -> dict[Path, list[types.FunctionType]]:
    """The functions that exist of each of these files, by its resolved path."""
    functions_of: dict[Path, list[types.FunctionType]] = {path.resolve(): [] for path in files}
    by_name: dict[str, list[types.FunctionType] | None] = {}
    gc.unfreeze()  # what is frozen is not listed
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:
            name = thing.__code__.co_filename
            if name not in by_name:
                by_name[name] = functions_of.get(Path(name).resolve())
            functions = by_name[name]
            if functions is not None:
                functions.append(thing)
    gc.freeze()  # a fork that collects garbage would write to all of it, and so copy it
    return functions_of


def put_in_place(
    functions: Iterable[types.FunctionType], path: Path, before: str, after: str
) -> bool:
    """Give the functions of a file their changed code. False if that leaves something unchanged."""
    # Not with the future statements of this file, which the module need not have.
    compiled = [compile(text, str(path), "exec", dont_inherit=True) for text in (before, after)]
    try:
        changed = {_place_of(one): other for one, other in code_pairs(compiled[0], compiled[1])}
    except ValueError:
        return False
    num_changed = 0
    for function in functions:
        code = changed.get(_place_of(function.__code__))
        if code is None:
            continue
        # Python refuses code with another number of closed-over variables.
        if len(function.__code__.co_freevars) != len(code.co_freevars):
            return False
        function.__code__ = code
        num_changed += 1
    # A function that no object has yet is made by one that has its code, so at least one must be
    # there.
    return num_changed > 0


class _Pipe:
    """What a fork tells of its tests, a line each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tell(self, *words: object) -> None:
        os.write(self._descriptor, (json.dumps(words) + "\n").encode())


def run_items(
    items: Sequence[pytest.Item], pipe: _Pipe, *, until_failure: bool, lines: Lines | None = None
) -> None:
    """Run tests in their order, and tell when each begins, and how it ends."""
    from _pytest.runner import runtestprotocol

    for index, item in enumerate(items):
        if index + 1 < len(items):
            # Pytest keeps a fixture of a module only if it knows that the next test uses it too.
            following = items[index + 1]
        else:
            following = None
        pipe.tell("begins", item.nodeid)
        if lines is not None:
            # Each test has its own lines. Those of a shared fixture count for the first test that
            # uses it, which is a limit of the method.
            lines.reached.clear()
            lines.start()
        # Processes that a test starts are not traced. That they used the processor is the sign that
        # a test may reach more than its lines say.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        reports = runtestprotocol(item, log=False, nextitem=following)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if any(report.failed for report in reports):
            outcome = "failed"
        else:
            outcome = "passed"
        # After the other two: a skipped test has passed reports as well, of its setup and teardown.
        if any(report.skipped for report in reports):
            outcome = "skipped"
        starts_processes = after.ru_utime + after.ru_stime > before.ru_utime + before.ru_stime
        reached: dict[str, list[int]] = {}
        if lines is not None:
            lines.stop()
            for file, line in sorted(lines.reached):
                reached.setdefault(file, []).append(line)
        pipe.tell("ends", item.nodeid, outcome, seconds, starts_processes, reached)
        if outcome == "failed" and until_failure:
            return
    pipe.tell("done")


def in_fork(
    work: Callable[[_Pipe], None], limit_of: Callable[[str], float]
) -> tuple[list[list[Any]], bool]:
    """What a fork tells, and whether a test took longer than its limit. The fork ends with all that
    it started."""
    # A pipe and not an exit code: what a test said before the process died must not be lost.
    reading, writing = os.pipe()
    scratch = tempfile.mkdtemp(prefix="fork-")
    child = os.fork()
    if child == 0:
        # A fork must never return into the pytest that it is a copy of, whatever is raised in it.
        code = 1
        with contextlib.suppress(BaseException):
            # A group of its own, so that what a test has started ends with it.
            os.setsid()
            os.close(reading)
            os.environ["TMPDIR"] = scratch
            # The module remembers the folder that it chose in the parent.
            tempfile.tempdir = None
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + _SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            work(_Pipe(writing))
            code = 0
        os._exit(code)
    os.close(writing)
    words: list[list[Any]] = []
    rest = b""
    deadline = time.monotonic() + _SECONDS_TO_START
    late = False
    try:
        while True:
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = True
                break
            some = os.read(reading, 1 << 16)
            if not some:
                break
            *whole, rest = (rest + some).split(b"\n")
            for line in whole:
                words.append(json.loads(line))
                if words[-1][0] == "begins":
                    # The limit is for each test and not for the fork: a mutant that makes one test
                    # hang must not use up the time of hundreds.
                    deadline = time.monotonic() + limit_of(words[-1][1])
                else:
                    deadline = time.monotonic() + _SECONDS_TO_START
            if words and (words[-1][0] == "done" or words[-1][0] == "ended"):
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            # Both, since the fork may not have come to its `setsid` yet.
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.waitpid(child, 0)
        shutil.rmtree(scratch, ignore_errors=True)
    return words, late


class Judge:
    """Tries mutants. Its process has collected the tests, and another that has not is at the end of
    a pipe.

    Args:
        job: `root`, `files`, `tests`, `mutants`, `verdicts`, `baseline`, `progress`, `seconds`,
            `budget`.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.root = Path(job["root"])
        self.files = sorted(job["files"])
        self.lines = Lines(self.files, self.root)
        self.at_import: set[tuple[str, int]] = set()
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[Path, list[types.FunctionType]] = {}
        self.tests: dict[str, Any] = {}
        self.alone: dict[str, bool] = {}
        self.changes = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running the tests once: what this file is for."""
        self.lines.stop()
        # What was reached by now ran while modules were imported and tests collected.
        self.at_import = set(self.lines.reached)
        if session.testsfailed:
            # Every mutant would count as killed.
            raise pytest.UsageError("the tests cannot be collected without a change")
        self.items = {item.nodeid: item for item in session.items}
        self.functions = functions_in(self.root / file for file in self.files)
        self.measure()
        finished = set()
        verdicts = Path(self.job["verdicts"])
        if verdicts.exists():
            # Verdicts of an earlier run that was stopped.
            finished = {json.loads(line)["number"] for line in verdicts.read_text().splitlines()}
        todo = [mutant for mutant in self.job["mutants"] if mutant["number"] not in finished]
        started = time.monotonic()
        for index, mutant in enumerate(todo):
            verdict = self.judge(mutant)
            with verdicts.open("a") as file:
                file.write(json.dumps(verdict) + "\n")
            rate = (time.monotonic() - started) / (index + 1)
            text = (
                f"{index + 1}/{len(todo)} {rate:.1f} s each: {verdict['outcome']} {mutant['text']}"
            )
            self.say(
                f"{text} by {verdict['killed_by']} ({verdict['num_run']} run, {verdict['num_left']}"
                " left)"
            )
        return True

    def say(self, text: str) -> None:
        """Show progress where pytest does not capture it."""
        with Path(self.job["progress"]).open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def measure(self) -> None:
        """Run the tests without a change, unless an earlier run of this job did."""
        path = Path(self.job["baseline"])
        if path.exists():
            self.tests = json.loads(path.read_text())
            return
        self.say(f"{len(self.items)} tests without a change")
        started = time.monotonic()
        items = list(self.items.values())
        while items:
            work = functools.partial(run_items, items, until_failure=False, lines=self.lines)
            words, _ = in_fork(work, lambda _: self.job["seconds"])
            for word, *rest in words:
                if word == "ends":
                    name, outcome, seconds, starts_processes, reached = rest
                    self.tests[name] = {
                        "outcome": outcome,
                        "seconds": seconds,
                        "starts_processes": starts_processes,
                        "reached": reached,
                    }
            begun = [rest[0] for word, *rest in words if word == "begins"]
            if words and words[-1][0] == "done":
                break
            # The process has ended between tests, so that no test can be blamed, and none can be
            # left out.
            if not begun or begun[-1] in self.tests:
                raise RuntimeError(f"the tests end without a change: {words[-1:]}")
            self.tests[begun[-1]] = {
                "outcome": "late",
                "seconds": 0.0,
                "starts_processes": False,
                "reached": {},
            }
            # A test that ended the process, or took too long, took those after it along: they run
            # in a new fork.
            items = [item for item in items if item.nodeid not in self.tests]
        odd = [name for name, test in self.tests.items() if test["outcome"] in ("failed", "late")]
        self.say(f"{time.monotonic() - started:.0f} s; these do not pass without a change: {odd}")
        path.write_text(json.dumps(self.tests))

    def chosen(self, mutant: Mapping[str, Any]) -> tuple[list[str], int]:
        """The tests that reach a mutant, in the order to run them, and how many more the budget
        leaves out."""
        file = mutant["file"]
        span = set(range(mutant["first_line"], mutant["last_line"] + 1))
        rows = []
        for name, test in self.tests.items():
            reached = test["reached"].get(file, [])
            if test["outcome"] != "passed" or name not in self.items:
                continue
            # What another process of a test reaches is not known.
            reaches = bool(span.intersection(reached)) or (
                bool(reached) and not mutant["in_function"]
            )
            if reaches or test["starts_processes"]:
                rows.append((not reaches, name.partition("::")[0], test["seconds"], name))
        # Tests of one file follow each other, since they may share a fixture.
        sums: dict[str, float] = {}
        for _, test_file, seconds, _ in rows:
            sums[test_file] = sums.get(test_file, 0.0) + seconds
        # First the tests that certainly reach the change, then those that may do so in another
        # process.
        rows.sort(key=lambda row: (row[0], sums[row[1]], row[1], row[2], row[3]))
        names = []
        spent = 0.0
        for _, _, seconds, name in rows:
            # A slow test that does not fit is left out, and quicker ones after it still run.
            if spent + seconds <= self.job["budget"]:
                spent += seconds
                names.append(name)
        return names, len(rows) - len(names)

    def limit(self, name: str) -> float:
        """How long a test may take with a change."""
        if name in self.tests:
            return 30.0 + 20.0 * float(self.tests[name]["seconds"])
        return 60.0

    def judge(self, mutant: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a test notices a mutant, and which."""
        path = self.root / mutant["file"]
        before = path.read_text(encoding="utf-8")
        names, num_left = self.chosen(mutant)
        span = {
            (mutant["file"], line) for line in range(mutant["first_line"], mutant["last_line"] + 1)
        }
        # A function that an import calls has done its work before a fork could change it.
        acts_at_import = not mutant["in_function"] or bool(span & self.at_import)
        started = time.monotonic()
        ways = []
        killed_by = None
        outcome = "survived"
        num_run = 0
        while True:
            self.change(path, mutant["source"])
            try:
                words: list[list[Any]] = []
                exact = False
                late = False
                if mutant["in_function"]:
                    ways.append("in place")
                    words, late = in_fork(
                        lambda pipe: self.run_here(mutant, before, names, pipe), self.limit
                    )
                    exact = not (words and words[-1] == ["ended", "cannot be put in place"])
                    # Nothing ran in that fork: the verdict must come from one that imports the
                    # change.
                    killed_by, outcome = outcome_of(words, late) if exact else (None, "survived")
                if outcome == "survived" and (acts_at_import or not exact):
                    ways.append("imported")
                    words, late = self.job["fresh"](names, self.limit)
                    killed_by, outcome = outcome_of(words, late)
                num_run = sum(word[0] == "ends" for word in words)
            finally:
                # Also where a run is interrupted: the copy is used for the next mutant.
                self.change(path, before)
            # A test may fail alone because it needs one that ran before it; then it says nothing of
            # the mutant.
            if killed_by in self.items and not self.passes_alone(str(killed_by)):
                self.say(f"{killed_by} fails alone without a change: left out")
                names.remove(str(killed_by))
                outcome = "survived"
                continue
            break
        return {
            "number": mutant["number"],
            "mutant": mutant["text"],
            "outcome": outcome,
            "killed_by": killed_by,
            "ways": ways,
            "num_run": num_run,
            "num_left": num_left if killed_by is None else 0,
            "seconds": round(time.monotonic() - started, 2),
        }

    def change(self, path: Path, source: str) -> None:
        """Write a file with a time that no compiled copy of it has."""
        path.write_text(source, encoding="utf-8")
        self.changes += 1
        # Python takes a compiled copy for current if the time and the size of the source are the
        # same, and a change often leaves the size as it was.
        moment = time.time() + self.changes
        os.utime(path, (moment, moment))

    def run_here(
        self, mutant: Mapping[str, Any], before: str, names: Sequence[str], pipe: _Pipe
    ) -> None:
        """In a fork: put a mutant in place, and run its tests."""
        path = self.root / mutant["file"]
        loaded = any(
            self.lines.file_of(str(getattr(module, "__file__", None) or "")) == mutant["file"]
            for module in list(sys.modules.values())
        )
        functions = self.functions[path.resolve()]
        # A file that nothing has imported yet is read from disk, where the change is.
        if loaded and not put_in_place(functions, path, before, mutant["source"]):
            pipe.tell("ended", "cannot be put in place")
            return
        run_items([self.items[name] for name in names], pipe, until_failure=True)

    def passes_alone(self, name: str) -> bool:
        """Whether a test passes by itself without a change."""
        if name not in self.alone:
            work = [self.items[name]]
            words, late = in_fork(
                lambda pipe: run_items(work, pipe, until_failure=True), self.limit
            )
            self.alone[name] = outcome_of(words, late)[1] == "survived"
        return self.alone[name]


def outcome_of(words: Sequence[Sequence[Any]], late: bool) -> tuple[str | None, str]:
    """The test that noticed, and how: `killed`, `late` or `ended` if the process did; or
    `survived`."""
    begun = [str(word[1]) for word in words if word[0] == "begins"]
    last = begun[-1] if begun else "collection"
    if late:
        return last, "late"
    if words and words[-1][0] == "done":
        return None, "survived"
    if words and words[-1][0] == "ends":
        return last, "killed"
    return last, "ended"


class _Chosen:
    """A plugin that runs chosen tests of those that are collected, in their order."""

    def __init__(self, names: Sequence[str], pipe: _Pipe) -> None:
        self._names = names
        self._pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:
            items = {item.nodeid: item for item in session.items}
            run_items(
                [items[name] for name in self._names if name in items],
                self._pipe,
                until_failure=True,
            )
        return True


# No workers of xdist, which the project's own settings start: the tests must be in the process that
# forks. No cache, since the mutants' failures are none of the project.
_ARGUMENTS = ("-n", "0", "-q", "-p", "no:cacheprovider")


def run_fresh(
    names: Sequence[str], limit_of: Callable[[str], float]
) -> tuple[list[list[Any]], bool]:
    """Run tests in a fork of a process that has imported nothing of the project."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in names))

    def work(pipe: _Pipe) -> None:
        pytest.main([*_ARGUMENTS, *files], plugins=[_Chosen(names, pipe)])

    if names:
        return in_fork(work, limit_of)
    return ([["done"]], False)


def _limit_in(seconds: Mapping[str, float], name: str) -> float:
    """The seconds after which a test is stopped, by the test's name."""
    return seconds.get(name, 60.0)


def serve_fresh(requests: int, answers: int) -> None:
    """Answer requests for fresh runs, until the pipe is closed."""
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            names, seconds = json.loads(line)
            out.write(json.dumps(run_fresh(names, functools.partial(_limit_in, seconds))) + "\n")
            out.flush()


def main(path: str) -> int:
    """Do a job."""
    job = json.loads(Path(path).read_text())
    os.chdir(job["root"])
    for name in job["imports"]:
        # A package that is not there is not needed either, or its test is skipped.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    here_reads, fresh_writes = os.pipe()
    fresh_reads, here_writes = os.pipe()
    child = os.fork()
    if child == 0:
        # Each side closes the ends that are the other's: a reader sees the end of a pipe only when
        # no process has its writing end any more.
        os.close(here_reads)
        os.close(here_writes)
        serve_fresh(fresh_reads, fresh_writes)
        os._exit(0)
    os.close(fresh_reads)
    os.close(fresh_writes)
    answers = os.fdopen(here_reads)
    requests = os.fdopen(here_writes, "w")

    def fresh(
        names: Sequence[str], limit_of: Callable[[str], float]
    ) -> tuple[list[list[Any]], bool]:
        requests.write(json.dumps([names, {name: limit_of(name) for name in names}]) + "\n")
        requests.flush()
        words, late = json.loads(answers.readline())
        return words, late

    job["fresh"] = fresh
    judge = Judge(job)
    judge.lines.start()
    # The fork above was made before this, which imports the project: it stays without it.
    code = pytest.main([*_ARGUMENTS, *job["tests"]], plugins=[judge])
    judge.lines.stop()
    requests.close()
    os.waitpid(child, 0)
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
