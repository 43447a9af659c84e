"""`weft generate`: complete prompts with a checkpoint."""

import sys
from collections.abc import Sequence

import attrs
from rich.text import Text

from weft.arguments.json_text import write_json
from weft.display.quantities import counted
from weft.stages.adapters import load_adapter
from weft.stages.model import Model, load
from weft.transforms.cli.models import check_models, open_drafts, read_config
from weft.transforms.cli.options import Generate
from weft.transforms.cli.printing import console, printable
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.generate import Completion, generate

Completed = tuple[list[str], list[Completion]]
"""The prompts, as text or in the form that `--prompt-ids` takes, and their completions."""


def run(options: Generate) -> int:
    """Complete the prompts and print the completions; the exit code is 1 if one of them ended with an error."""
    if not options.prompt:
        options.refuse("", "no prompt", "give at least one --prompt TEXT or --prompt-ids 1,2,3")
    check_models(options, read_config(options.model))
    completed = in_ranks(_complete, options, options, sys.stderr.isatty())
    if completed is None:
        return 0  # the first rank prints
    prompts, completions = completed
    if options.json:
        print("\n".join(write_json(attrs.asdict(completion)) for completion in completions))
    else:
        _show(prompts, completions)
    failed = [completion.error for completion in completions if completion.error is not None]
    for error in failed:
        print(f"error: {printable(str(error))}", file=sys.stderr)
    return 1 if failed else 0


def _complete(here: Here, options: Generate, progress: bool) -> Completed:
    """This process's part of the work."""
    shows = progress and here.first
    model = load(options.model, here.device, options.dtype, stage=here.stage, progress=shows)
    completions = generate(
        model,
        options.prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        pipeline=here.num_stages,
        graph=options.graph,
        adapter=None if options.adapter is None else load_adapter(model, options.adapter),
        speculation=open_drafts(options, here),
        transport=here.transport,
        progress=shows,
    )
    return [_as_text(model, prompt) for prompt in options.prompt], completions


def _as_text(model: Model, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return ",".join(map(str, prompt)) if model.tokenizer is None else str(model.decode(prompt))


def _show(prompts: Sequence[str], completions: Sequence[Completion]) -> None:
    """Each completion after its prompt; without a tokenizer as ids, in the form that `--prompt-ids` takes."""
    out = console()
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = ",".join(map(str, completion.token_ids))
        new = f",{ids}" if completion.text is None else completion.text
        title = f"[{index + 1} of {len(prompts)}] {counted(len(completion.token_ids), 'token')}"
        out.print(Text(f"{title}, {completion.finish_reason}", style="dim"), soft_wrap=True)
        out.print(Text.assemble((printable(prompt), "bold"), printable(new)), end="\n\n", soft_wrap=True)
