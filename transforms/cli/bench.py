"""What `weft bench` measures: an engine that serves many requests at once, timed where the host reads the tokens."""

import gc
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from tqdm import tqdm

from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.cli.bench_figures import Figures, RankFigures, Served, figures
from weft.transforms.cli.drafts import open_drafts
from weft.transforms.cli.ranks import Here, Place, check_stages, in_ranks
from weft.transforms.cli.sources import Source
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.setup import EngineLimits

_MOST, _MOST_TOKENS = 2**20, 2**17
"""Of a number; of the tokens of a step, for whose sizes graphs are captured."""
_WARM_UP_TOKENS = 8
"""That each request of the warm-up generates, at most."""


@attrs.frozen
class Wanted:
    """The options of `weft bench`.

    Args:
        source: the model.
        input_len, output_len: tokens of each prompt, and of each completion.
        num_prompts: requests, all of which are there from the start.
        max_num_seqs: requests under way at once.
        max_num_tokens: tokens of a step.
        graph: a mode.
        temperature: 0 is greedy.
        seed: of the weights, if they are random, of the prompts and of sampling.
        run_ahead: steps that are launched before the first of them is read.
        place: where the stages run.
        speculate: tokens drafted a step; None: none.
        draft: the folder of the model that drafts; None: by prompt lookup.
    """

    source: Source
    input_len: int
    output_len: int
    num_prompts: int
    max_num_seqs: int
    max_num_tokens: int
    graph: str
    temperature: float
    seed: int
    run_ahead: int
    place: Place
    speculate: int | None = None
    draft: str | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prompts", "max_num_seqs", "max_num_tokens"):
            self._check(name, 1)
        self._check("run_ahead", 0)
        if self.max_num_tokens < self.max_num_seqs:
            seen = f"{self.max_num_tokens} tokens a step for {self.max_num_seqs} requests"
            raise RequestError(
                f"weft bench --max-num-tokens {self.max_num_tokens}", seen, f"{self.max_num_seqs} or more"
            )

    def _check(self, name: str, least: int) -> None:
        value, most = getattr(self, name), _MOST_TOKENS if name == "max_num_tokens" else _MOST
        if not least <= value <= most:
            call = f"weft bench --{name.replace('_', '-')} {value}"
            raise RequestError(call, f"{value}", f"a whole number from {least} to {most}")

    @property
    def sampling(self) -> SamplingParams:
        """Of every request: none ends before it has all its tokens."""
        return SamplingParams(temperature=self.temperature, ignore_eos=True)


def bench(wanted: Wanted, *, progress: bool) -> Figures | None:
    """Measure; None on a rank of torchrun's that is not the first.

    Raises:
        RequestError: requests longer than the model has positions for, or more stages than layers.
        Whatever `weft.load`, `Engine` and `in_ranks` raise.
    """
    config, length = wanted.source.config(), wanted.input_len + wanted.output_len
    check_stages(wanted.place, config.num_layers)
    positions = config.max_position_embeddings
    if length > positions:
        call = f"weft bench --input-len {wanted.input_len} --output-len {wanted.output_len}"
        raise RequestError(call, f"requests of {length} tokens", f"at most {positions}, the model's limit")
    return in_ranks(measure, wanted.place, wanted, progress)


def measure(here: Here, wanted: Wanted, progress: bool) -> Figures:
    """This process's part: start up, warm up, and serve."""
    shows = progress and here.first
    engine, started = start(here, wanted, shows)
    draw = random.Random(wanted.seed)
    own, first = warm_up(engine, wanted, draw, started)
    first += own.load_seconds + own.engine_seconds + own.capture_seconds
    own = attrs.evolve(own, first_token_seconds=first)
    prompts = make_prompts(engine, wanted, draw, wanted.num_prompts)
    with evenly():
        served = serve(engine, prompts, wanted.sampling, wanted.output_len, shows)
    return figures(served, wanted.input_len, here.collect(finish(engine, own)))


def warm_up(engine: Engine, wanted: Wanted, draw: random.Random, started: RankFigures) -> tuple[RankFigures, float]:
    """Serve a few tokens of as many requests as run at once. Returns the figures with how long that took, and the
    seconds until the first token was read."""
    prompts = make_prompts(engine, wanted, draw, wanted.max_num_seqs)
    begun = time.perf_counter()
    served = serve(engine, prompts, wanted.sampling, min(wanted.output_len, _WARM_UP_TOKENS), False)
    took = _now(engine.model.device) - begun
    return attrs.evolve(started, warm_up_seconds=took), min(times[0] for times in served.read)


@contextmanager
def evenly() -> Iterator[None]:
    """Inside, the garbage collector leaves alone what there was before: to look through the objects of torch, triton
    and a model takes it 0.1 s at a time, in the midst of a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def start(here: Here, wanted: Wanted, progress: bool, opened: Model | None = None) -> tuple[Engine, RankFigures]:
    """An engine with all its graphs captured, of the model that is wanted or was opened before, and how long each part
    took."""
    times = [time.perf_counter()]
    model = opened or wanted.source.open(here, progress=progress, seed=wanted.seed)
    times.append(_now(model.device))
    length = wanted.input_len + wanted.output_len
    engine = Engine(
        model,
        EngineLimits(max_num_reqs=wanted.max_num_seqs, max_num_tokens=wanted.max_num_tokens, max_model_len=length),
        pipeline=here.num_stages,
        graph=wanted.graph,
        transport=here.transport,
        run_ahead=wanted.run_ahead,
        seed=wanted.seed,
        speculation=open_drafts(here, wanted.speculate, wanted.draft, wanted.source.dtype),
    )
    times.append(_now(model.device))
    engine.warm_up()
    times.append(_now(model.device))
    load, made, captured = (b - a for a, b in itertools.pairwise(times))
    return engine, RankFigures(str(model.device), load, made, captured)


def _now(device: torch.device) -> float:
    """The time, once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_prompts(engine: Engine, wanted: Wanted, draw: random.Random, count: int) -> list[list[int]]:
    """Random token ids: no two prompts begin alike but by chance, so that none shares another's pages."""
    vocabulary = range(engine.model.config.vocab_size)
    return [draw.choices(vocabulary, k=wanted.input_len) for _ in range(count)]


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_tokens: int, progress: bool
) -> Served:
    """Complete prompts that all arrive at once, and note when the host read each token."""
    before = engine.stats()
    began = time.perf_counter()
    read: dict[str, list[float]] = {}
    for prompt in prompts:
        read[engine.add(prompt, sampling, max_tokens=max_tokens)] = []
    with tqdm(total=len(prompts) * max_tokens, desc="bench", unit="token", disable=not progress) as bar:
        for output in engine:
            if output.error is not None:
                raise output.error
            read[output.id] += [time.perf_counter() - began] * len(output.token_ids)
            bar.update(len(output.token_ids))
    return Served(list(read.values()), before, engine.stats())


def finish(engine: Engine, started: RankFigures) -> RankFigures:
    """What this process's graphs and tensors took, beside how it started."""
    used, device = [graph.memory_analysis() for graph in engine.graphs], engine.model.device
    return attrs.evolve(
        started,
        num_graphs=sum(one.num_graphs for one in used),
        graph_bytes=sum(one.total_bytes for one in used),
        peak_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
    )
