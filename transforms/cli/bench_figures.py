"""The figures of `weft bench`, from when each token was read and which classes the steps were of."""

import itertools
from collections.abc import Sequence

import attrs
import numpy as np

from weft.transforms.engine.stats import Stats


@attrs.frozen
class Served:
    """What happened.

    Args:
        read: of each request, when the host read each of its tokens, in seconds since all requests arrived.
        before, after: the engine's counts.
    """

    read: list[list[float]]
    before: Stats
    after: Stats


@attrs.frozen
class RankFigures:
    """One process: the seconds of its parts of the start, and what its memory held.

    Args:
        load_seconds: until the weights are on the device.
        engine_seconds: the state with its KV cache, and the stages.
        capture_seconds: all graphs.
        warm_up_seconds: a few tokens of as many requests as run at once.
        first_token_seconds: from the beginning of the load until the first of these tokens was read; 0 where the model
            was loaded before.
        num_graphs, graph_bytes: captured, with the driver's own.
        peak_bytes: that torch held of the GPU's memory at most; None on a CPU.
    """

    device: str
    load_seconds: float
    engine_seconds: float
    capture_seconds: float
    warm_up_seconds: float = 0.0
    first_token_seconds: float = 0.0
    num_graphs: int = 0
    graph_bytes: int = 0
    peak_bytes: int | None = None


@attrs.frozen
class Spread:
    """A distribution, in milliseconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """Of so many; None of none.

        >>> Spread.of([0.001, 0.002, 0.003])
        Spread(mean=2.0, p50=2.0, p99=2.98)
        """
        if not seconds:
            return None
        values = 1e3 * np.asarray(seconds)
        p50, p99 = np.percentile(values, [50, 99])
        return cls(round(float(values.mean()), 6), round(float(p50), 6), round(float(p99), 6))


@attrs.frozen
class GraphUse:
    """What ran the steps.

    Args:
        shares: of the steps, by mode: whole graphs (`full`), `piecewise`, or the step itself (`none`).
        padding: the share of padding in the tokens that were computed.
    """

    shares: dict[str, float]
    padding: float

    @classmethod
    def between(cls, before: Stats, after: Stats) -> "GraphUse":
        """Of the steps between two moments."""
        modes = {mode: after.modes.get(mode, 0) - before.modes.get(mode, 0) for mode in ("full", "piecewise", "none")}
        steps, padding = max(sum(modes.values()), 1), after.padding - before.padding
        computed = after.tokens - before.tokens + padding
        return cls({mode: count / steps for mode, count in modes.items()}, padding / max(computed, 1))


@attrs.frozen
class Figures:
    """What `weft bench` found.

    Args:
        seconds: from the arrival of all requests until the last token was read.
        output_tokens_per_s, total_tokens_per_s: without the prompts, and with them.
        ttft: from arrival to a request's first token.
        tpot: of a request, the mean between its first and its last token, for each after the first.
        itl: between two tokens of a request that follow each other, over all of them. None, as `tpot`, where requests
            have one token.
        captures: graphs captured while the clock ran; 0, if the start captured all that were needed.
        drafted, accepted: drafts that were verified, and those that were right.
        ranks: of each process.
    """

    num_requests: int
    output_tokens: int
    total_tokens: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    num_steps: int
    graphs: GraphUse
    captures: int
    drafted: int
    accepted: int
    ranks: list[RankFigures]


def figures(served: Served, input_len: int, ranks: list[RankFigures]) -> Figures:
    """The figures of requests whose prompts have `input_len` tokens each."""
    read = served.read
    seconds, output = max(times[-1] for times in read), sum(map(len, read))
    total = output + input_len * len(read)
    return Figures(
        num_requests=len(read),
        output_tokens=output,
        total_tokens=total,
        seconds=seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=total / seconds,
        ttft=Spread.of([times[0] for times in read]),
        tpot=Spread.of([(times[-1] - times[0]) / (len(times) - 1) for times in read if len(times) > 1]),
        itl=Spread.of([b - a for times in read for a, b in itertools.pairwise(times)]),
        num_steps=sum(served.after.modes.values()) - sum(served.before.modes.values()),
        graphs=GraphUse.between(served.before, served.after),
        captures=served.after.captures - served.before.captures,
        drafted=served.after.drafted - served.before.drafted,
        accepted=served.after.accepted - served.before.accepted,
        ranks=ranks,
    )
