"""pad, unpad, inert and write_padded, on weft's own batches and on batches of research code."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import IntermediateTensors, Output
from weft.batches.padding import inert, pad, padded_shape, unpad, write_padded
from weft.batches.state import State, resolve
from weft.errors import DescriptorError
from weft.proofs import assert_equal
from weft.values.trees import (
    Axes,
    axes,
    descriptor_field,
    find_descriptors,
    leaf_axes,
    pytree,
    static,
)

FAST = settings(deadline=None, max_examples=60)


@attrs.frozen
class Size:
    """An image's resolution, as research code would write it."""

    height: int
    width: int

    def covers(self, other: "Size") -> bool:
        return self.height >= other.height and self.width >= other.width


@pytree
@attrs.frozen(eq=False)
class Image:
    size: Size = attrs.field(metadata=descriptor_field())
    pixels: Tensor = attrs.field(metadata=axes(None, "height", "width", pad=-1))
    borders: Tensor = attrs.field(metadata=axes("height+2", None, pad=math.nan))
    mask: Tensor | None = attrs.field(metadata=axes("height", "width", pad=True))
    gain: Tensor = attrs.field()
    name: str = attrs.field(default="", metadata=static())


def image(height: int, width: int, masked: bool = True) -> Image:
    pixels = torch.arange(2 * height * width).view(2, height, width)
    mask = torch.zeros(height, width, dtype=torch.bool) if masked else None
    return Image(
        Size(height, width), pixels, torch.ones(height + 2, 3), mask, torch.tensor(2.0), "cat"
    )


SIDES = st.integers(0, 4)


@FAST
@given(SIDES, SIDES, SIDES, SIDES, st.booleans())
def test_two_padded_dimensions_and_back(
    h: int, w: int, more_h: int, more_w: int, masked: bool
) -> None:
    small = image(h, w, masked)
    size = Size(h + more_h, w + more_w)
    wide = pad(small, size)
    assert (wide.size, wide.name, wide.gain is small.gain) == (size, "cat", True)
    assert wide.pixels.shape == (2, *attrs.astuple(size))
    assert_equal("pad, then unpad", unpad(wide, small.size), small)
    outside = torch.ones(2, *attrs.astuple(size), dtype=torch.bool)
    outside[:, :h, :w] = False
    assert bool((wide.pixels[outside] == -1).all())
    assert bool(wide.borders[h + 2 :].isnan().all())
    assert wide.borders.shape == (size.height + 2, 3)
    assert (wide.mask is None) == (not masked)
    assert not masked or bool((wide.mask == outside[0]).all())


@FAST
@given(SIDES, SIDES, SIDES, SIDES)
def test_an_image_under_a_size_that_does_not_cover_it_is_refused(
    h: int, w: int, to_h: int, to_w: int
) -> None:
    if Size(to_h, to_w).covers(Size(h, w)):
        return
    with pytest.raises(DescriptorError) as error:
        pad(image(h, w), Size(to_h, to_w))
    assert error.value.call.endswith(f", {Size(to_h, to_w)})")
    assert error.value.problem == f"the batch is {Size(h, w)}, which that descriptor does not cover"
    assert error.value.instead == "pad to a descriptor d with d.covers(batch.descriptor)"


def ragged() -> Batch:
    return Batch.ragged([2, 0], [[5, 6, 7], [8]], samples=[False, True])


def test_padding_of_a_batch_names_nobody() -> None:
    wide = pad(ragged(), BatchDescriptor(6, 4))
    assert wide.descriptor == BatchDescriptor(6, 4)
    assert wide.rows.tolist() == [2, 0, -1, -1]
    assert wide.input_ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert wide.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    assert wide.samples.tolist() == [False, True, False, False]
    assert [t.dtype for t in (wide.query_start_loc, wide.samples)] == [torch.int32, torch.bool]


def test_least_surprise() -> None:
    """The input is not written; fields that fit are passed on without a copy, and so are fields
    without a size."""
    batch = ragged()
    same = pad(batch, batch.descriptor)
    assert all(
        getattr(same, f) is getattr(batch, f)
        for f in ("rows", "input_ids", "query_start_loc", "samples")
    )
    before = attrs.asdict(batch)
    pad(batch, BatchDescriptor(9, 9)).input_ids.fill_(1)
    assert_equal("the input is not written", attrs.asdict(batch), before)
    tree = {"batch": batch, "x": torch.ones(2), "n": 3, "none": None}
    assert pad(tree, BatchDescriptor(9, 9))["x"] is tree["x"]
    with pytest.raises(DescriptorError, match="nothing in it that says"):
        pad(tree["x"], BatchDescriptor(9, 9))


def test_unpad_gives_views_and_unpads_outputs_too() -> None:
    out = Output(torch.arange(4), torch.arange(4.0))
    cut = unpad(out, BatchDescriptor.uniform(3))
    cut.token_ids[0] = 9
    assert (out.token_ids[0].item(), cut.token_ids.tolist(), cut.logits) == (9, [9, 1, 2], None)
    assert unpad(out, BatchDescriptor.uniform(4)).token_ids is out.token_ids
    assert unpad(
        IntermediateTensors(torch.ones(5, 8)), BatchDescriptor(3, 1)
    ).hidden_states.shape == (3, 8)


def test_padding_twice_is_padding_once() -> None:
    once, twice = (
        pad(b, BatchDescriptor(8, 6)) for b in (ragged(), pad(ragged(), BatchDescriptor(5, 3)))
    )
    assert_equal("padding twice is padding once", twice, once)


@pytest.mark.parametrize(
    "target", [BatchDescriptor(3, 2), BatchDescriptor(4, 1), BatchDescriptor.uniform(4)]
)
def test_a_class_that_does_not_cover_is_refused_alone_and_in_a_tree(
    target: BatchDescriptor,
) -> None:
    for tree in (ragged(), [ragged()], {"deep": (1, ragged())}):
        with pytest.raises(DescriptorError) as error:
            pad(tree, target)
        assert error.value.call.endswith(f", {target})")
        assert (
            error.value.problem
            == "the batch is ragged 4 tokens, 2 reqs, which that descriptor does not cover"
        )
        assert error.value.instead == "pad to a descriptor d with d.covers(batch.descriptor)"


def test_a_tensor_that_is_larger_than_the_class_is_refused() -> None:
    with pytest.raises(DescriptorError) as error:
        pad(IntermediateTensors(torch.ones(5, 8)), BatchDescriptor(4, 1))
    assert str(error.value) == (
        "weft.pad(IntermediateTensors, ragged 4 tokens, 1 reqs)\n"
        "  saw: a tensor of shape (5, 8), larger than that descriptor\n"
        "  instead: pad to one that covers the batch"
    )


def test_unpad_to_more_than_there_is_is_refused() -> None:
    with pytest.raises(DescriptorError) as error:
        unpad(IntermediateTensors(torch.ones(5, 8)), BatchDescriptor(6, 1))
    assert str(error.value) == (
        "weft.unpad(..., ragged 6 tokens, 1 reqs)\n"
        "  saw: a tensor of shape (5, 8) where that descriptor has (6, 8)\n"
        "  instead: unpad to the descriptor that the batch had before it was padded"
    )


PADS = st.sampled_from((0, -1, 7.0, math.nan, "last"))


@FAST
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), PADS)
def test_write_padded_leaves_nothing_of_what_was_there(
    h: int, w: int, more: int, wider: int, fill: Any
) -> None:
    value = torch.rand(h, w)
    target = torch.full((h + more, w + wider), 1e9)
    write_padded(target, value, Axes(("height", "width"), fill))
    assert not bool((target == 1e9).any())
    assert torch.equal(target[:h, :w], value)


def test_write_padded_is_what_pad_does_whatever_was_there() -> None:
    spec = Axes(("num_reqs",), -1)
    value = torch.tensor([4, 5])
    target = torch.full((4,), 99)
    write_padded(target, torch.tensor([1, 2, 3, 4]), spec)
    write_padded(target, value, spec)
    assert target.tolist() == [4, 5, -1, -1]
    write_padded(target, value[:0], spec)
    assert target.tolist() == [-1] * 4


@pytree
@attrs.frozen(eq=False)
class Vectors:
    x: Tensor = attrs.field(metadata=axes("num_reqs", None, pad="last"))


def test_pad_last_repeats_the_last_entry_along_the_dimension() -> None:
    wide = pad(Vectors(torch.tensor([[1, 2], [3, 4]])), BatchDescriptor(9, 4))
    assert wide.x.tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
    assert pad(Vectors(torch.ones(0, 2)), BatchDescriptor(9, 2)).x.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "fill", [2**53 + 1, torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min]
)
def test_an_integer_padding_is_not_rounded(fill: int) -> None:
    target = torch.zeros(3, dtype=torch.int64)
    write_padded(target, torch.tensor([1]), Axes(("num_reqs",), fill))
    assert target.tolist() == [1, fill, fill]


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        (torch.uint8, -1),
        (torch.int8, 300),
        (torch.int64, 1.5),
        (torch.int32, math.nan),
        (torch.int32, math.inf),
        (torch.int32, 1j),
        (torch.bool, -1),
    ],
)
def test_a_padding_that_the_dtype_does_not_hold_is_refused(dtype: torch.dtype, fill: float) -> None:
    @pytree
    @attrs.frozen(eq=False)
    class Marked:
        x: Tensor = attrs.field(metadata=axes("num_reqs", pad=fill))

    short = Marked(torch.zeros(2, dtype=dtype))
    for padded in (pad, inert):
        with pytest.raises(DescriptorError) as error:
            padded(short, BatchDescriptor(9, 4))
        assert error.value.call == f"weft.axes('num_reqs', pad={fill!r})"
        assert error.value.problem == f"a tensor of {dtype}, which does not hold that padding"
    # Nothing is padded here.
    assert pad(short, BatchDescriptor(9, 2)).x is short.x


@pytest.mark.parametrize("fill", ["first", None, (1,)])
def test_a_padding_that_is_no_number_is_refused(fill: Any) -> None:
    with pytest.raises(DescriptorError, match="a padding that is"):
        axes("num_reqs", pad=fill)


@pytree
@attrs.frozen(eq=False)
class Prompted:
    """A sized value that contains another one."""

    x: Tensor = attrs.field(metadata=axes("num_tokens"))
    batch: Batch = attrs.field()


def test_a_sized_value_within_another_is_padded_and_unpadded_too() -> None:
    both = Prompted(torch.ones(4), ragged())
    wide = pad(both, BatchDescriptor(6, 4))
    assert wide.x.shape == (6,)
    assert_equal("within another", wide.batch, pad(ragged(), BatchDescriptor(6, 4)))
    assert_equal("within another", unpad(wide, BatchDescriptor(4, 2)), both)
    assert sum(spec is not None for spec in leaf_axes(both)) == 5
    assert find_descriptors(both) == [BatchDescriptor(4, 2)]


@FAST
@given(st.integers(0, 4), st.integers(0, 9))
def test_inert_is_all_padding_and_reads_no_value(reqs: int, more: int) -> None:
    batch = Batch.decode(range(reqs))
    target = BatchDescriptor(reqs + more, reqs)
    blank = inert(batch, target)
    assert blank.descriptor == target
    assert blank.rows.tolist() == [-1] * reqs
    assert blank.query_start_loc.tolist() == [0] * (reqs + 1)
    assert blank.input_ids.shape == (reqs + more,)
    assert not blank.samples.any()
    assert_equal("inert of a padded batch", inert(pad(batch, target), target), blank)


def test_inert_belongs_to_nobody_in_any_state() -> None:
    state = State.zeros(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        max_num_reqs=2,
        num_pages=2,
        max_pages=1,
        page_size=2,
    )
    state.positions.fill_(1)
    resolved = resolve(state, inert(Batch.decode([0, 1]), BatchDescriptor(5, 3)))
    assert resolved.slot_mapping.tolist() == [-1] * 5
    assert resolved.seq_lens.tolist() == [0] * 3


def test_inert_of_an_image_may_be_smaller_or_larger() -> None:
    for size in (Size(1, 1), Size(9, 2)):
        blank = inert(image(3, 3), size)
        assert blank.pixels.tolist() == torch.full((2, *attrs.astuple(size)), -1).tolist()
        assert bool(blank.borders.isnan().all())


def test_padded_shape() -> None:
    spec = Axes((None, "height+2"), 0)
    assert padded_shape(torch.ones(3, 4, 5), spec, Size(7, 8)) == (3, 9, 5)
    assert padded_shape(torch.ones(3), spec, Size(7, 8)) == (3,)
    with pytest.raises(DescriptorError, match="depth"):
        padded_shape(torch.ones(3), Axes(("depth",), 0), Size(7, 8))
