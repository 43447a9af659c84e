"""What a new user is told besides errors: in notes, where something is printed, where there is no
evidence."""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from answers import X, model
from hypothesis import given, strategies as st
from torch import Tensor, nn

import weft
from weft import errors
from weft.proofs import check
from weft.transforms import Transform, lift, make_runner


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, batch


def test_an_engine_and_what_it_says_print_in_a_line() -> None:
    engine = weft.Engine(model(), graph="none")
    engine.add([1], max_tokens=2)
    assert (
        repr(engine)
        == "<Engine of Qwen3ForCausalLM; graphified steps here: 0; requests under way: 1>"
    )
    assert all(len(repr(output)) < 200 for output in engine)


def test_what_was_refused_leaves_the_settings_alone() -> None:
    for name, value in (("log_capture", True), ("log_captures", "yes")):
        with contextlib.suppress(errors.ArgumentError):
            setattr(weft.config, name, value)
    assert attrs.asdict(weft.config) == {"explain_cache_misses": False, "log_captures": False}


@pytest.mark.parametrize("spans", [weft.pipeline, weft.compose])
def test_an_advance_that_was_not_lifted_is_noted(spans: Any) -> None:
    counts = Transform(
        lambda params, state: 0,
        lambda stage, count, p, s, batch, x: (count + 1, *stage(p, s, batch, x)),
    )

    def total(state: Tensor, batch: Tensor, out: Tensor) -> Tensor:
        return state + out.sum()

    step = spans([counts(stage)], advance=total)
    arguments = ([X], [counts.carry(X, X)], X)
    with pytest.raises(TypeError) as error:
        step(*arguments)
    note = (
        "in advance (total) on stage 0's state, a Carried, which a transform made:"
        " advance=lift(...)"
    )
    assert note in error.value.__notes__
    (state,), _ = spans([counts(stage)], advance=lift(total))(*arguments)
    assert (state.transform_state, state.state.tolist()) == (1, [4, 4, 4])


def test_a_runner_prints_in_a_line() -> None:
    runner = make_runner(model(), weft.Limits(1, 8), num_stages=2)
    assert repr(runner) == "<Runner of 2 stages: layers 0 to 2, 3 to 5 here, 2 graphified>"


@given(
    st.lists(
        st.one_of(st.integers(0, 256), st.floats(), st.booleans(), st.none(), st.text()), min_size=1
    )
)
def test_only_whole_numbers_are_token_ids(ids: list[Any]) -> None:
    whole = all(isinstance(token, int) for token in ids)
    with (
        contextlib.nullcontext()
        if whole
        else pytest.raises(errors.DescriptorError, match=r"token_ids\[0\] holds")
    ):
        assert weft.Batch.ragged([0], [ids]).input_ids.tolist() == [int(token) for token in ids]


def test_no_evidence_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters that require grad keep a module from being replayed."""
    check(nn.Linear(3, 3), (X,), laws=("graph", "replay"))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("no evidence:") == 1
    assert "runs inline: it reads Linear.weight from outside, which requires grad" in out
    check(nn.Linear(3, 3).requires_grad_(False), (X,), laws=("graph", "replay"))
    assert "no evidence" not in capsys.readouterr().out


def test_an_error_shows_both_ends_of_a_long_call() -> None:
    barred = weft.SamplingParams(bad_token_ids=range(257))
    with pytest.raises(errors.RequestError) as error:
        weft.Engine(model(), graph="none").add([1], barred, max_tokens=3, id="mine")
    said = str(error.value).splitlines()[0]
    call = error.value.call
    assert (said[:200], said[-200:]) == (call[:200], call[-200:])
    assert len(said) <= 403 < len(call)


@pytest.mark.parametrize("whole", [True, False])
def test_a_gguf_file_that_is_cut_off(tmp_path: Path, whole: bool) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(
        errors.CheckpointError, match=r"model.gguf is not a GGUF file that weft can read: at byte 4"
    ):
        weft.load(tmp_path if whole else file, "cpu")


def test_a_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        errors.CheckpointError,
        match=r"saw: a GGUF file, and .*\n.*instead: pip install 'gguf>=0.18'",
    ):
        weft.load(tmp_path, "cpu")


def test_a_folder_of_several_ggufs(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        errors.CheckpointNotFoundError, match=r"but a.gguf\n.*instead: name the one to load"
    ):
        weft.load(tmp_path, "cpu")


def test_an_index_with_an_entry_that_names_no_file(tmp_path: Path) -> None:
    shutil.copy(weft.stages.DEMO / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": 3}}'
    )
    with pytest.raises(
        errors.CheckpointError,
        match=r"has weight_map.model.norm.weight=3; .* is the name of a file",
    ):
        weft.load(tmp_path, "cpu")
