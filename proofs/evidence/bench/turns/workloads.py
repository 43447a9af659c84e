"""The workloads that two engines serve by turns."""

import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Workload(NamedTuple):
    """Requests that all arrive at once.

    Args:
        num_requests: their number.
        input_len: the tokens of each prompt; if `varied`, the most, and every number from 1 is as
            likely.
        output_len: the tokens of each completion.
        varied: prompts differ in length. Both engines have the same lengths in a round, and others
            in the next.
        sampling: of all requests, under the names that both engines give them.
        num_long: so many of the requests, the first ones, have prompts of `long_len` tokens.
    """

    num_requests: int
    input_len: int
    output_len: int
    varied: bool = False
    sampling: Mapping[str, float] = {"temperature": 1.0}
    num_long: int = 0
    long_len: int = 0

    @property
    def most(self) -> list[int]:
        """The tokens of each prompt; if they differ, the most."""
        return [self.long_len] * self.num_long + [self.input_len] * (
            self.num_requests - self.num_long
        )

    @property
    def longest(self) -> tuple[int, int]:
        """The most tokens of a prompt, and those of its completion."""
        return max(self.most), self.output_len

    def turn(self, seed: int) -> dict[str, Any]:
        """The requests of one round, for both engines: prompt lengths, completion length, sampling."""
        # By the round, so that both engines have the same lengths in it.
        draw = random.Random(seed)
        if self.varied:
            lengths = [draw.randint(1, one) for one in self.most]
        else:
            lengths = self.most
        return {"input_lens": lengths, "output_len": self.output_len, "sampling": self.sampling}


WORKLOADS = {
    "decode": Workload(128, 2, 512),
    "prefill": Workload(128, 512, 64),
    "mixed": Workload(128, 512, 512),
    "one": Workload(1, 2, 256),
    "eight": Workload(8, 2, 256),
    "varied": Workload(128, 960, 64, varied=True),
    "sampled": Workload(
        128, 2, 512, sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    ),  # as Qwen3 advises
    "long": Workload(16, 7936, 256),
    "uneven": Workload(32, 7936, 512, varied=True),
    "few_long": Workload(132, 512, 256, num_long=4, long_len=15360),
}
# Run only when asked for: with room for 128 requests of that length, one engine would leave the
# other no memory.
LONG = "long", "uneven", "few_long"
_PAGE_SIZE = 16


def num_pages(workloads: Iterable[Workload]) -> int | None:
    """The pages of a KV cache for each of them; None: for as many requests of the longest kind as
    run at once, which is too much where only a few are long.

    >>> num_pages([WORKLOADS["few_long"]]), num_pages([WORKLOADS["few_long"], WORKLOADS["uneven"]])
    (10312, 16960)
    """
    kinds = [*workloads]
    if not any(one.num_long for one in kinds):
        return None
    return max(
        sum((length + one.output_len) // _PAGE_SIZE + 2 for length in one.most) for one in kinds
    )
