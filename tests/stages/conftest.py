"""Checkpoints that several tests read."""

from pathlib import Path

import pytest
from saved_models import scrambled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small untied Llama in one file."""
    scrambled("llama").save_pretrained(tmp_path)
    return tmp_path
