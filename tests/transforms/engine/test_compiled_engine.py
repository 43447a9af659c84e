"""`Engine(..., compiler=...)`: its tokens are those of an engine that compiles nothing, and what
cannot be compiled is refused."""

from typing import Any

import pytest

from weft.errors import CompilerError
from weft.proofs._strategies.engine.engines import small_model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits

LIMITS = EngineLimits(
    max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=16
)
PROMPTS = ([1, 2, 3], [4], [2, 7])


def tokens(engine: Engine) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, max_tokens=5, id=str(index))
    tracks = {output.id: output.track for output in engine}
    return [tracks[str(index)].token_ids for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("compiler", "num_stages"),
    [
        ("aot_eager", 1),
        pytest.param("aot_eager", 2, marks=pytest.mark.slow),
        pytest.param("inductor", 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_change(compiler: str, num_stages: int) -> None:
    engine = Engine(
        small_model(), LIMITS, graph="full", pipeline=num_stages, compiler=compiler, strict=True
    )
    assert tokens(engine) == tokens(Engine(small_model(), LIMITS, graph="none"))
    assert engine.stats().captures > 0
    every = [one.compiled for graph in engine.graphs for one in graph.graphs().graphs]
    assert all(text.startswith(compiler) for text in every)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown one": ({"compiler": "inductr"}, "compiler='inductr', which is no compiler"),
    "no graphs": ({"compiler": "inductor", "graph": "none"}, "graph='none', which has no graphs"),
    "sums that keep their order": (
        {"compiler": "inductor", "batch_invariant": True},
        "a batch-invariant model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_compiled_is_refused(case: str) -> None:
    options, problem = REFUSED[case]
    options = dict(options)
    model = small_model().with_stages(batch_invariant=bool(options.pop("batch_invariant", False)))
    with pytest.raises(CompilerError, match=problem):
        Engine(model, LIMITS, **options)
    with pytest.raises(CompilerError, match=problem):
        generate(model, PROMPTS, max_tokens=1, **options)
