"""Statistics of an engine: what it has done, and what it holds now."""

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from weft.transforms.engine.requests.host_state import HostState
from weft.transforms.engine.steps.classes import Classes
from weft.transforms.engine.steps.results import StepResult
from weft.transforms.engine.steps.step import Work
from weft.transforms.graphs.graphified import Graphified, classes_held


@attrs.frozen
class Stats:
    """An engine's counts, at one moment.

    Args:
        running, waiting: requests with and without a row of the state; each completion of a prompt
            counts.
        pages_held, pages_kept, pages_free: pages of the KV cache: those that requests hold; free
            ones that are still in the prefix cache; and all free ones.
        kv_cache_bytes: the memory of all pages of the KV cache in this process, held or free: those
            of the model's stages that run here, of a draft model, and of models beside.
        prefix_tokens: prompt tokens that were found in the prefix cache.
        preempted: how often a request gave up its pages to others, and had to restart later.
        ended: requests that have ended, by reason.
        steps: steps by kind: `decode`, `prompts`, or `mixed`.
        modes: the same steps by the mode that they ran in: `full`, `piecewise` or `none`.
        tokens: tokens that steps computed.
        padding: padding tokens that steps computed in addition, since the sizes of graphs are
            fixed.
        drafted, accepted: drafts that were verified and drafts that were accepted, in the steps
            that were read so far.
        captures, replays, eager: captures and replays of graphs in all stages that run here, and
            calls without a graph.
        graphs: graphs held, by mode.
        eager_reasons: the calls without a graph, by reason; each class that no captured class
            covers is a separate reason.
    """

    running: int
    waiting: int
    pages_held: int
    pages_kept: int
    pages_free: int
    kv_cache_bytes: int
    prefix_tokens: int
    preempted: int
    ended: Mapping[str, int]
    steps: Mapping[str, int]
    modes: Mapping[str, int]
    tokens: int
    padding: int
    drafted: int
    accepted: int
    captures: int
    replays: int
    eager: int
    graphs: Mapping[str, int]
    eager_reasons: Mapping[str, int]

    @property
    def padding_share(self) -> float:
        """Padding as a share of all computed tokens."""
        return self.padding / max(self.tokens + self.padding, 1)

    @property
    def acceptance(self) -> float:
        """Accepted drafts as a share of all drafts."""
        return self.accepted / max(self.drafted, 1)


@attrs.define
class Counts:
    """The counters behind `Stats`.

    Args:
        classes: the classes that steps run under.
        kv_cache_bytes: the memory of the KV cache.
    """

    classes: Classes
    kv_cache_bytes: int
    tokens: int = 0
    padding: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: Counter[str] = attrs.field(factory=Counter)
    modes: Counter[str] = attrs.field(factory=Counter)

    def add(self, work: Work) -> None:
        """Count a launched step."""
        descriptor = work.descriptor
        decision = self.classes.of(descriptor)
        self.steps[work.kind] += 1
        self.modes[decision.mode] += 1
        self.tokens += descriptor.num_tokens
        self.padding += decision.descriptor.num_tokens - descriptor.num_tokens

    def read(self, result: StepResult) -> None:
        """Count a step's result."""
        if result.num_drafts:
            self.drafted += result.num_drafts
            # Of a row's tokens, all but the last are accepted drafts.
            self.accepted += sum(len(ids) - 1 for ids in result.token_ids if ids)

    def stats(
        self, host: HostState, ended: Mapping[str, int], graphs: Sequence[Graphified[..., object]]
    ) -> Stats:
        """A snapshot of these counts, of what the host and the graphs hold, and of the completions
        that have ended, by reason."""
        infos = [graph.cache_info() for graph in graphs]
        pages = host.pages
        running = len(host.running)
        return Stats(
            running=running,
            waiting=len(host.requests) - running,
            pages_held=pages.num_held,
            pages_kept=pages.num_evictable,
            pages_free=pages.num_free,
            kv_cache_bytes=self.kv_cache_bytes,
            prefix_tokens=host.num_found,
            preempted=host.num_preempted,
            ended=dict(ended),
            steps=dict(self.steps),
            modes=dict(self.modes),
            tokens=self.tokens,
            padding=self.padding,
            drafted=self.drafted,
            accepted=self.accepted,
            captures=sum(info.captures for info in infos),
            replays=sum(info.replays for info in infos),
            eager=sum(info.eager for info in infos),
            graphs=dict(Counter(mode for graph in graphs for mode, _ in classes_held(graph))),
            eager_reasons=dict(
                sum((Counter(info.eager_reasons) for info in infos), Counter[str]())
            ),
        )
