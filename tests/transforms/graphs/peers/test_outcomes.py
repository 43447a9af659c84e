"""The table of peers' tests is that of the tests beside it."""

from outcomes import PAGE, page, scenarios


def test_the_table_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(scenarios()), (
        "python tests/transforms/graphs/peers/outcomes.py"
    )


def test_there_are_one_hundred_and_fifty_scenarios() -> None:
    all_scenarios = scenarios()
    assert len(all_scenarios) >= 150
    assert {scenario.peer for scenario in all_scenarios} == {"jax", "torch"}
    assert [
        s.ours for s in all_scenarios if s.outcome in ("REFUSED", "DIFFERS") and not s.reason
    ] == []
