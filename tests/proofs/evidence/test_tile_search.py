"""The search for tiles: what it times and in which order, with a timer of the test's own."""

import itertools
import lzma
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from weft.ops.tiles.tile import Tile
from weft.proofs.evidence.bench.tiles import experts, search
from weft.proofs.evidence.bench.tiles.shapes import COUNTS, HELD_OUT, TRAINING, shapes
from weft.proofs.evidence.bench.tiles.timing import Choice, Compiled, Product, kind_of

PRODUCT = Product("linear", 64, 4096, 4096)


class Slow:
    """Seconds by a tile's rows and stages; counts its calls. torch takes ten times as long, and
    cublaslt is missing."""

    def __init__(self) -> None:
        self.num_calls: dict[Choice, int] = {}

    def start(self, product: Product, choice: Choice) -> Callable[[], float] | None:
        if choice == "cublaslt":
            return None
        scale = product.columns / 4096
        seconds = (
            1e-3
            if isinstance(choice, str)
            else choice.rows * choice.parts * scale * 1e-6 + choice.stages * 1e-8
        )

        def replay() -> float:
            self.num_calls[choice] = self.num_calls.get(choice, 0) + 1
            return seconds

        return replay


def test_hopeless_choices_are_timed_once_and_the_best_again() -> None:
    timer = Slow()
    measurement = search.measure(PRODUCT, timer)
    best = min(measurement.seconds, key=measurement.seconds.__getitem__)
    assert isinstance(best, Tile)
    assert (best.rows, best.stages) == (64, 3)
    assert measurement.again[best] == measurement.seconds[best]
    assert timer.num_calls[best] == 4
    assert {
        timer.num_calls[one]
        for one in measurement.seconds
        if measurement.seconds[one] > 1.4 * measurement.seconds["torch"]
    } <= {1}
    assert "cublaslt" not in measurement.seconds
    assert len(measurement.seconds) == len(search.choices(PRODUCT)) - 1


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    measurements = [search.measure(PRODUCT, Slow())]
    path = tmp_path / "out" / "tile_search.json.xz"
    tile = next(choice for choice in measurements[0].seconds if isinstance(choice, Tile))
    compiled = {
        kind_of(PRODUCT, tile): Compiled(40, 0, 1024, 0.001),
        kind_of(PRODUCT, Tile(64, 16, 64, 4, 9)): "too big",
    }
    kernels = search.kernels_as_json(compiled)
    search.write(path, search.as_json(measurements, {"seconds": 1.0, "kernels": kernels}))
    (again,), record = search.read(path)
    assert again.product == PRODUCT
    assert again.seconds == pytest.approx(measurements[0].seconds)
    assert list(again.again) == list(measurements[0].again)
    assert [row[-1] for row in record["kernels"]] == [[40, 0, 1024, 0.001], "too big"]
    assert lzma.decompress(path.read_bytes()).startswith(b'{"seconds"')


def test_time_that_is_over_ends_the_search() -> None:
    assert list(search.search([PRODUCT], Slow(), time.time() - 1)) == []
    assert len(list(search.search([PRODUCT], Slow(), time.time() + 99))) == 1


def test_all_shapes_have_a_number_of_tokens_before_any_has_the_next() -> None:
    work = search.products()
    assert len(work) == len(set(work))
    tokens = [product.tokens for product in work]
    assert len(list(dict.fromkeys(tokens))) == 1 + sum(
        a != b for a, b in itertools.pairwise(tokens)
    )
    for kind in ("linear", "fp8_linear"):
        assert {(1, 6144, 4096), (2048, 6144, 4096)} <= {
            (one.tokens, one.rows, one.columns) for one in work if one.kind == kind
        }


def test_held_out_shapes_are_many_and_none_is_trained_on() -> None:
    eval_shapes = {*shapes(HELD_OUT)} - {*shapes(TRAINING)}
    assert len(eval_shapes) >= 30
    assert len(shapes(TRAINING)) >= 40
    assert {(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)} <= {*shapes(TRAINING)}


@pytest.mark.parametrize("options", [[], ["--experts"]])
def test_dry(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--dry", *options])
    counted, estimated = capsys.readouterr().out.splitlines()
    assert int(counted.split()[0]) > 400
    assert float(estimated.split()[2]) < 420


def test_candidates_of_experts_are_neither_empty_nor_too_small() -> None:
    for product in experts.products(COUNTS):
        tiles = experts.choices(product)
        pairs = product.tokens * product.top_k
        assert len(tiles) == len(set(tiles)) >= 4
        for tile in tiles:
            assert tile.sort or pairs <= 128
            assert tile.columns == 128 or not product.fp8
            assert (tile.rows + tile.tokens) * tile.columns * (
                1 if product.fp8 else 2
            ) * tile.stages <= 227 * 2**10
    measurement = search.measure(product, Slow())
    assert search.as_json([measurement], {})["products"][0][:7] == [*attrs.astuple(product)]
