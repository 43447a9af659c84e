"""What two ranks are asked to do: the same, or with one difference."""

import attrs
from hypothesis import strategies as st

from weft.proofs._laws.engine.agreement import Asked

_NOTES = st.lists(
    st.tuples(st.sampled_from(("request", "abort")), st.sampled_from("abc")), max_size=3
).map(tuple)
# Mostly one program, so that the notes are what differs.
_ASKED = st.builds(Asked, _NOTES, st.sampled_from(("scale", "scale", "other")))


@st.composite
def conversations(
    draw: st.DrawFn,
) -> tuple[list[tuple[int, bool]], list[Asked], list[Asked]]:
    """Steps as `differences_are_refused` takes them, and what each of two ranks is asked in
    them."""
    steps = draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=6))
    mine = draw(st.lists(_ASKED, min_size=len(steps), max_size=len(steps)))
    theirs = list(mine)
    place = draw(st.integers(0, len(steps) - 1))
    original = mine[place]
    match draw(st.sampled_from(("the same", "anything", "another order", "a step later"))):
        case "anything":
            theirs[place] = draw(_ASKED)
        # Fewer than two notes are still the same: the law itself compares what was asked.
        case "another order":
            theirs[place] = attrs.evolve(original, notes=original.notes[::-1])
        case "a step later" if place + 1 < len(steps):
            theirs[place] = attrs.evolve(original, notes=original.notes[:-1])
            # Both sides have the same notes in the end, and differ only between these two steps.
            theirs[place + 1] = attrs.evolve(
                mine[place + 1], notes=original.notes[-1:] + mine[place + 1].notes
            )
    return steps, mine, theirs
