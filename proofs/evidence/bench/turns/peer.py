"""vLLM's process. It runs in vLLM's own environment, by path, so it imports nothing of weft.

python peer.py FOLDER '{"model": DIRECTORY, "gpu_memory_utilization": 0.3, "max_model_len": 1088,
"max_num_seqs": 128}'
"""

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.005
_DEVIATION = 0.02
# Elements that are drawn at a time.
_AT_ONCE = 2**26


def turns(folder: Path, engine: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each turn of an engine as it comes, and where its answer belongs, until there are no more.

    Raises:
        SystemExit: the process that gives the turns has ended.
    """
    driver = int((folder / "driver").read_text())
    for number in range(sys.maxsize):
        turn = folder / f"{engine}-{number}"
        while not turn.exists():
            try:
                # Signal 0 only asks whether the process is there.
                os.kill(driver, 0)
            except ProcessLookupError:
                sys.exit("the process that gives the turns has ended")
            time.sleep(_POLL_SECONDS)
        request = json.loads(turn.read_text())
        if request is None:
            return
        yield folder / f"{engine}-{number}-done", request


def write(path: Path, value: Any, indent: int | None = None) -> None:
    """Write JSON, so that whoever sees the file sees all of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=indent) + "\n")
    # A rename is one step: nobody reads half a file.
    partial.rename(path)


def draw_weights(model: Any) -> None:
    """Give a model of vLLM's weights that are distributed as those of weft's random models.

    A GPU takes more power for some numbers than for others, and under its power cap that is time:
    its dummy weights lie evenly between -0.001 and 0.001, and in FP8 nearly all of them are 0.
    """
    torch: Any = importlib.import_module("torch")
    for name, value in model.state_dict().items():
        if not (value.is_floating_point() and ("weight" in name or name.endswith("bias"))):
            continue  # scales of keys, say, which are not random
        for some in (
            value.split(max(1, _AT_ONCE // max(value[:1].numel(), 1))) if value.ndim else (value,)
        ):
            noise = torch.empty(some.shape, device=some.device)
            if "scale" in name:
                noise.uniform_(0.5 * _DEVIATION / 16, 1.5 * _DEVIATION / 16)
            elif some.element_size() == 1:
                noise.normal_(0.0, 16.0)
            else:
                noise.normal_(1.0 if "norm" in name else 0.0, _DEVIATION)
            some.copy_(noise)


def main() -> None:
    """Start vLLM, and serve each turn's requests."""
    folder = Path(sys.argv[1])
    options = json.loads(sys.argv[2])
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The model is a folder: there is nothing to load.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # A function goes to its own processes
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    began = time.perf_counter()
    vllm: Any = importlib.import_module("vllm")
    prompt_type: Any = importlib.import_module("vllm.inputs").TokensPrompt
    imported = time.perf_counter()
    arguments = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        # Prompts are random, so that there is nothing to share: weft's cache finds nothing either.
        "enable_prefix_caching": False,
        "seed": 0,
        **options,
    }
    llm = vllm.LLM(**arguments)
    ready = time.perf_counter()
    config = llm.llm_engine.vllm_config
    llm.apply_model(draw_weights)
    write(
        folder / "vllm-ready",
        {
            "version": vllm.__version__,
            "torch": importlib.import_module("torch").__version__,
            "import_seconds": round(imported - began, 2),
            "ready_seconds": round(ready - imported, 2),
            "arguments": arguments,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "quantization": config.model_config.quantization,
            "variables": {
                name: value for name, value in os.environ.items() if name.startswith("VLLM_")
            },
        },
    )
    draw = random.Random(0)
    size = json.loads(Path(options["model"], "config.json").read_text())["vocab_size"]
    vocabulary = range(min(1000, size // 2), min(100_000, size))
    for answer, request in turns(folder, "vllm"):
        lengths = request["input_lens"]
        most = request["output_len"]
        prompts = [
            prompt_type(prompt_token_ids=draw.choices(vocabulary, k=length)) for length in lengths
        ]
        sampling = vllm.SamplingParams(
            max_tokens=most, ignore_eos=True, detokenize=False, **request["sampling"]
        )
        start = time.perf_counter()
        # Without a progress bar, which takes time on each step.
        done = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(one.outputs[0].token_ids) for one in done)
        assert tokens == len(prompts) * most, f"{tokens} tokens, not {len(prompts) * most}"
        write(answer, {"seconds": seconds})


if __name__ == "__main__":
    main()
