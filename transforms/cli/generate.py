"""What `weft generate` does, in each process of its pipeline."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from weft.stages.adapter_checkpoint import load_adapter
from weft.stages.config import config_in_folder
from weft.stages.model import Model, load
from weft.transforms.cli.drafts import open_drafts
from weft.transforms.cli.ranks import Here, Place, check_stages, in_ranks
from weft.transforms.engine.generate import Completion, generate


@attrs.frozen
class Wanted:
    """The options of `weft generate`; `stages` is None where `--pp` was not given."""

    model: str
    prompts: Sequence[str | list[int]]
    max_tokens: int
    temperature: float
    seed: int | None
    graph: str
    device: str | None
    dtype: str | None
    transport: str | None
    adapter: str | None
    speculate: int | None
    draft: str | None
    timeout: float
    stages: int | None


Completed = tuple[list[str], list[Completion]]
"""The prompts as text, or as ids in the form that `--prompt-ids` takes, and what completes them."""


def complete(wanted: Wanted, *, progress: bool) -> Completed | None:
    """The completions; None on a rank of torchrun's that is not the first.

    Raises:
        ProgramError: `--pp` is not torchrun's number of processes.
        RequestError: more stages than layers.
        RequestError: no stage, or more of them than layers.
        DeviceError: fewer GPUs than stages.
        Whatever `weft.load` and `weft.generate` raise.
    """
    place = Place("weft generate", wanted.stages, wanted.transport, wanted.device, wanted.timeout)
    check_stages(place, config_in_folder(Path(wanted.model), f"--model {wanted.model}").num_layers)
    return in_ranks(_complete, place, wanted, progress)


def _complete(here: Here, wanted: Wanted, progress: bool) -> Completed:
    shows = progress and here.first
    model = load(wanted.model, here.device, wanted.dtype, stage=here.stage, progress=shows)
    completions = generate(
        model,
        wanted.prompts,
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        seed=wanted.seed,
        pipeline=here.num_stages,
        graph=wanted.graph,
        adapter=None if wanted.adapter is None else load_adapter(model, wanted.adapter),
        speculation=open_drafts(here, wanted.speculate, wanted.draft, wanted.dtype),
        transport=here.transport,
        progress=shows,
    )
    return [_shown(model, prompt) for prompt in wanted.prompts], completions


def _shown(model: Model, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return ",".join(map(str, prompt)) if model.tokenizer is None else str(model.decode(prompt))
