"""What executors make of work, and use again."""

import attrs
import torch

from weft.proofs.checks.difference import assert_equal
from weft.transforms.engine.executor import BatchCache, Classes, _submission, _with_edits
from weft.transforms.engine.step import Edits, Growth, Work
from weft.transforms.pipelines.session import Submission

DECODE = Work(0, Edits(), ("a", "b"), (3, 1), (), (True, True), None)
GROWS = attrs.evolve(DECODE, job=1, edits=Edits(growths=(Growth(3, 1, (7,)),)))
PROMPT = Work(2, GROWS.edits, ("a",), (3,), ((5, 6),), (False,), None)


def assert_same(one: Submission, other: Submission) -> None:
    assert one.text == other.text
    for own, theirs in ((one.batch, other.batch), (one.later, other.later)):
        assert own.edits == theirs.edits
        assert_equal("a submission", own.batch, theirs.batch)


def test_a_submission_is_what_a_session_would_make() -> None:
    cache = BatchCache(torch.device("cpu"), Classes(), _submission, _with_edits)
    for work in (DECODE, GROWS, DECODE, PROMPT):
        assert_same(cache(work), Submission.of(work.place("cpu")))


def test_a_decode_of_the_same_rows_has_the_same_tensors() -> None:
    cache = BatchCache(torch.device("cpu"), Classes(), _submission, _with_edits)
    first, grown, again = cache(DECODE), cache(GROWS), cache(DECODE)
    assert first is again
    assert grown.batch.batch is first.batch.batch
