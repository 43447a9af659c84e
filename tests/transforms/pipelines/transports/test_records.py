"""The ranks' records in a store: the others read what a rank wrote, and nothing from another
transport."""

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from weft.errors import RankError
from weft.transforms.pipelines.transports.messaging.network import Secret
from weft.transforms.pipelines.transports.watching.failures import Clock, Failure
from weft.transforms.pipelines.transports.watching.records import Liveness, Position, Records

SECRET = Secret.fresh()


def test_a_record_of_another_transport_of_the_run_is_none_of_this_one() -> None:
    store = dist.HashStore()
    first, second = (dist.PrefixStore(f"weft/0/{number}", store) for number in range(2))
    records = [
        Records(records, 0, store, SECRET, prefix=f"weft/0/{number}")
        for number, records in enumerate((first, second))
    ]
    records[0].write_failure(Failure(1, "recv", "long ago"))
    assert str(records[0].failure()) == str(Failure(1, "recv", "long ago"))
    second.set("failure", first.get("failure"))
    with pytest.raises(
        RankError, match=r"'weft/0/1/failure' holds .* not sealed with this run's secret"
    ):
        records[1].failure()


@given(
    st.builds(
        Position, st.integers(0, 9), st.text("abc-", min_size=1), st.integers(0, 9), st.text()
    )
)
def test_a_position_is_read_as_it_was_written(position: Position) -> None:
    store = dist.HashStore()
    records = Records(store, 0, store, SECRET)
    records.write_position(position)
    records.write_beat(3, position)
    assert (records.position(0), records.device_position(0)) == (position, position)


def test_a_rank_whose_heartbeat_changes_is_alive() -> None:
    store = dist.HashStore()
    one, two = (Records(store, rank, store, SECRET) for rank in range(2))
    pulse = Liveness(Clock())
    for count in range(3):
        two.write_beat(count, Position() if count else None)
        pulse.observe(one, [0, 1])
    assert pulse.silent(60) == []
    assert pulse.silent(-1) == [1]  # rank 0 has never written a heartbeat
    heard = one.beat(1)
    assert heard is not None
    assert (heard.count, heard.position, one.beat(0)) == (2, Position(), None)
