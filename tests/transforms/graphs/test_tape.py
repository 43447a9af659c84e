"""The tape replays its recording, and deliberately has the hazards of a CUDA graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.backends import make_backend
from weft.transforms.graphs.backends.audit import Audit, Inputs
from weft.transforms.graphs.backends.tape import TapeBackend, TapeRecording

LAW = "a tape replays what it recorded"


def record(
    fn: Callable[..., Any], *buffers: Tensor, writable: tuple[Tensor, ...] = ()
) -> TapeRecording:
    """A tape of `fn` on buffers that it may read, and `writable` ones that it may also write."""
    labels = [
        *(f"own {i}" for i in range(len(writable))),
        *(f"buffer {i}" for i in range(len(buffers))),
    ]
    inputs = Inputs(
        (*writable, *buffers),
        lambda: labels,
        num_donated=len(writable),
        num_references=len(writable),
    )
    aliases = [x.detach() for x in writable]
    return TapeBackend().capture(lambda: fn(*buffers, *aliases), Audit("record(fn)", inputs))


def replays(fn: Callable[[Tensor], Any], shape: tuple[int, ...] = (2, 3)) -> None:
    """Three replays on new values in the buffer give the results of `fn` for these values."""
    values = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4)
    ]
    buffer = values[0].clone()
    recording = record(fn, buffer)
    assert_equal(f"{LAW}, at capture", recording.outputs, fn(values[0].clone()))
    for value in values[1:]:
        buffer.copy_(value)
        recording.replay()
        assert_equal(LAW, recording.outputs, fn(value.clone()))


def in_place(x: Tensor) -> Tensor:
    return x.clone().add_(1).mul_(x).clamp_(min=0).sub_(3.0)


def written_view(x: Tensor) -> Any:
    y = torch.zeros(2, 3)
    row = y[1]
    row.add_(x[0])
    y[:, ::2].mul_(2)
    y.t()[0] = 5.0
    return y, row


def indexed(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, torch.tensor([2, 0])] = x[:, 1:]
    return y.index_add_(0, torch.tensor([1]), x[:1])


def out_variant(x: Tensor) -> Any:
    y = torch.empty(2, 3)
    torch.mul(x, 2, out=y)
    values = torch.empty(2, 2)
    indices = torch.empty(2, 2, dtype=torch.int64)
    torch.topk(y, 2, out=(values, indices))
    return y, values, indices


def out_variant_resized(x: Tensor) -> Tensor:
    y = torch.empty(0)
    torch.add(x, 1, out=y)
    return y * 2


def foreach(x: Tensor) -> Any:
    pair = [x * 1, x * 2]
    torch._foreach_add_(pair, 1.0)
    return torch._foreach_mul(pair, 2.0)


def data_swap(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x * 2
    return y + 0


def transposed_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.t_()
    return y + 0


def transposed_in_place_after_a_view(x: Tensor) -> Any:
    y = x[:, :2] * 1
    row = y[0]
    y.t_()
    return y, row + 0


def unsqueezed_in_place(x: Tensor) -> Tensor:
    return (x * 1).unsqueeze_(0)


def squeezed_in_place(x: Tensor) -> Tensor:
    return (x[:1] * 1).squeeze_(0)


def resized_in_place(x: Tensor) -> Tensor:
    y = torch.zeros(2)
    y.resize_(2, 3)
    return y.copy_(x)


def returns_its_input(x: Tensor) -> Any:
    y = x * 2
    return y.contiguous(), y.to(torch.float32), y.reshape(2, 3), y.expand(2, 3), x


def functional_call(x: Tensor) -> Any:
    q = x[None, None]
    return torch.nn.functional.scaled_dot_product_attention(
        q, q, q
    ), torch.nn.functional.layer_norm(x, (3,))


def overwritten_input_of_an_earlier_op(x: Tensor) -> Any:
    y = x * 1
    z = y + 1
    y.zero_()
    return z, y


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "functional": lambda x: torch.softmax(x @ x.t(), -1),
    "in place": in_place,
    "written view": written_view,
    "indexed": indexed,
    "multiple outputs": lambda x: (*x.sort(), *x.max(1), *torch.linalg.qr(x), *x.split(1)),
    "out variant": out_variant,
    "out variant, resized": out_variant_resized,
    "foreach": foreach,
    "ops returning inputs": returns_its_input,
    "chunks of one result": lambda x: [c + 1 for c in (x * 2).chunk(3, 1)],
    "data swap": data_swap,
    "factories": lambda x: torch.arange(3) + torch.zeros(3).fill_(2) + torch.full((3,), 1.0) + x,
    "a constant": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "empty, then filled": lambda x: torch.empty(2, 3).copy_(x).add_(torch.empty_like(x).zero_()),
    "zero-size": lambda x: (x[:0] * 2, torch.cat([x[:0], x])),
    "dtype": lambda x: (x.double() * 2, x.to(torch.int32), x > 0),
    "broadcast": lambda x: (x * 2).sum(0, keepdim=True).expand(4, 3),
    "composite": functional_call,
    "overwritten input": overwritten_input_of_an_earlier_op,
    "complex": lambda x: torch.fft.fft(x).conj() * 2,
    "transposed in place": transposed_in_place,
    "transposed in place after a view": transposed_in_place_after_a_view,
    "unsqueezed in place": unsqueezed_in_place,
    "squeezed in place": squeezed_in_place,
    "resized in place": resized_in_place,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_is_the_function_on_what_the_buffers_hold_now(name: str) -> None:
    replays(FUNCTIONS[name])


def test_hazard_a_replay_overwrites_the_outputs_of_the_one_before() -> None:
    buffer = torch.ones(2)
    recording = record(lambda x: x * 3, buffer)
    outputs = recording.outputs
    buffer.fill_(2)
    recording.replay()
    assert recording.outputs is outputs
    assert outputs.tolist() == [6, 6]


def test_hazard_addresses_are_fixed() -> None:
    buffer = torch.ones(2)
    elsewhere = torch.full((2,), 9.0)
    recording = record(lambda x: (x + 1, x), buffer)
    places = [t.data_ptr() for t in recording.outputs]
    buffer = elsewhere  # a graph does not notice a rebound name
    recording.replay()
    assert recording.outputs[0].tolist() == [2, 2]
    assert [t.data_ptr() for t in recording.outputs] == places


def test_hazard_python_values_are_frozen() -> None:
    scale = [2.0]
    calls = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x * scale[0] if len(calls) <= 2 else x * 0

    recording = record(fn, torch.ones(2))
    scale[0] = 50.0
    recording.replay()
    assert recording.outputs.tolist() == [2, 2]
    assert len(calls) == 2  # the warm-up, and the capture


def test_hazard_in_place_ops_on_its_own_tensors_run_again() -> None:
    total = torch.zeros(2)
    recording = record(lambda s: s.add_(1), writable=(total,))
    assert total.tolist() == [2, 2]  # once by the warm-up, once by the capture
    for i in (3.0, 4.0):
        recording.replay()
        assert total.tolist() == [i, i]


def test_hazard_what_it_reads_from_outside_is_read_again() -> None:
    outside = torch.ones(2)
    recording = record(lambda x: x + outside, torch.zeros(2))
    outside.fill_(7)
    recording.replay()
    assert recording.outputs.tolist() == [7, 7]


def test_what_it_reads_from_outside_stays_alive() -> None:
    def recorded(value: float) -> TapeRecording:
        outside = torch.full((2,), value)
        return record(lambda x: x + outside, torch.zeros(2))

    recordings = [recorded(float(i)) for i in range(20)]  # freed memory would be reused
    for i, recording in enumerate(recordings):
        recording.replay()
        assert recording.outputs.tolist() == [i, i]


def test_a_buffer_overwritten_while_it_is_an_output_is_the_output() -> None:
    buffer = torch.ones(2)
    recording = record(lambda x: x, buffer)
    buffer.fill_(5)
    assert recording.outputs.tolist() == [5, 5]


def test_host_reads_are_refused_and_nothing_stays_open() -> None:
    with pytest.raises(CaptureError, match="record"):
        record(lambda x: x.sum().item(), torch.ones(2))
    assert torch.ones(2).sum().item() == 2.0


def test_autograd_does_not_record_a_replay() -> None:
    weight = torch.ones(2, requires_grad=True)
    recording = record(lambda x: x * weight, torch.ones(2))
    recording.replay()
    assert not recording.outputs.requires_grad


def test_two_tapes_do_not_touch_each_other() -> None:
    buffer = torch.ones(2)
    first = record(lambda x: x + 1, buffer)
    second = record(lambda x: x * 10, buffer)
    buffer.fill_(3)
    first.replay()
    assert (first.outputs.tolist(), second.outputs.tolist()) == ([4, 4], [10, 10])
    second.replay()
    assert (first.outputs.tolist(), second.outputs.tolist()) == ([4, 4], [30, 30])


def test_the_tape_is_the_choice_without_a_gpu_tensor() -> None:
    assert make_backend(None, [torch.ones(1)]).name == "tape"
    assert make_backend("tape", []).name == "tape"


def test_an_operator_that_writes_to_its_argument_and_does_not_say_so_is_replayed() -> None:
    library.define("weft_tests::tripled", "(Tensor x) -> Tensor")
    library.impl("weft_tests::tripled", "CPU", lambda x: x.mul_(3))
    library.register_fake("weft_tests::tripled", torch.empty_like)
    replays(lambda x: torch.ops.weft_tests.tripled(x * 2) + 1)
