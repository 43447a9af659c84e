"""Malformed files and arguments: each is an error or harmless, in time, and no file outside the
folder is read."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import malformed
import pytest
import torch
from cli_calls import Weft
from malformed import CASES, EXPRESSIONS, FOLDER, Case
from safetensors.torch import load_file, save_file

import weft
from weft.errors import CheckpointError
from weft.proofs import assert_equal
from weft.stages.checkpoints import reading as checkpoint

# The seconds that a command may take on a small machine; each takes some hundredths.
SECONDS = 20
_INSTALLED = tuple(
    str(Path(path).resolve())
    for path in (sys.prefix, sys.base_prefix, Path(torch.__file__).parents[1])
)
_BYTECODE = [sys.pycache_prefix] if sys.pycache_prefix else []
_SYSTEM = (
    "/proc",
    "/sys",
    "/etc/localtime",
    str(Path(weft.__file__).resolve().parents[1]),
    *_INSTALLED,
    *_BYTECODE,
)
# Matches a call of a Python function, which an error of the command line must not show.
PYTHON = re.compile(
    r"\b(weft\.\w+|Engine\w*|Speculation|SamplingParams|split_layers|balance|model\.\w+|load\w*)\([^)]"
)
_read: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        event == "open"
        and _read is not None
        and isinstance(arguments[0], str)
        and "w" not in (arguments[1] or "r")
    ):
        _read.append(arguments[0])


sys.addaudithook(_note)  # an audit hook cannot be removed


class LateError(BaseException):
    pass


def _late(*_: object) -> None:
    raise LateError


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files opened for reading inside the context, by Python or by safetensors. It ends after
    `SECONDS`."""
    global _read
    opened: list[str] = []
    safe_open = checkpoint.safe_open

    def noted(file: Path, **options: Any) -> Any:
        opened.append(str(file))
        return safe_open(file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "safe_open", noted)
        before = signal.signal(signal.SIGALRM, _late)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        _read = opened
        try:
            yield opened
        finally:
            _read = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def outcome(case: Case, folder: Path, run: Weft, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fault in the command's behaviour; empty if there is none."""
    case.spoil(folder)
    argv = [argument.replace(FOLDER, str(folder)) for argument in case.argv]
    with watched(monkeypatch) as read:
        try:
            code, out, err = run(*argv)
        except BaseException as error:
            return f"raised {error!r:.200}"
    if outside := [
        path
        for path in read
        if not path.startswith((str(folder), *_SYSTEM)) and path not in (*argv, ".")
    ]:
        return f"read {outside}"
    if code == 0 and not case.refused:
        for line in [out] if case.argv[0] != "generate" else out.splitlines():
            json.loads(line, parse_constant=no_constant)
        return ""
    if spoken := PYTHON.search(err.replace(str(folder), "")):
        return f"speaks of Python: {spoken[0]}: {err[-300:]}"
    lost = "error: " not in err or "Traceback" in err or len(err) > 4000 + 2 * sum(map(len, argv))
    return (
        f"exit {code}: {err[-300:]}"
        if lost or code not in ((2,) if case.refused else (1, 2))
        else ""
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return malformed.make(tmp_path_factory.mktemp("malformed") / "model")


@pytest.mark.one_of(4)
@pytest.mark.parametrize("damaged", CASES)
def test_malformed_input_is_an_error(
    damaged: str,
    sound: Path,
    tmp_path: Path,
    run: Weft,
    monkeypatch: pytest.MonkeyPatch,
    runs_nightly: bool,
) -> None:
    shutil.copytree(sound, tmp_path / "outside")  # which can be read
    shutil.move(
        tmp_path / "outside" / malformed.SHARDS[0], tmp_path / "outside" / "model.safetensors"
    )
    wrong = {}
    for index, case in enumerate(CASES[damaged][:: 1 if runs_nightly else 7]):
        folder = Path(shutil.copytree(sound, tmp_path / "case"))
        if failure := outcome(case, folder, run, monkeypatch):
            wrong[f"{index} {case.name}"] = failure
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} of {len(CASES[damaged])}:\n" + "\n".join(
        map(str, wrong.items())
    )


def test_there_are_many() -> None:
    assert sum(map(len, CASES.values())) > 1000


@pytest.mark.parametrize(
    "name", ["../outside/model.safetensors", "/outside/model.safetensors", "a/../../outside/x"]
)
def test_shards_outside_of_the_folder_are_refused(
    name: str, sound: Path, tmp_path: Path, run: Weft
) -> None:
    """Shards outside the folder are refused even if the file exists and fits."""
    folder = shutil.copytree(sound, tmp_path / "model")
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(folder / malformed.SHARDS[0], outside / "model.safetensors")
    name = str(outside / "model.safetensors") if name[0] == "/" else name
    index = json.loads((folder / malformed.INDEX).read_text())
    index["weight_map"] = {
        n: shard.replace(malformed.SHARDS[0], name) for n, shard in index["weight_map"].items()
    }
    malformed.write(folder / malformed.INDEX, index)
    with pytest.raises(CheckpointError) as caught:
        weft.load(folder, "cpu")
    assert caught.value.problem.startswith(
        f"{malformed.INDEX} is not an index of shards: it has weight_map."
    )
    assert caught.value.problem.endswith(f" is the name of a file of {str(folder)!r}")
    assert f"={name!r}; " in caught.value.problem


def test_shards_in_a_folder_of_their_own_and_links_are_read(sound: Path, tmp_path: Path) -> None:
    """The cache of the Hugging Face hub holds blobs, and snapshots with links to them."""
    blobs = tmp_path / "blobs"
    folder = tmp_path / "snapshots" / "main"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for index, path in enumerate(path for path in sorted(sound.iterdir()) if path.is_file()):
        shutil.copy(path, blobs / str(index))
        (folder / path.name).symlink_to(f"../../blobs/{index}")
    assert_equal("through links", weft.load(folder, "cpu").params, weft.load(sound, "cpu").params)
    index = (folder / malformed.INDEX).read_text()
    (folder / malformed.INDEX).unlink()
    (folder / malformed.INDEX).write_text(index.replace('"model-', '"shards/model-'))
    (folder / "shards").mkdir()
    for shard in malformed.SHARDS:
        (folder / shard).rename(folder / "shards" / shard)
        (folder / "shards" / shard).unlink()
        shutil.copy(sound / shard, folder / "shards" / shard)
    assert_equal("in a folder", weft.load(folder, "cpu").params, weft.load(sound, "cpu").params)


def test_logits_that_are_no_numbers_end_one_completion(
    sound: Path, tmp_path: Path, run: Weft
) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    tensors = load_file(folder / malformed.SHARDS[0])
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / malformed.SHARDS[0])
    argv = ("generate", "--model", str(folder), "--device", "cpu", "--max-tokens", "1")
    code, out, err = run(*argv, "--prompt-ids", "1,2", "--prompt-ids", "1,7", "--json")
    first, second = (json.loads(line, parse_constant=no_constant) for line in out.splitlines())
    assert (code, first["finish_reason"], first["error"]) == (1, "length", None)
    assert (second["finish_reason"], set(second["logprobs"]) <= {None}) == ("error", True)
    assert second["error"].startswith(
        "request '1'\n  saw: logits that are NaN after 2 tokens\n  instead: look for"
    )
    assert err == f"error: {second['error']}\n"
    code, out, err = run(*argv, "--prompt-ids", "1,7")
    assert (code, ", error\n" in out, err.startswith("error: request '0'")) == (1, True, True)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "x.safetensors"]
)
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to nothing"])
def test_what_is_no_file_is_not_read(
    name: str, kind: str, sound: Path, tmp_path: Path, run: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a writer, or an endless device, would block the command forever."""
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "device" else "nothing")
    argv = (
        "generate",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--max-tokens",
        "1",
        "--prompt-ids",
        "1,2",
    )
    with watched(monkeypatch) as read:
        code, _, err = run(*argv)
    assert (code, "has no config.json" in err) == (
        (2, True) if name == "config.json" else (0, False)
    )
    assert str(folder / name) not in read


def test_a_file_of_json_has_a_size_that_can_be_read(sound: Path, tmp_path: Path, run: Weft) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    with (folder / "config.json").open("r+b") as config:
        config.truncate(2**40)  # a sparse file, which takes no space
    code, _, err = run("plan", "--model", str(folder), "--pp", "2")
    assert (code, "config.json holds 1099511627776 bytes, and 67108864 are the most" in err) == (
        2,
        True,
    )


def damage(kind: str, folder: Path) -> tuple[str, ...]:
    """The command that reads it."""
    if kind == "deep":
        (folder / "config.json").write_text(malformed.DEEP)
    if kind == "endless":
        malformed.edit(malformed.ADAPTER, rank_pattern={EXPRESSIONS["endless"]: 2})(folder)
    if kind == "NaN":
        tensors = load_file(folder / malformed.SHARDS[0])
        save_file(
            {name: torch.full_like(x, torch.nan) for name, x in tensors.items()},
            folder / malformed.SHARDS[0],
        )
    return malformed.ADAPTED if kind == "endless" else malformed.GENERATE


@pytest.mark.one_of(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("deep", 2, "config.json is not JSON: it is nested too deeply"),
        ("endless", 2, "rank_pattern has names, not regular expressions"),
        ("NaN", 1, "logits that are NaN after 9 tokens"),
    ],
)
def test_in_a_process_of_its_own(
    kind: str, code: int, said: str, sound: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    argv = [argument.replace(FOLDER, str(folder)) for argument in damage(kind, folder)]
    command = [sys.executable, "-m", "weft", *argv]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=120
    )
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        [line] = done.stdout.splitlines()
        told = json.loads(line, parse_constant=no_constant)
        assert (told["finish_reason"], set(told["logprobs"]) <= {None}) == ("error", True)
        assert said in told["error"]
    else:
        assert done.stdout == ""
