"""The monitor: finds the rank to blame from the ranks' records, without processes and with a fake
clock."""

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from clocks import FakeTime
from ranks import advance, scale

from weft.errors import ProgramError, RankError
from weft.meshes.collectives import AllReduce
from weft.meshes.mesh import Mesh
from weft.proofs.evidence.runs.sabotage import make_pipeline
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.messaging.network import Secret
from weft.transforms.pipelines.transports.threads import Threads
from weft.transforms.pipelines.transports.watching import monitor as monitor_module
from weft.transforms.pipelines.transports.watching.failures import Clock, Failure
from weft.transforms.pipelines.transports.watching.monitor import BEGIN, Monitor
from weft.transforms.pipelines.transports.watching.places import Places
from weft.transforms.pipelines.transports.watching.records import (
    Exit,
    Position,
    Records,
    write_exit,
)
from weft.transforms.pipelines.transports.watching.watchdog import Watchdog

SECRET = Secret.fresh()


def make_programs_of(num_ranks: int, microbatches: int = 1) -> CheckedPrograms:
    step = pipeline([scale] * num_ranks, microbatches=microbatches, advance=advance)
    return CheckedPrograms(step.programs(microbatches))


def monitors(num_ranks: int, timeout: float = 0.2, clock: Clock | None = None) -> list[Monitor]:
    store = dist.HashStore()
    return [
        Monitor(Records(store, rank, store, SECRET), num_ranks, timeout, clock)
        for rank in range(num_ranks)
    ]


def together(*calls: Any) -> list[Any]:
    """The results or errors of calls, each in a thread."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except (RankError, ProgramError) as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def beating(monitors: list[Monitor], time: FakeTime) -> list[Watchdog]:
    """The watchdogs of running processes, which write heartbeats while time passes."""
    watchdogs = [Watchdog(monitor, monitor.records, None) for monitor in monitors]
    time.meanwhile += [watchdog.look for watchdog in watchdogs]
    return watchdogs


def test_the_first_failure_is_believed() -> None:
    one, two = monitors(2)
    assert (one.records.failure(), one.records.exit(1)) == (None, None)
    first = Failure(1, "run stage 1 [mb 0]", "ValueError: no\nand more")
    assert two.records.write_failure(first).cause == first.cause
    assert one.write_failure(Failure(0, "its end", "later")).rank == 1
    with pytest.raises(RankError, match="rank 1 failed at 'run stage 1"):
        one.raise_failure()
    with pytest.raises(RankError, match="rank 0: 'the next step'"):
        one.begin(make_programs_of(2))


def test_the_store_is_not_asked_for_failures_until_there_is_one(tmp_path: Path) -> None:
    store = mock.MagicMock(wraps=dist.HashStore())
    names = [tmp_path / "0", tmp_path / "1"]
    records = [Records(store, rank, store, SECRET, places=Places(names, rank)) for rank in range(2)]
    one, two = (Monitor(rank_records, 2, 1.0) for rank_records in records)
    one.raise_failure()
    two.raise_failure()
    store.check.assert_not_called()
    two.fail(ValueError("no"))
    with pytest.raises(RankError, match=r"rank 1 failed .* ValueError: no"):
        one.raise_failure()


def test_a_failure_is_written_with_its_place_and_one_that_was_heard_as_it_was() -> None:
    one, two = monitors(2)
    one.move_to(3, "send to 1 [mb 0]")
    one.fail(ValueError("no"))
    failure = two.records.failure()
    assert failure is not None
    assert (failure.rank, failure.instruction, failure.cause) == (
        0,
        "send to 1 [mb 0]",
        "ValueError: no",
    )
    one, two = monitors(2)
    one.fail(Failure(1, "its end", "cut off").for_rank(0, "recv"))
    failure = two.records.failure()
    assert failure is not None
    assert (failure.rank, failure.instruction, failure.cause) == (1, "its end", "cut off")


def test_ranks_that_stand_in_the_way_are_followed_to_the_one_that_does_not_move() -> None:
    checked, three = make_programs_of(3), monitors(3)
    together(*(lambda monitor=monitor: monitor.begin(checked) for monitor in three))
    for monitor, index in zip(three, (0, 0, 0), strict=True):
        monitor.move_to(index, checked.programs[monitor.rank].effects[index])
    error = three[2].explain(1, "no progress")
    assert (error.rank, error.instruction, error.cause) == (0, "run stage 0 [mb 0]", "no progress")


def test_a_rank_that_is_steps_behind_is_followed_by_the_plan_of_its_step() -> None:
    """Rank 0 is in a second checked; rank 2 waits in the first step for rank 1's message."""
    first, second, three = make_programs_of(3), make_programs_of(3, microbatches=2), monitors(3)
    together(*(lambda monitor=monitor: monitor.begin(first) for monitor in three))
    three[2].move_to(0, first.programs[2].effects[0])
    three[1].move_to(2, first.programs[1].effects[2])  # it has run, and must send next
    three[0].here = Position(2, second.digest, 0, BEGIN)
    three[0].records.write_position(three[0].here)
    for peer in (1, 2):
        assert three[0]._find_stalled(peer, "no progress").rank == 1
    failure = three[0]._find_stalled(2, "no progress")
    assert failure.instruction == "send to 2 [mb 0]"


SUM = AllReduce((0, 1, 2))


def in_a_mesh(num_ranks: int, timeout: float = 0.2, clock: Clock | None = None) -> list[Monitor]:
    """Ranks that are about to run a stage that all of them share."""
    step = pipeline([scale], transport=Threads(), mesh=Mesh(tensor=num_ranks))
    checked = CheckedPrograms(make_pipeline(1).programs(1), mesh=step.mesh)
    members = monitors(num_ranks, timeout, clock)
    for monitor in members:
        monitor.begin(checked)
        monitor.move_to(0, "run stage 0 [mb 0]")
    return members


def test_who_has_left_a_collective_is_not_late_to_it() -> None:
    """Rank 2 has done the collective and is in its run; rank 1 has not reached it; rank 0 waits."""
    three = in_a_mesh(3)
    with three[2].at_collective(SUM, 1):
        pass
    assert (three[2].here.instruction, three[2].here.meetings) == ("run stage 0 [mb 0]", 1)
    with three[0].at_collective(SUM, 1):
        for peer in (0, 1):
            assert three[0]._find_stalled(peer, "no progress").rank == 1
        with three[1].at_collective(SUM, 1):
            assert three[0]._find_stalled(1, "no progress").rank == 1, "whose tensor does not come"
        with three[2].at_collective(SUM, 2):
            assert three[2]._find_stalled(0, "no progress").rank == 0, (
                "which waits for nobody: all came to it"
            )


def test_a_rank_that_fails_in_a_collective_is_there() -> None:
    one, two = in_a_mesh(2)
    with pytest.raises(ValueError, match="no"), one.at_collective(AllReduce((0, 1)), 3):
        raise ValueError("no")
    one.fail(ValueError("no"))
    with pytest.raises(RankError) as error, two.at_collective(AllReduce((0, 1)), 4):
        two.raise_failure()
    assert error.value.instruction == "all_reduce sum among 0, 1 [mb 0], number 3"
    assert str(error.value).startswith("rank 1: 'all_reduce sum among 0, 1 [mb 0], number 4'")


def test_a_member_that_stopped_in_a_collective_is_blamed() -> None:
    """All three are in the collective, and rank 1 writes no more heartbeats. Rank 0 waits for rank
    2, which waits for rank 1."""
    time = FakeTime()
    three = in_a_mesh(3, 1, time.clock)
    watchdogs = beating([three[0], three[2]], time)
    Watchdog(three[1], three[1].records, None).look()
    with (
        three[0].at_collective(SUM, 1),
        three[1].at_collective(SUM, 1),
        three[2].at_collective(SUM, 1),
    ):
        for _ in range(20):
            three[0].liveness.observe(three[0].records, range(3))
            time.sleep(0.1)
        failure = three[0]._find_stalled(2, "no progress")
    assert (failure.rank, failure.instruction) == (1, f"{SUM}, number 1")
    assert failure.cause == "no progress: its process ended, or was stopped"
    assert len(watchdogs) == 2


def test_a_rank_that_is_not_in_a_collective_waits_for_what_its_members_find() -> None:
    """Rank 0 waits for rank 1, which is in a collective with rank 2 and waits for its tensor."""
    time = FakeTime()
    three = in_a_mesh(3, 1, time.clock)
    with three[1].at_collective(AllReduce((1, 2)), 1), three[2].at_collective(AllReduce((1, 2)), 1):
        time.meanwhile.append(lambda: late_report(three[1], time))
        error = three[0].explain(1, "no progress")
    assert (error.rank, error.cause) == (2, "no tensor")
    assert 0.5 <= time.now < 1


def test_a_device_in_a_run_waits_for_who_has_not_launched_it() -> None:
    """The devices of ranks 0 and 1 are in the run, which their hosts have launched; rank 2's host
    has not."""
    three = in_a_mesh(3)
    for monitor in three[:2]:
        monitor.records.write_beat(1, monitor.here)
        monitor.move_to(1, "broadcast from 0 among 0 [mb 0]")
    for monitor in three:
        assert monitor._find_stalled(0, "no progress").rank == 2
    three[2].move_to(1, "broadcast from 2 among 2 [mb 0]")
    assert three[2]._find_stalled(0, "no progress").rank == 0, "all have launched it"


def late_report(monitor: Monitor, time: FakeTime) -> None:
    """Half a second later, a member finds that rank 2 is late."""
    if time.now >= 0.5:
        monitor.write_failure(Failure(2, "all_reduce", "no tensor"))


def test_a_rank_that_stopped_is_blamed_for_a_message_that_had_not_left_it() -> None:
    """Rank 0 has sent, according to its record; rank 1 waits for the message."""
    time = FakeTime()
    checked = make_programs_of(3)
    three = monitors(3, 1, time.clock)
    for monitor, index in zip(three, (2, 0, 0), strict=True):
        monitor.begin(checked)
        monitor.move_to(index, checked.programs[monitor.rank].effects[index])
    stopped = beating(three, time)[0]
    time.run(0.3)
    time.meanwhile.remove(stopped.look)
    time.run(1.0)  # rank 2's host waits, as its heartbeat shows
    error = three[2].explain(1, "no progress")
    assert (error.rank, error.instruction) == (0, "broadcast from 2 [mb 0]")
    assert error.cause == "no progress: its process ended, or was stopped"


def test_a_rank_that_runs_and_comes_late_to_its_first_step_is_waited_for() -> None:
    time = FakeTime()
    checked, (one, two) = make_programs_of(2), monitors(2, 0.4, time.clock)
    beating([one, two], time)

    def come_late() -> None:
        if time.now >= 1.5 and not two.here.step:
            two.begin(checked)
            two.records.write_position(two.here)
            two.records.write("begun/1", True)

    time.meanwhile.append(come_late)
    one.begin(checked)
    one.await_first_step()
    assert 1.5 <= time.now < 1.7
    with pytest.raises(RankError) as error:
        one.wait("late", 1)
    assert error.value.cause == "no progress for 0.4 s"  # from then on it is timed


def test_a_rank_that_stops_before_its_first_step_is_named_in_time() -> None:
    time = FakeTime()
    one, two = monitors(2, 0.8, time.clock)
    watchdog = beating([one, two], time)[1]
    time.meanwhile.append(
        lambda: watchdog.look in time.meanwhile[:2] and time.now > 1.0 and time.meanwhile.pop(1)
    )
    with pytest.raises(RankError) as error:
        one.await_first_step()
    assert (error.value.rank, error.value.instruction) == (1, "its start")
    assert error.value.cause == "no progress for 1.6 s: its process ended, or was stopped"
    assert 1.6 <= time.now < 2.2


def test_a_start_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "_STARTING", 0.5)
    time = FakeTime()
    one, two = monitors(2, 0.4, time.clock)
    beating([one, two], time)
    with pytest.raises(RankError) as error:
        one.await_first_step()
    assert (error.value.rank, error.value.instruction) == (1, "its start")
    assert error.value.cause == "no progress for 0.8 s"


def test_ranks_that_wait_for_each_other_before_their_first_step_are_not_starting() -> None:
    time = FakeTime()
    one, two, three = monitors(3, 0.4, time.clock)
    beating([one, two, three], time)
    errors: list[RankError] = []
    with one.waiting_for(1) as look_for_two, two.waiting_for(0) as look_for_one:
        while len(errors) < 2:
            time.sleep(0.05)
            for look in (look_for_two, look_for_one):
                try:
                    look()
                except RankError as error:
                    errors.append(error)
    with pytest.raises(RankError) as last:
        three.wait("a text that rank 1 never writes", 1)
    errors.append(last.value)
    assert {error.instruction for error in errors} <= {"wait for rank 0", "wait for rank 1"}
    assert {error.cause for error in errors} == {"no progress for 0.4 s"}


def test_a_rank_that_waits_in_vain_says_so_within_its_time() -> None:
    time = FakeTime()
    one, two = monitors(2, 0.5, time.clock)
    two.begin(make_programs_of(2))
    two.move_to(0, "run stage 1 [mb 0]")
    beating([one, two], time)
    with pytest.raises(RankError, match="rank 1 failed at 'run stage 1"):
        one.wait("a message", 1)
    assert 0.5 <= time.now < 0.7


def test_a_rank_that_does_not_come_is_named() -> None:
    one, two, _ = monitors(3, clock=FakeTime().clock)
    for monitor in (one, two):
        with pytest.raises(RankError) as error:
            monitor.wait("wire/2", 2, 0.2)
        assert (error.value.rank, error.value.cause) == (2, "no progress for 0.2 s")


def test_a_rank_whose_process_ended_is_named_at_once() -> None:
    one = monitors(2, timeout=60)[0]
    write_exit(one.records.exits, 1, Exit(False, "exit code 3"), secret=SECRET)
    with pytest.raises(RankError) as error:
        one.wait("wire/1", 1, 60)
    assert (error.value.rank, error.value.cause) == (1, "its process ended: exit code 3")


def test_a_rank_that_waits_for_a_message_is_told_of_the_senders_end() -> None:
    one = monitors(2, timeout=60)[0]
    with one.waiting_for(1) as look:
        look()
        write_exit(one.records.exits, 1, Exit(False, "exit code 3"), secret=SECRET)
        with pytest.raises(RankError) as error:
            look()
    assert (error.value.rank, error.value.cause) == (1, "its process ended: exit code 3")


def test_ranks_connect_and_say_so() -> None:
    called: list[int] = []
    calls = (lambda w=w: w.connect_together(lambda: called.append(w.rank), 5) for w in monitors(2))
    assert together(*calls) == [None, None]
    assert sorted(called) == [0, 1]


def for_ever() -> None:
    threading.Event().wait()


def test_a_rank_that_cannot_connect_is_named_by_all() -> None:
    def refuses() -> None:
        raise RuntimeError("no such interface\nand more")

    one, two = monitors(2)
    errors = together(
        lambda: one.connect_together(for_ever, 5), lambda: two.connect_together(refuses, 5)
    )
    for error in errors:
        assert (error.rank, error.instruction, error.cause) == (
            1,
            "connect",
            "RuntimeError: no such interface",
        )


def test_a_rank_may_end_when_all_are_connected() -> None:
    one = monitors(2, timeout=4)[0]
    write_exit(one.records.exits, 1, Exit(True, "its function returned"), secret=SECRET)
    one.connect_together(lambda: time.sleep(0.3), 30)


def test_a_rank_that_stops_while_it_connects_is_named() -> None:
    one, two = monitors(2, clock=FakeTime(tick=0.05).clock)
    two.move_to(0, "connect")
    two.records.write_beat(3, None)
    with pytest.raises(RankError) as error:
        one.connect_together(for_ever, 0.8)
    assert (error.value.rank, error.value.instruction) == (1, "connect")
    assert error.value.cause == "TimeoutError: no progress for 0.8 s"


@pytest.mark.parametrize(("host", "name"), [(None, "the launcher"), (0, "rank 0")])
def test_a_store_that_is_gone_is_an_error_that_says_whose_it_was(
    host: int | None, name: str
) -> None:
    class Gone:
        def gone(self, *_: Any) -> Any:
            raise RuntimeError("Connection reset by peer\nand more")

        set = get = check = compare_set = gone

    monitor = Monitor(Records(Gone(), 1, Gone(), SECRET, host), 2, 0.2)
    for ask in (lambda: monitor.move_to(0, "x"), lambda: monitor.wait("x", 0)):
        with pytest.raises(RankError) as error:
            ask()
        assert error.value.rank == host
        assert (
            f"{name}, which hosts the store of the run, has ended (Connection reset by peer)"
            in str(error.value)
        )
    assert "has ended" in str(monitor.explain(0, "no progress"))
