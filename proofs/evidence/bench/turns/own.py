"""weft's side: one process, or a rank for each stage. It runs by path, with whichever weft is
imported.

    python own.py FOLDER '{"model": DIRECTORY, "input_len": 2, "output_len": 8}' weft
"""

import gc
import json
import random
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.proofs.evidence.environment import environment
from weft.transforms.cli.bench import start_engine, workload_of
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.serving import Served, figures, measure

# By path, as this file.
_PEER = runpy.run_path(str(Path(__file__).with_name("peer.py")))
turns = _PEER["turns"]
write = _PEER["write"]
_KEPT = "seconds", "ttft", "tpot", "num_steps", "graphs", "captures"


def at_once(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_tokens: int
) -> Served:
    """Complete prompts that all arrive at once, by what every build since 2026-11-24 has."""
    before = engine.stats()
    began = time.perf_counter()
    read = dict[str, list[float]]()
    for prompt in prompts:
        read[engine.add(prompt, sampling, max_tokens=max_tokens)] = []
    for output in engine:
        if output.error is not None:
            raise output.error
        read[output.id] += [time.perf_counter() - began] * len(output.token_ids)
    return Served(list(read.values()), before, engine.stats())


def serve(here: Here, options: Bench, folder: Path, name: str) -> None:
    """Start an engine, and serve each turn's requests; the first rank answers."""
    engine, started = start_engine(here, options)
    first = next(
        iter(
            measure(
                engine, workload_of(attrs.evolve(options, num_prompts=1, output_len=2)), started
            )
        )
    )
    if here.first:
        on_gpu = started.device.startswith("cuda")
        if on_gpu:
            total = torch.cuda.get_device_properties(started.device).total_memory
        else:
            total = None
        ready = {
            "mode": options.graphs[0],
            "device_bytes": total,
            "max_num_tokens": first["max_num_tokens"],
        }
        ready |= {"ranks": first["ranks"], "environment": environment("cuda" if on_gpu else "cpu")}
        write(folder / f"{name}-ready", ready)
    # Other prompts than those of the first tokens above, whose keys are kept.
    draw = random.Random(1)
    vocabulary = range(engine.model.config.vocab_size)
    # A full collection takes about 100 milliseconds, and would come in the midst of a step.
    gc.collect()
    gc.freeze()  # as vLLM does
    for answer, request in turns(folder, name):
        prompts = [draw.choices(vocabulary, k=length) for length in request["input_lens"]]
        sampling = SamplingParams(ignore_eos=True, **request["sampling"])
        result = figures(at_once(engine, prompts, sampling, request["output_len"]), 0, [])
        expected_tokens = len(prompts) * request["output_len"]
        # An engine that ends completions early looks faster.
        assert result["output_tokens"] == expected_tokens, (
            f"{result['output_tokens']} tokens, not {expected_tokens}"
        )
        if here.first:
            write(answer, {"mode": options.graphs[0], **{key: result[key] for key in _KEPT}})


def main() -> None:
    """Serve what the folder asks for."""
    folder = Path(sys.argv[1])
    arguments = json.loads(sys.argv[2])
    options = attrs.evolve(Bench(model=arguments.pop("model")), **arguments)
    in_ranks(serve, options, options, folder, sys.argv[3])


if __name__ == "__main__":
    main()
