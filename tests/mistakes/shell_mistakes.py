"""Mistakes in a shell: the arguments of `weft`, and what is in the error."""

from weft.stages import DEMO

COMMANDS: dict[str, tuple[list[str], str]] = {
    "a command that is none": (
        ["transcribe", "--model", "demo"],
        "weft: error: no command 'transcribe' (instead: see weft --help)",
    ),
    "a command misspelt": (
        ["genrate", "--model", "demo"],
        "weft: error: no command 'genrate' (instead: weft generate, or see weft --help)",
    ),
    "no model": (
        ["generate", "--prompt", "A"],
        "weft generate: error: the following arguments are required: --model",
    ),
    "no prompt": (
        ["generate", "--model", str(DEMO)],
        "saw: no prompt\n  instead: give at least one --prompt TEXT or --prompt-ids 1,2,3",
    ),
    "an option of another name": (
        ["generate", "--model", str(DEMO), "--prompt", "A", "--speculation", "3"],
        (
            "weft generate: error: unrecognized arguments: --speculation 3 "
            "(instead: --speculate, or see weft generate --help)"
        ),
    ),
    "an option that is required, misspelt": (
        ["bench", "--modle", "demo"],
        (
            "weft bench: error: unrecognized arguments: --modle demo (instead: --model, or see weft"
            " bench --help)"
        ),
    ),
    "the only arguments misspelt": (
        ["verify", "--modle=demo"],
        (
            "weft verify: error: unrecognized arguments: --modle=demo (instead: --model, or see"
            " weft verify --help)"
        ),
    ),
    "a model without its option": (
        ["generate", "demo", "--prompt", "A"],
        "unrecognized arguments: demo (instead: --model demo, or see weft generate --help)",
    ),
    "a prompt without quotes": (
        ["generate", "--model", "demo", "--prompt", "The", "function"],
        "unrecognized arguments: function (instead: see weft generate --help)",
    ),
    "an option of vLLM's": (
        ["serve", "demo", "--tensor-parallel-size", "2"],
        (
            "unrecognized arguments: --tensor-parallel-size 2 (instead: --tp, or see weft serve"
            " --help)"
        ),
    ),
    "an option that only begins like others": (
        ["generate", "--model", "demo", "--prompt", "A", "--batch-size", "3"],
        "unrecognized arguments: --batch-size 3 (instead: see weft generate --help)",
    ),
    "sampling that the command does not have": (
        ["generate", "--model", "demo", "--prompt", "A", "--logprobs", "5"],
        (
            "instead: in Python, weft.generate(..., sampling=weft.SamplingParams(...)), or see weft"
            " generate --help)"
        ),
    ),
    "sampling out of range": (
        ["generate", "--model", "demo", "--prompt", "A", "--top-p", "0"],
        "argument --top-p: '0': write a number > 0 and <= 1; 1 keeps all",
    ),
    "sampling of a greedy request": (
        ["generate", "--model", "demo", "--prompt", "A", "--top-p", "0.5"],
        (
            "error: weft generate --top-p 0.5\n  saw: --top-p 0.5, which changes nothing of a greedy"
            " request, and no temperature\n  instead: --temperature 1.0, or another at which to draw;"
            " --temperature 0 to be greedy all the same"
        ),
    ),
    "a model of no such name to serve": (
        ["serve", "dmo"],
        "error: weft serve dmo\n  saw: there is no folder 'dmo'",
    ),
    "longer requests than the model has": (
        ["serve", "demo", "--max-model-len", "9999"],
        "saw: the model's limit is 512\n  instead: --max-model-len 512, or fewer",
    ),
    "an option that is none": (
        ["doctor", "--tensor-parallel-size=2"],
        (
            "weft doctor: error: unrecognized arguments: --tensor-parallel-size=2 (instead: see"
            " weft doctor --help)"
        ),
    ),
    "a folder that is not there": (
        ["generate", "--model", "nowhere", "--prompt", "A"],
        "saw: there is no folder 'nowhere'\n  instead: pass a local folder; `hf download",
    ),
    "more stages than layers": (
        ["plan", "--model", str(DEMO), "--pp", "9"],
        "instead: use 1 to 6 stages, so that each owns a layer",
    ),
    "fewer tokens than requests": (
        ["bench", "--preset", "tiny", "--max-num-seqs", "4", "--max-num-tokens", "2"],
        (
            "error: weft bench --max-num-tokens 2\n  saw: 2 tokens a step for 4 requests\n "
            " instead: 4 or more"
        ),
    ),
    "more tokens than positions": (
        ["demo", "--max-tokens", "9999"],
        "instead: a number from 1 to 492",
    ),
}
