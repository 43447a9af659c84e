"""A profile of a step's time: the kernels of a replay, the time of each, and the gaps between them.

    python -m weft.proofs.evidence.bench.step_profile --preset qwen3-0.6b --requests 128 1 --context
    256 --out FOLDER python -m weft.proofs.evidence.bench.step_profile --preset qwen3-0.6b
    --prompt-tokens 2048 --context 512 --graph piecewise

An engine serves requests until all of them decode at about the context. With `--prompt-tokens N`,
it instead reads prompts as long as the context, N tokens per step. Then some steps are timed by the
clock, and some more are profiled. A gap is time in which the device is idle: the host is late, or
one kernel waits for another to be launched. Since a profiler makes the host late, the idle share
comes from the steps without it: their time less the time of the kernels. Without a GPU there is
nothing to profile, and the command says so and ends.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.proofs.evidence.environment import environment
from weft.stages.random_weights import PRESETS
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, open_model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.pipelines.transports.local import Local

_STEPS = 24
_WIDTH = 78


@attrs.frozen
class Kernel:
    """A kernel: its launches per step, and its microseconds per step; those in which an earlier one
    still ran are left out, so that they add up to the time in which the device was busy."""

    name: str
    launches: float
    us: float


@attrs.frozen
class Profile:
    """A step.

    Args:
        requests: the number of requests that decode, or whose prompts the step reads.
        ms: the time by the clock, without the profiler.
        busy_ms: the time in which the device ran at least one kernel.
        idle: 1 - busy_ms / ms.
        kernels: the longest first.
        gaps: the idle time before each kernel in the profiled steps, the longest first.
    """

    preset: str
    graph: str
    batch_invariant: bool
    requests: int
    context: int
    ms: float
    busy_ms: float
    idle: float
    kernels: tuple[Kernel, ...]
    gaps: tuple[Kernel, ...]

    def __str__(self) -> str:
        launches = sum(kernel.launches for kernel in self.kernels)
        mode = f"{self.graph}{', batch invariant' * self.batch_invariant}"
        head = (
            f"{self.preset}, {self.requests} requests at {self.context}, {mode}: {self.ms:.3f} ms a"
            f" step; kernels {self.busy_ms:.3f} ms, {launches:.0f} launches, idle {self.idle:.1%}"
        )
        rows = [
            f"{k.us:10.1f} us {k.launches:7.1f} x {k.us / max(k.launches, 1e-9):8.2f} "
            f" {k.name[:_WIDTH]}"
            for k in self.kernels[:28]
        ]
        stood = [
            f"{g.us:10.1f} us {g.launches:7.1f} x {g.us / g.launches:8.2f}  idle before"
            f" {g.name[:_WIDTH]}"
            for g in self.gaps[:8]
        ]
        return "\n".join([head, *rows, *stood])


def profile_decode(args: Any, requests: int) -> Profile:
    """Serve a number of requests, and profile steps in which all of them decode."""
    # Room for the steps before, those that are timed and those that are profiled.
    length = args.context + 4 * _STEPS
    engine = _engine(args, EngineLimits(max_num_reqs=requests, max_model_len=length))
    # Shorter than the context, which requests reach about when the clock starts.
    prompt_len = max(1, args.context - 2 * _STEPS)
    _add(engine, requests, prompt_len, length - prompt_len)
    while engine.stats().steps.get("decode", 0) < _STEPS:
        engine.step()
    return _profile(engine, args, requests)


def profile_prompts(args: Any, num_tokens: int) -> Profile:
    """Profile steps that read a number of tokens of prompts, which are as long as the context."""
    each = -(-num_tokens // args.context)
    limits = EngineLimits(
        max_num_reqs=4 * each, max_model_len=args.context + 1, max_num_tokens=num_tokens
    )
    engine = _engine(args, limits)
    # Enough prompts for all steps: none of them may be left half empty.
    _add(engine, each * 3 * _STEPS, args.context, 1)
    for _ in range(_STEPS // 2):
        engine.step()
    return _profile(engine, args, each)


def _engine(args: Any, limits: EngineLimits) -> Engine:
    options = Bench(preset=args.preset, batch_invariant=args.batch_invariant)
    return Engine(open_model(options, Here(Local(), 1, "cuda")), limits, graph=args.graph, seed=0)


def _add(engine: Engine, requests: int, prompt_len: int, max_tokens: int) -> None:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    for index in range(requests):
        # Prompts that differ from the first token on, or the prefix cache would have them.
        prompt = [(7 * index + 13 * place) % 1000 for place in range(prompt_len)]
        engine.add(prompt, sampling, max_tokens=max_tokens)


def _profile(engine: Engine, args: Any, requests: int) -> Profile:
    # Without the profiler first, which makes the host late.
    ms = _timed(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        _timed(engine)
    return _summed(profiler, args, requests, ms)


def _timed(engine: Engine) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_STEPS):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / _STEPS


# By name, how often and for how many microseconds.
Totals = dict[str, list[float]]


def _summed(profiler: Any, args: Any, requests: int, ms: float) -> Profile:
    events = (event for event in profiler.events() if event.device_type.name == "CUDA")
    kernels, gaps = _kernels_and_gaps(
        [(e.time_range.start, e.time_range.end, e.name) for e in events]
    )
    busy_ms = sum(us for _, us in kernels.values()) / 1e3 / _STEPS
    settings = args.preset, args.graph, args.batch_invariant, requests, args.context
    return Profile(*settings, ms, busy_ms, 1 - busy_ms / ms, _longest(kernels), _longest(gaps))


def _longest(totals: Totals) -> tuple[Kernel, ...]:
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return tuple(Kernel(name, count / _STEPS, us / _STEPS) for name, (count, us) in ordered)


def _kernels_and_gaps(spans: Sequence[tuple[float, float, str]]) -> tuple[Totals, Totals]:
    """The time that each name adds to the spans (start, end, name) before it, and the gaps before
    each name.

    Kernels that are placed early start before those that they wait for have ended.

    >>> kernels, gaps = _kernels_and_gaps([(0, 4, "a"), (1, 6, "b"), (9, 10, "a")])
    >>> dict(kernels), dict(gaps)
    ({'a': [2, 5], 'b': [1, 2]}, {'a': [1, 3]})
    >>> kernels, gaps = _kernels_and_gaps([(0, 1, "a"), (2, 10, "copy"), (5, 6, "b")])
    >>> dict(kernels), dict(gaps)
    ({'a': [1, 1], 'copy': [1, 8], 'b': [1, 0]}, {'copy': [1, 1]})
    """
    kernels: Totals = defaultdict(lambda: [0, 0])
    gaps: Totals = defaultdict(lambda: [0, 0])
    # Up to where the device was busy. Kernels of several streams overlap, and count once.
    reached = min(start for start, *_ in spans)
    for start, end, name in sorted(spans):
        if start > reached:
            gaps[name][0] += 1
            gaps[name][1] += start - reached
        kernels[name][0] += 1
        kernels[name][1] += max(0, end - max(start, reached))
        reached = max(reached, end)
    return kernels, gaps


def main(argv: Sequence[str] | None = None) -> None:
    """Profile each size, print it, and write `step_profile.json`."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, nargs="+", default=[128])
    parser.add_argument("--context", type=int, default=256, help="tokens of each request, about")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", help="of a step, instead of a decode step"
    )
    parser.add_argument("--graph", default="full_decode_only", help="the graph mode")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="with the same bits in any batch"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(0, "no GPU: nothing to profile\n")
    profiles = []
    profile = profile_prompts if args.prompt_tokens else profile_decode
    for size in args.prompt_tokens or args.requests:
        profiles.append(profile(args, size))
        print(profiles[-1], flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {
            "environment": environment("cuda"),
            "profiles": [attrs.asdict(each) for each in profiles],
        }
        name = f"step_profile-{args.preset}{'-batch-invariant' * args.batch_invariant}.json"
        (args.out / name).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
