"""weft's side: one process, or a rank for each stage. It runs by path, so that it may be the side of an older weft too.

python own.py FOLDER '{"model": DIRECTORY, "load_format": "dummy", "input_len": 2, "output_len": 8}' weft
"""

import gc
import json
import random
import runpy
import sys
from pathlib import Path

import attrs
import torch

from weft.proofs.environment import environment
from weft.transforms.cli.bench import start_engine, workload_of
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.evaluation.serving import figures, measure, serve as serve_at_once

_PEER = runpy.run_path(str(Path(__file__).with_name("peer.py")))  # of this build, whichever weft is imported
turns, write = _PEER["turns"], _PEER["write"]
_KEPT = "seconds", "ttft", "tpot", "num_steps", "graphs", "captures"


def serve(here: Here, options: Bench, folder: Path, name: str) -> None:
    """Start an engine, and serve each turn's requests; the first rank answers."""
    engine, started = start_engine(here, options)
    first = next(iter(measure(engine, workload_of(attrs.evolve(options, num_prompts=1, output_len=2)), started)))
    if here.first:
        on_gpu = started.device.startswith("cuda")
        total = torch.cuda.get_device_properties(started.device).total_memory if on_gpu else None
        ready = {"mode": options.graphs[0], "device_bytes": total, "max_num_tokens": first["max_num_tokens"]}
        ready |= {"ranks": first["ranks"], "environment": environment("cuda" if on_gpu else "cpu")}
        write(folder / f"{name}-ready", ready)
    # Other prompts than those of the first tokens above, whose keys are kept.
    draw, vocabulary = random.Random(1), range(engine.model.config.vocab_size)
    gc.collect()
    gc.freeze()  # as vLLM does
    for answer, asked in turns(folder, name):
        prompts = [draw.choices(vocabulary, k=asked["input_len"]) for _ in range(asked["num_requests"])]
        served = serve_at_once(engine, prompts, options.temperature, asked["output_len"])
        found = figures(served, asked["input_len"], [])
        wanted = asked["num_requests"] * asked["output_len"]
        assert found["output_tokens"] == wanted, f"{found['output_tokens']} tokens, not {wanted}"
        if here.first:
            write(answer, {"mode": options.graphs[0], **{key: found[key] for key in _KEPT}})


def main() -> None:
    """Serve what the folder asks for."""
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    options = attrs.evolve(Bench(model=given.pop("model")), **given)
    in_ranks(serve, options, options, folder, sys.argv[3])


if __name__ == "__main__":
    main()
