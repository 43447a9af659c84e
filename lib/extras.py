"""The optional packages of weft, and the command that installs them.

The command names these packages rather than `weft[extra]`, because this weft is not on the package
index: there the name belongs to somebody else's project, or could be registered by anybody.
"""

import sys

# For each extra of `pyproject.toml` whose absence an error reports, its requirements.
EXTRAS = {
    "cuda": ("triton>=3.6",),
    "serve": (
        "starlette>=0.40",
        "uvicorn>=0.30",
        "httptools>=0.6.3",
        *(() if sys.platform == "win32" else ("uvloop>=0.19",)),
        "pydantic>=2.7",
        "prometheus-client>=0.20",
        "llguidance>=1.6",
    ),
    "gguf": ("gguf>=0.18",),
    "proofs": ("hypothesis>=6.131", "z3-solver>=4.13", "expecttest>=0.2"),
    "notebook": (
        "hypothesis>=6.131",
        "matplotlib>=3.8",
        "nbclient>=0.10",
        "ipykernel>=6.29",
        "ipywidgets>=8",
    ),
}


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra.

    >>> install_command("gguf")
    "pip install 'gguf>=0.18'"
    """
    return " ".join(("pip install", *(f"'{requirement}'" for requirement in EXTRAS[extra])))
