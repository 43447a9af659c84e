"""Effects, schemas and programs print and parse back; any other text is refused with an error that
quotes it."""

import string
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusal import refused

from weft.batches.batch import Batch
from weft.batches.outputs import IntermediateTensors, Output
from weft.effects import (
    Broadcast,
    Fence,
    Program,
    Recv,
    Run,
    Send,
    listing,
    parse_effect,
    parse_listing,
)
from weft.errors import ProgramError
from weft.transforms.pipelines.schedule import streaming
from weft.values.schema import Schema, TensorSchema

FAST = settings(deadline=None, max_examples=80)
DTYPES = st.sampled_from(
    (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
)
NAMES = st.one_of(
    st.text(string.ascii_letters + string.digits + "_.", max_size=8),
    st.sampled_from(("['w']", "[0]['a, b']", "layers[3].k", "['x']['y']", "")),
)
AXES = st.sampled_from(("num_tokens", "num_reqs", "num_reqs+1"))
TENSORS = st.builds(
    TensorSchema, NAMES, st.lists(AXES | st.integers(0, 4096), max_size=4).map(tuple), DTYPES
)
SCHEMAS = st.lists(TENSORS, min_size=1, max_size=3).map(lambda ts: Schema(tuple(ts)))
RANKS, MICROBATCHES = st.integers(0, 300), st.integers(0, 300)
WHATS = st.sampled_from(("advance", "stage 0", "stage 17", "a [mb 3] of sorts", "send to 1"))
EFFECTS = st.one_of(
    st.builds(Run, WHATS, MICROBATCHES),
    st.builds(Send, RANKS, MICROBATCHES, st.none() | SCHEMAS),
    st.builds(Recv, RANKS, MICROBATCHES, st.none() | SCHEMAS),
    st.builds(Broadcast, RANKS, MICROBATCHES, st.none() | SCHEMAS),
    st.builds(Fence, MICROBATCHES),
)
CLASSES = st.lists(
    st.sampled_from(("uniform x1, 3 reqs", "h[num_tokens, 4] float32")), max_size=2
).map(tuple)
PROGRAMS = st.builds(Program, RANKS, RANKS, st.lists(EFFECTS, max_size=5).map(tuple), CLASSES)


@FAST
@given(TENSORS)
def test_tensor_schemas_parse_back(tensor: TensorSchema) -> None:
    assert TensorSchema.parse(str(tensor)) == tensor


@FAST
@given(SCHEMAS)
def test_schemas_parse_back(schema: Schema) -> None:
    assert Schema.parse(str(schema)) == schema


@FAST
@given(EFFECTS)
def test_effects_parse_back(effect: Any) -> None:
    assert parse_effect(str(effect)) == effect
    assert parse_effect(f"   {effect}\n") == effect


@FAST
@given(PROGRAMS)
def test_programs_parse_back(program: Program) -> None:
    assert parse_listing(str(program)) == (program,)
    assert parse_listing(f"\n{program}\n\n") == (program,)


@FAST
@given(EFFECTS, EFFECTS)
def test_different_effects_print_differently(a: Any, b: Any) -> None:
    assert (str(a) == str(b)) == (a == b)


def test_a_schema_of_no_tensor_parses_back() -> None:
    """The schema of a stage that sends only None."""
    nothing = Schema.of(None)
    assert parse_effect(str(Send(1, 0, nothing))) == Send(1, 0, nothing)


def test_text() -> None:
    schema = Schema(
        (TensorSchema("h", ("num_tokens", 64), torch.float32), TensorSchema("", (), torch.int64))
    )
    assert str(Send(1, 0, schema)) == "send to 1 [mb 0]: h[num_tokens, 64] float32, [] int64"
    program = Program(0, 2, (Run("stage 0", 0), Recv(3, 1), Broadcast(1, 0)))
    assert (
        str(program)
        == "rank 0 of 2\n  run stage 0 [mb 0]\n  recv from 3 [mb 1]\n  broadcast from 1 [mb 0]"
    )
    assert listing([program, Program(1, 2, ())]) == f"{program}\nrank 1 of 2"


VALUES = [
    (torch.ones(2, 3), "[2, 3] float32"),
    (torch.tensor(1), "[] int64"),
    (
        {"a": [torch.ones(1)], "b": (torch.ones(2), None, 3)},
        "['a'][0][1] float32, ['b'][0][2] float32",
    ),
    (IntermediateTensors(torch.ones(5, 8)), "hidden_states[num_tokens, 8] float32"),
    (
        Output(torch.ones(2), torch.ones(2), torch.ones(2, 9)),
        "token_ids[num_reqs] float32, logprobs[num_reqs] float32, logits[num_reqs, 9] float32",
    ),
    ([IntermediateTensors(torch.ones(5, 8).half())], "[0].hidden_states[num_tokens, 8] float16"),
    (
        Batch.decode([0]),
        (
            "rows[num_reqs] int64, input_ids[num_tokens] int64, query_start_loc[num_reqs+1] int32, "
            "samples[num_reqs] bool"
        ),
    ),
]


@pytest.mark.parametrize(("value", "text"), VALUES)
def test_the_schema_of_a_value(value: Any, text: str) -> None:
    assert str(Schema.of(value)) == text
    assert Schema.parse(text) == Schema.of(value)


def test_the_schema_of_a_sized_value_is_that_of_its_class_and_not_of_its_size() -> None:
    assert Schema.of(IntermediateTensors(torch.ones(5, 8))) == Schema.of(
        IntermediateTensors(torch.ones(6, 8))
    )
    assert Schema.of(IntermediateTensors(torch.ones(5, 8))) != Schema.of(
        IntermediateTensors(torch.ones(5, 9))
    )


NO_EFFECT = [
    "",
    "run",
    "run stage 0",
    "run stage 0 [mb x]",
    "run stage 0 [mb -1]",
    "jump to 1 [mb 0]",
    "send to 1",
    "send to one [mb 0]",
    "send from 1 [mb 0]",
    "recv to 1 [mb 0]",
    "Send to 1 [mb 0]",
    "broadcast from 1",
    "send to 1 [mb 0] h[2] float32",
    "send to 1 [mb 0]\nsend to 1 [mb 1]",
]


@pytest.mark.parametrize("line", NO_EFFECT)
def test_lines_that_are_no_effect(line: str) -> None:
    with pytest.raises(ProgramError) as error:
        parse_effect(line)
    assert (
        str(error.value)
        == f"parse_effect({line!r})\n  saw: no effect\n  instead: run|send to|recv from|broadcast"
        " from|fence|all_reduce ... [mb N], and a schema only where something is sent"
    )


@pytest.mark.parametrize("line", ["run stage 0 [mb 0]: h[2] float32", "fence [mb 0]: h[2] float32"])
def test_a_schema_on_an_effect_that_has_none_is_not_dropped(line: str) -> None:
    with pytest.raises(ProgramError):
        parse_effect(line)


NO_SCHEMA = [
    "",
    "h",
    "h[2]",
    "h[2] float31",
    "h[2] Tensor",
    "h[2 float32",
    "h2] float32",
    "h[2] float32 float32",
    "h[²] float32",
    "h[num tokens] nn",
]


@pytest.mark.parametrize("text", NO_SCHEMA)
def test_texts_that_are_no_tensors_schema(text: str) -> None:
    with pytest.raises(ProgramError) as error:
        TensorSchema.parse(text)
    assert (
        str(error.value)
        == f"TensorSchema.parse({text!r})\n  saw: no tensor's schema\n  instead: name[num_tokens,"
        " 64] float32"
    )


def test_the_part_of_a_schema_that_is_none_is_named() -> None:
    with pytest.raises(ProgramError, match=r"TensorSchema\.parse\('k\[3\] int65'\)"):
        parse_effect("send to 1 [mb 0]: h[2, 4] float32, k[3] int65")


@pytest.mark.parametrize(
    "text", ["run stage 0 [mb 0]", "rank 0", "rank 0 of 2 of 3", "rank -1 of 2"]
)
def test_texts_that_are_no_program(text: str) -> None:
    with pytest.raises(ProgramError) as error:
        parse_listing(text)
    assert error.value.call == "parse_listing(...)"
    assert error.value.instead == "rank R of N"


@pytest.mark.parametrize("numbers", [[1], [0, 0], [0, 2], [1, 0]])
def test_classes_out_of_order_are_named(numbers: list[int]) -> None:
    classes = "".join(f"\n  mb {number}: uniform x1, 3 reqs" for number in numbers)
    problem = "classes of micro-batches out of order"
    with refused(ProgramError, "parse_listing(...)", problem, "mb 0: ..., mb 1: ..."):
        parse_listing(f"rank 0 of 1{classes}\n  run stage 0 [mb 0]")


def test_a_bad_line_of_a_program_is_named() -> None:
    with pytest.raises(ProgramError, match=r"parse_effect\('  jump \[mb 0\]'\)"):
        parse_listing("rank 0 of 1\n  run stage 0 [mb 0]\n  jump [mb 0]")


def test_listings_parse_back_after_an_edit_by_hand() -> None:
    programs = streaming(3, 2, feedback=True)
    assert parse_listing(listing(programs)) == programs
    assert parse_listing("\n" + listing(programs).replace("\n  ", "\n\n      ") + "\n") == programs
    edited = parse_listing(listing(programs).replace("  send to 1 [mb 0]\n", "", 1))
    assert [len(a.effects) - len(b.effects) for a, b in zip(programs, edited, strict=True)] == [
        1,
        0,
        0,
    ]
    assert parse_listing("") == parse_listing(" \n") == ()


def test_what_is_no_listing() -> None:
    with pytest.raises(ProgramError, match=r"a first line '  run stage 0 \[mb 0\]'"):
        parse_listing("  run stage 0 [mb 0]\nrank 0 of 1")
