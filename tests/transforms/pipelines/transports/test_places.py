"""Places in shared memory: they are read as they were written, even during a write or after the
writer was killed."""

import multiprocessing as mp
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from weft.transforms.pipelines.transports.watching.places import Places


def files(folder: Path) -> list[Path]:
    return [folder / "0", folder / "1"]


def test_a_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    places = Places(files(tmp_path), 0)
    other = Places(files(tmp_path), 1)
    assert other.read(0) is places.read(1) is None
    for text in (b"", b"first", b"x" * (2**15 - 8), b"last"):
        places.write(text)
        assert places.read(0) == other.read(0) == text
    assert stat.S_IMODE(os.stat(tmp_path / "0").st_mode) == 0o600


def test_files_without_names_are_read_by_those_who_met(tmp_path: Path) -> None:
    places = Places(files(tmp_path), 0)
    other = Places(files(tmp_path), 1)
    other.meet()
    places.unlink()
    places.unlink()
    places.write(b"here")
    assert other.read(0) == b"here"
    assert [file.name for file in tmp_path.iterdir()] == ["1"]
    assert Places(files(tmp_path), 1).read(0) is None


def test_a_file_is_found_whole_or_not_at_all(tmp_path: Path) -> None:
    """Readers find a file complete even while it is being made, and a new run does not see the
    data of a killed run."""

    def make() -> None:
        for _ in range(300):
            Places(files(tmp_path), 0)
            files(tmp_path)[0].unlink()

    thread = threading.Thread(target=make)
    thread.start()
    while thread.is_alive():
        assert Places(files(tmp_path), 1).read(0) is None
    thread.join()
    Places(files(tmp_path), 0).write(b"killed")
    assert Places(files(tmp_path), 0).read(0) is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


def test_a_failure_is_looked_for_only_where_one_may_be(tmp_path: Path) -> None:
    places = Places(files(tmp_path), 0)
    assert places.may_have_failure()  # of the other, nothing is known
    other = Places(files(tmp_path), 1)
    places.meet()
    other.meet()
    places.unlink()
    other.unlink()
    places.write(b"x" * (2**15 - 8))
    places.write(b"x" * (2**15 - 8))
    assert not places.may_have_failure()
    assert not other.may_have_failure()
    other.mark_failure()
    assert places.may_have_failure()
    assert other.may_have_failure()


def write_for_ever(folder: Path) -> None:
    places = Places(files(folder), 0)
    count = 0
    while True:
        count += 1
        places.write(bytes(str(count), "ascii") * (1 + count % 2000))


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_texts(tmp_path: Path) -> None:
    """Each text repeats one number, so that a torn text can be recognized."""
    process = mp.get_context("spawn").Process(target=write_for_ever, args=(tmp_path,))
    process.start()
    try:
        other = Places(files(tmp_path), 1)
        texts = set[bytes]()
        while len(texts) < 200:
            text = other.read(0)
            if text is None:
                continue
            texts.add(text)
            assert is_whole(text)
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    last = other.read(0)
    assert last is not None
    assert is_whole(last)


def is_whole(text: bytes) -> bool:
    """Whether a text is a number n, 1 + n % 2000 times."""
    return any(
        text == text[:size] * (1 + int(text[:size]) % 2000)
        for size in range(1, 12)
        if len(text) % size == 0
    )
