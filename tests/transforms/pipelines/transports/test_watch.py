"""The board and the watch: what ranks write down, and whom a rank blames, without processes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st
from ranks import advance, scale

from weft.errors import ProgramError, RankError
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports import watch as watch_module
from weft.transforms.pipelines.transports.board import Board, Exit, Position, Pulse, note_exit
from weft.transforms.pipelines.transports.failures import Failure
from weft.transforms.pipelines.transports.guard import Heart
from weft.transforms.pipelines.transports.meeting import attend, gather
from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.secret import Secret
from weft.transforms.pipelines.transports.watch import BEGIN, Watch

SECRET = Secret.fresh()


def make_plan(num_ranks: int, microbatches: int = 1) -> Plan:
    made = pipeline([scale] * num_ranks, microbatches=microbatches, advance=advance)
    return Plan(made.programs(microbatches))


def watches(num_ranks: int, timeout: float = 0.2) -> list[Watch]:
    store = dist.HashStore()
    return [Watch(Board(store, rank, store, SECRET), num_ranks, timeout) for rank in range(num_ranks)]


def together(*calls: Any) -> list[Any]:
    """What the calls return or raise, each in a thread."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except (RankError, ProgramError) as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_record_of_another_transport_of_the_run_is_none_of_this_one() -> None:
    store = dist.HashStore()
    first, second = (dist.PrefixStore(f"weft/0/{number}", store) for number in range(2))
    boards = [Board(own, 0, store, SECRET, prefix=f"weft/0/{number}") for number, own in enumerate((first, second))]
    boards[0].post(Failure(1, "recv", "long ago"))
    assert str(boards[0].failure()) == str(Failure(1, "recv", "long ago"))
    second.set("failure", first.get("failure"))
    with pytest.raises(RankError, match=r"'weft/0/1/failure' holds .* not sealed with this run's secret"):
        boards[1].failure()


@given(st.builds(Position, st.integers(0, 9), st.text("abc-", min_size=1), st.integers(0, 9), st.text()))
def test_positions_print_and_parse(position: Position) -> None:
    assert Position.parse(str(position)) == position


@contextmanager
def hearts(watches: list[Watch]) -> Iterator[list[Heart]]:
    """The ranks' processes run."""
    found = [Heart(watch, watch.board) for watch in watches]
    try:
        yield found
    finally:
        for heart in found:
            heart.close()


def test_the_first_failure_is_believed() -> None:
    one, two = watches(2)
    assert (one.board.failure(), one.board.exit(1)) == (None, None)
    first = Failure(1, "run stage 1 [mb 0]", "ValueError: no\nand more")
    assert two.board.post(first).cause == first.cause
    assert one.post(Failure(0, "its end", "later")).rank == 1
    with pytest.raises(RankError, match="rank 1 failed at 'run stage 1"):
        one.raise_failure()
    with pytest.raises(RankError, match="rank 0: 'the next step'"):
        one.begin(make_plan(2))


def test_a_failure_is_written_with_its_place_and_one_that_was_heard_as_it_was() -> None:
    one, two = watches(2)
    one.at(3, "send to 1 [mb 0]")
    one.fail(ValueError("no"))
    found = two.board.failure()
    assert found is not None
    assert (found.rank, found.instruction, found.cause) == (0, "send to 1 [mb 0]", "ValueError: no")
    one, two = watches(2)
    one.fail(Failure(1, "its end", "cut off").for_rank(0, "recv"))
    found = two.board.failure()
    assert found is not None
    assert (found.rank, found.instruction, found.cause) == (1, "its end", "cut off")


def test_ranks_that_stand_in_the_way_are_followed_to_the_one_that_does_not_move() -> None:
    plan, three = make_plan(3), watches(3)
    together(*(lambda watch=watch: watch.begin(plan) for watch in three))
    for watch, index in zip(three, (0, 0, 0), strict=True):
        watch.at(index, plan.programs[watch.rank].effects[index])
    error = three[2].explain(1, "no progress")
    assert (error.rank, error.instruction, error.cause) == (0, "run stage 0 [mb 0]", "no progress")


def test_a_rank_that_is_steps_behind_is_followed_by_the_plan_of_its_step() -> None:
    """Rank 0 is in a second plan; rank 2 waits in the first step for rank 1's message."""
    first, second, three = make_plan(3), make_plan(3, microbatches=2), watches(3)
    together(*(lambda watch=watch: watch.begin(first) for watch in three))
    three[2].at(0, first.programs[2].effects[0])
    three[1].at(2, first.programs[1].effects[2])  # it has run, and is to send
    three[0].here = Position(2, second.digest, 0, BEGIN)
    three[0].board.place(three[0].here)
    for peer in (1, 2):
        assert three[0]._stalled(peer, "no progress").rank == 1
    found = three[0]._stalled(2, "no progress")
    assert found.instruction == "send to 2 [mb 0]"


def test_a_rank_that_stopped_is_blamed_for_what_had_not_left_it() -> None:
    """Rank 0 has sent, as far as is written; rank 1 waits for the message."""
    plan, three = make_plan(3), watches(3, timeout=1)
    together(*(lambda watch=watch: watch.begin(plan) for watch in three))
    for watch, index in zip(three, (2, 0, 0), strict=True):
        watch.at(index, plan.programs[watch.rank].effects[index])
    with hearts(three) as beating:
        time.sleep(0.3)
        beating[0].close()
        time.sleep(1.0)  # rank 2's host waits, which its heart sees
        error = three[2].explain(1, "no progress")
    assert (error.rank, error.instruction) == (0, "broadcast from 2 [mb 0]")
    assert error.cause == "no progress: its process ended, or was stopped"


def test_a_rank_that_comes_late_to_its_first_step_and_runs_is_waited_for() -> None:
    plan, both = make_plan(2), watches(2, timeout=0.4)

    def start(watch: Watch, seconds: float) -> float:
        time.sleep(seconds)
        watch.begin(plan)
        watch.await_ranks()
        return seconds

    with hearts(both):
        assert together(lambda: start(both[0], 0), lambda: start(both[1], 1.5)) == [0, 1.5]
        [error] = together(lambda: both[0].wait("late", 1))
    assert error.cause == "no progress for 0.4 s"  # from then on it is timed


def test_a_rank_that_stops_before_its_first_step_is_named_in_time() -> None:
    one, two = watches(2, timeout=0.8)
    with hearts([one, two]) as beating:
        threading.Timer(1.0, beating[1].close).start()
        start = time.monotonic()
        with pytest.raises(RankError) as error:
            one.await_ranks()
    assert (error.value.rank, error.value.instruction) == (1, "its start")
    assert error.value.cause == "no progress for 1.6 s: its process ended, or was stopped"
    assert 1.6 <= time.monotonic() - start < 2.2


def test_a_start_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_STARTING", 0.5)
    one, two = watches(2, timeout=0.4)
    with hearts([one, two]), pytest.raises(RankError) as error:
        one.await_ranks()
    assert (error.value.rank, error.value.instruction) == (1, "its start")
    assert error.value.cause == "no progress for 0.8 s"


def test_ranks_that_wait_for_each_other_before_their_first_step_are_not_starting() -> None:
    one, two, three = watches(3, timeout=0.4)

    def message(watch: Watch, peer: int) -> None:
        with watch.ask(peer) as look:
            while True:
                look()
                time.sleep(0.05)

    with hearts([one, two, three]):
        errors = together(
            lambda: message(one, 1), lambda: message(two, 0), lambda: three.wait("what rank 1 never writes", 1)
        )
    assert {error.instruction for error in errors} <= {"wait for rank 0", "wait for rank 1"}
    assert {error.cause for error in errors} == {"no progress for 0.4 s"}


def test_who_waits_in_vain_says_so_within_its_time() -> None:
    one, two = watches(2, timeout=0.5)
    two.begin(make_plan(2))
    two.at(0, "run stage 1 [mb 0]")
    with hearts([one, two]):
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1 failed at 'run stage 1"):
            one.wait("a message", 1)
        assert time.monotonic() - start < 1.0


def test_a_rank_that_does_not_come_is_named() -> None:
    errors = together(*(lambda watch=watch: gather(watch, 0.2) for watch in watches(3)[:2]))
    assert {(error.rank, error.cause) for error in errors} == {(2, "no progress for 0.2 s")}


def test_a_rank_whose_process_ended_is_named_at_once() -> None:
    one = watches(2, timeout=60)[0]
    note_exit(one.board.exits, 1, Exit(False, "exit code 3"), secret=SECRET)
    with pytest.raises(RankError) as error:
        gather(one, 60)
    assert (error.value.rank, error.value.cause) == (1, "its process ended: exit code 3")


def test_ranks_connect_and_say_so() -> None:
    called: list[int] = []
    assert together(*(lambda w=w: attend(w, lambda: called.append(w.rank), 5) for w in watches(2))) == [None, None]
    assert sorted(called) == [0, 1]


def for_ever() -> None:
    threading.Event().wait()


def test_a_rank_that_cannot_connect_is_named_by_all() -> None:
    def refuses() -> None:
        raise RuntimeError("no such interface\nand more")

    one, two = watches(2)
    errors = together(lambda: attend(one, for_ever, 5), lambda: attend(two, refuses, 5))
    for error in errors:
        assert (error.rank, error.instruction, error.cause) == (1, "connect", "RuntimeError: no such interface")


def test_a_rank_that_stops_while_it_connects_is_named() -> None:
    one, two = watches(2)
    two.at(0, "connect")
    two.board.beat(3, None)
    with pytest.raises(RankError) as error:
        attend(one, for_ever, 0.8)
    assert (error.value.rank, error.value.instruction) == (1, "connect")
    assert error.value.cause == "TimeoutError: no progress for 0.8 s"


def test_a_pulse_is_felt_by_what_changes() -> None:
    one, two = watches(2)
    pulse = Pulse()
    for count in range(3):
        two.board.beat(count, Position() if count else None)
        pulse.feel(one.board, [0, 1])
    assert pulse.silent(60) == []
    assert pulse.silent(-1) == [1]  # rank 0 has never beaten
    heard = one.board.heard(1)
    assert heard is not None
    assert (heard.count, heard.position, one.board.heard(0)) == (2, Position(), None)


@pytest.mark.parametrize(("host", "name"), [(None, "the launcher"), (0, "rank 0")])
def test_a_store_that_is_gone_is_an_error_that_says_whose_it_was(host: int | None, name: str) -> None:
    class Gone:
        def gone(self, *_: Any) -> Any:
            raise RuntimeError("Connection reset by peer\nand more")

        set = get = check = compare_set = gone

    watch = Watch(Board(Gone(), 1, Gone(), SECRET, host), 2, 0.2)
    for ask in (lambda: watch.at(0, "x"), lambda: watch.wait("x", 0)):
        with pytest.raises(RankError) as error:
            ask()
        assert error.value.rank == host
        assert f"{name}, which hosts the store of the run, has ended (Connection reset by peer)" in str(error.value)
    assert "has ended" in str(watch.explain(0, "no progress"))
