"""`weft generate`: complete prompts with a checkpoint."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from rich.text import Text

from weft.arguments.json_text import write_json
from weft.display.quantities import counted
from weft.errors import RequestError
from weft.stages.adapters.adapter import load_adapter
from weft.stages.config import ModelConfig
from weft.stages.model import Model
from weft.transforms.cli.options import Generate
from weft.transforms.cli.printing import check_file, printable, show
from weft.transforms.cli.ranks import Here, in_ranks, open_drafts, open_model, read_config
from weft.transforms.engine.evaluation.certificates import Certificate
from weft.transforms.engine.generate import Completion, generate
from weft.transforms.engine.requests.inputs import encode_prompt

# Each prompt, as text or in the form of `--prompt-ids`, with its completion.
Completed = list[tuple[str, Completion]]


def run(options: Generate) -> int:
    """Complete the prompts and print the completions; the exit code is 1 if one of them ended with
    an error."""
    if not options.prompt:
        options.refuse("", "no prompt", "give at least one --prompt TEXT or --prompt-ids 1,2,3")
    if options.chat and any(not isinstance(prompt, str) for prompt in options.prompt):
        options.refuse("--chat", "--prompt-ids", "--prompt TEXT: the text of a message")
    least = (1 if isinstance(prompt, str) else len(prompt) for prompt in options.prompt)
    # Checked here with the least possible lengths, since the tokenizer is loaded with the weights;
    # `_complete` checks again with the true ones.
    _check_room(options, read_config(options), least, " or more")
    check_file(options, "--certificates", options.certificates)
    _ = options.sampling  # refuses contradictions before the model is loaded
    completed, certificates = in_ranks(_complete, options, options)
    if certificates:
        with options.about(f"--certificates {options.certificates}", RequestError):
            Certificate.save_all(certificates, str(options.certificates))
    if options.json:
        fields = attrs.fields(Completion)
        # Times and provenance describe this run; the JSON has what was generated.
        without_times = attrs.filters.exclude(fields.times, fields.provenance)
        print(
            "\n".join(
                write_json(attrs.asdict(entry, filter=without_times)) for _, entry in completed
            )
        )
    else:
        show(_shown(completed, between="\n" if options.chat else ""))
    failed = [completion.error for _, completion in completed if completion.error is not None]
    for error in failed:
        print(f"error: {printable(str(error))}", file=sys.stderr)
    if failed:
        return 1
    return 0


def _complete(here: Here, options: Generate) -> tuple[Completed, list[Certificate]]:
    """Run in each process: return the completions, and the certificates of those without error."""
    model = open_model(options, here)
    raw_prompts = [
        model.encode_chat(_chat(options, prompt)) if options.chat else prompt
        for prompt in options.prompt
    ]
    prompts = [
        encode_prompt(model, prompt, "weft generate", f"prompt {index}")
        for index, prompt in enumerate(raw_prompts)
    ]
    _check_room(options, model.config, map(len, prompts))
    completions = generate(
        model,
        prompts,
        max_tokens=options.max_tokens,
        sampling=options.sampling,
        seed=options.seed,
        pipeline=here.num_stages,
        graph=options.graph_mode,
        compiler=options.compiler,
        adapter=None if options.adapter is None else load_adapter(model, options.adapter),
        speculation=open_drafts(options, here),
        transport=here.transport,
        progress=here.progress,
    )
    certifiable = [
        one for one in completions if options.certificates is not None and one.error is None
    ]
    certificates = [one.certificate() for one in certifiable]
    return [
        (_as_text(model, prompt), one)
        for prompt, one in zip(options.prompt, completions, strict=True)
    ], certificates


def _check_room(
    options: Generate, config: ModelConfig, lengths: Iterable[int], or_more: str = ""
) -> None:
    """Refuse an explicit `--max-tokens` for which the model lacks positions after the longest
    prompt; the default is cut to fit.

    Args:
        lengths: the number of tokens of each prompt, or a lower bound of it.
        or_more: follows a length in the error, to mark a lower bound.
    """
    max_tokens = options.max_tokens
    longest = max(lengths)
    limit = config.max_position_embeddings
    if "max_tokens" in options.explicit and longest < limit < longest + max_tokens:
        problem = (
            f"{max_tokens} tokens after a prompt of {longest}{or_more}; the model's limit is {limit}"
            " together"
        )
        options.refuse(
            f"--max-tokens {max_tokens}", problem, f"--max-tokens {limit - longest}, or fewer"
        )


def _chat(options: Generate, text: str | list[int]) -> list[dict[str, Any]]:
    """A chat of one user message, after the system message if there is one."""
    if options.system is None:
        system = []
    else:
        system = [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def _as_text(model: Model, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if model.tokenizer is None:
        return ",".join(map(str, prompt))
    return str(model.decode(prompt))


def _shown(completed: Completed, between: str) -> Iterator[Text]:
    """Each prompt, then `between` and its completion; without a tokenizer, token ids in the form of
    `--prompt-ids`."""
    for number, (prompt, completion) in enumerate(completed, 1):
        ids = ",".join(map(str, completion.token_ids))
        if completion.text is None:
            new = f",{ids}"
        else:
            new = completion.text
        title = f"[{number} of {len(completed)}] {counted(len(completion.token_ids), 'token')}"
        yield Text(f"{title}, {completion.finish_reason}", style="dim")
        yield Text.assemble(
            (printable(prompt), "bold"),
            between,
            printable(new),
            "\n",
            no_wrap=True,
            overflow="ignore",
        )
