"""Sampling: the generator against an independent implementation, and the edges of `sample`.

`test_sample_distribution.py` has the distributions.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from interpreting import interpret
from torch import Tensor, library

from weft.ops.backends import backends
from weft.ops.sampling.sample import sample
from weft.ops.sampling.splitmix import _mix, exponential, random_bits
from weft.transforms.graphs.graphify import graphify

FAST = settings(deadline=None, max_examples=60)
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def finalised(z: int) -> int:
    """SplitMix64's output function on Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(seed: int, count: int) -> list[int]:
    """The generator, after the public-domain C code of Vigna (prng.di.unimi.it/splitmix64.c)."""
    return [finalised((seed + (i + 1) * GOLDEN) & MASK) for i in range(count)]


def unsigned(x: Tensor) -> list[int]:
    return [v & MASK for v in x.tolist()]


def signed(v: int) -> int:
    return v - (1 << 64) if v >> 63 else v


PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_the_published_outputs_for_seed_1234567() -> None:
    assert splitmix64(1234567, 5) == PUBLISHED
    states = torch.tensor([signed((1234567 + (i + 1) * GOLDEN) & MASK) for i in range(5)])
    assert unsigned(_mix(states)) == PUBLISHED


@FAST
@given(st.lists(INT64, min_size=1, max_size=20))
def test_mix_is_the_output_function(values: list[int]) -> None:
    assert unsigned(_mix(torch.tensor(values))) == [finalised(v & MASK) for v in values]


@FAST
@given(INT64, st.integers(0, 1 << 40), st.integers(1, 6))
def test_random_bits_are_a_splitmix64_stream_a_request(
    seed: int, position: int, count: int
) -> None:
    stream = finalised((finalised((seed + GOLDEN) & MASK) + position * GOLDEN) & MASK)
    (row,) = random_bits(torch.tensor([seed]), torch.tensor([position]), count)
    assert unsigned(row) == splitmix64(stream, count)


@FAST
@given(st.lists(st.tuples(INT64, st.integers(0, 99)), min_size=1, max_size=5, unique=True))
def test_a_request_draws_its_own_numbers_in_any_batch(pairs: list[tuple[int, int]]) -> None:
    seeds = torch.tensor([p[0] for p in pairs])
    positions = torch.tensor([p[1] for p in pairs])
    together = random_bits(seeds, positions, 4)
    for i in range(len(pairs)):
        assert torch.equal(random_bits(seeds[i : i + 1], positions[i : i + 1], 4)[0], together[i])
    assert len({tuple(row) for row in together.tolist()}) == len(pairs)


def test_neighbouring_seeds_and_positions_do_not_share_a_stream() -> None:
    """Seed s at position p + 1 must not be seed s + 1 at position p, nor its numbers shifted by
    one."""
    grid = [(s, p) for s in range(16) for p in range(16)]
    bits = random_bits(torch.tensor([s for s, _ in grid]), torch.tensor([p for _, p in grid]), 32)
    assert bits.unique().numel() == bits.numel()


def test_exponentials_have_mean_and_variance_one() -> None:
    draws = exponential(
        random_bits(torch.arange(64), torch.zeros(64, dtype=torch.int64), 4096)
    ).double()
    count = draws.numel()
    # Standard errors: of the mean 1 / sqrt(n), of the variance sqrt(8 / n).
    assert abs(draws.mean().item() - 1) < 5 / math.sqrt(count)
    assert abs(draws.var().item() - 1) < 5 * math.sqrt(8 / count)


def test_exponentials_are_finite_positive_and_ordered_at_the_ends() -> None:
    ends = torch.tensor([0, 1 << 11, 1 << 40, (1 << 62), (1 << 63) - 1, -(1 << 63), -1])
    draws = exponential(ends)
    assert draws.dtype == torch.float32
    assert bool(draws.isfinite().all())
    assert bool((draws > 0).all())
    assert draws.tolist() == sorted(draws.tolist())
    assert draws[0].item() == pytest.approx(0.5 * 2.0**-53, rel=1e-6)
    assert draws[3].item() == pytest.approx(-math.log1p(-0.25), rel=1e-6)


LOGITS = torch.tensor(
    [[0.0, 3.0, -1.0, 2.5], [2.0, 2.0, 2.0, 2.0], [-math.inf, 0.0, -math.inf, -math.inf]]
)


def drawn(temperature: float, logits: Tensor = LOGITS, seed: int = 0) -> tuple[list[int], Tensor]:
    n = logits.shape[0]
    ids, logprobs = sample(
        logits, torch.full((n,), temperature), torch.arange(n) + seed, torch.arange(n) * 3
    )
    return ids.tolist(), logprobs


def test_greedy_is_the_arg_max_whatever_the_seed() -> None:
    for seed in range(5):
        assert drawn(0.0, seed=seed)[0] == LOGITS.argmax(-1).tolist() == [1, 0, 1]


def test_of_greedy_ties_the_first_and_always_the_same() -> None:
    tied = torch.zeros(3, 301)
    tied[1, [7, 200]] = 5.0
    assert drawn(0.0, tied)[0] == [0, 7, 0]
    assert drawn(0.0, tied[:, :-1])[0] == [0, 7, 0]


def test_logprobs_are_the_models_at_temperature_one() -> None:
    for temperature in (0.0, 0.3, 4.0):
        ids, logprobs = drawn(temperature)
        expected = LOGITS.log_softmax(-1)[torch.arange(3), torch.tensor(ids)]
        assert torch.equal(logprobs, expected)
        assert bool(logprobs.isfinite().all())


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((256, 5), -math.inf)
    logits[:, [1, 3]] = 0.0
    assert set(drawn(50.0, logits)[0]) == {1, 3}


def test_a_small_temperature_is_nearly_greedy_and_a_large_one_nearly_uniform() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(300, 1)
    assert set(drawn(1e-3, logits)[0]) == {2}
    counts = torch.bincount(torch.tensor(drawn(1e6, logits)[0]), minlength=3)
    assert bool((counts > 60).all())


def test_equal_pairs_draw_equal_noise_and_others_do_not() -> None:
    logits = torch.zeros(6, 1000)
    seeds = torch.tensor([1, 1, 1, 2, 2, 1])
    positions = torch.tensor([5, 5, 6, 5, 6, 5])
    ids, _ = sample(logits, torch.ones(6), seeds, positions)
    assert ids[0] == ids[1] == ids[5]
    assert len(set(ids.tolist())) == 4
    assert torch.equal(ids, sample(logits, torch.ones(6), seeds, positions)[0])


def test_no_global_generator_is_read_or_moved() -> None:
    torch.manual_seed(0)
    first = drawn(1.0)[0]
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert drawn(1.0)[0] == first
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_different_temperatures_do_not_meet() -> None:
    """Greedy, sampled and padding (NaN) rows in one batch: each as if alone."""
    temperature = torch.tensor([0.0, 1.0, math.nan])
    seeds = torch.tensor([4, 5, 6])
    positions = torch.tensor([7, 8, 9])
    ids, logprobs = sample(LOGITS, temperature, seeds, positions)
    for i in range(2):
        alone = slice(i, i + 1)
        one, logprob = sample(LOGITS[alone], temperature[alone], seeds[alone], positions[alone])
        assert (one.item(), logprob.item()) == (ids[i].item(), logprobs[i].item())
    assert 0 <= int(ids[2]) < LOGITS.shape[1]


def test_a_permutation_of_the_requests_permutes_the_tokens() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(5) * 7
    positions = torch.arange(5)
    order = torch.tensor([3, 0, 4, 1, 2])
    ids, _ = sample(logits, torch.ones(5), seeds, positions)
    permuted, _ = sample(logits[order], torch.ones(5), seeds[order], positions[order])
    assert torch.equal(permuted, ids[order])


def test_captured_it_draws_anew_for_each_position() -> None:
    g = graphify(sample)
    logits = torch.zeros(1, 100)
    drawn_by_graph = []
    for position in range(8):
        where = torch.tensor([position])
        ids, _ = g(logits, torch.ones(1), torch.tensor([3]), where)
        assert torch.equal(ids, sample(logits, torch.ones(1), torch.tensor([3]), where)[0])
        drawn_by_graph.append(ids.item())
    assert len(set(drawn_by_graph)) > 5
    assert g.cache_info().captures == 1


# The operator and its kernel
# ------------------------------------------------------------------------------------------

_INTERPRETED = """
import sys, torch
from weft.ops.sampling.sample_triton import draw
torch.save([draw(*case) for case in torch.load(sys.argv[1])], sys.argv[2])
"""


def _cases() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    cases = []
    for rows, vocab in ((1, 1), (3, 7), (5, 2048), (2, 2049), (9, 5000), (0, 5)):
        logits = torch.randn(rows, vocab, generator=generator) * 4
        temperature = torch.tensor([0.0, 1.0, 0.3, 2.5, 1e-6, 1.0, 1.0, 0.01, 0.9])[:rows].clone()
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        cases.append((logits, temperature, seeds, torch.arange(rows)))
    barred = torch.full((4, 3000), -torch.inf)
    barred[torch.arange(4), torch.tensor([0, 2999, 2047, 2048])] = torch.tensor(
        [-3.0, 1e4, 0.0, -1e4]
    )
    cases.append((barred, torch.tensor([1.0, 0.0, 0.5, 1.0]), torch.arange(4), torch.arange(4)))
    half = torch.randn(3, 300, generator=generator).half()
    cases.append((half, torch.tensor([1.0, 0.0, 0.5]), torch.arange(3), torch.arange(3)))
    cases.append(
        (
            torch.randn(3, 3000, generator=generator).t()[:5],
            torch.ones(5),
            torch.arange(5),
            torch.arange(5),
        )
    )
    many = torch.randn(1, 40, generator=generator).expand(300, 40).contiguous()
    cases.append((many, torch.ones(300), torch.arange(300), torch.arange(300) % 7))
    return cases


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Each case with the reference's result and the interpreted kernel's."""
    results = interpret(_INTERPRETED, _cases(), tmp_path_factory.mktemp("sample"))
    return [(case, sample(*case), drawn) for case, drawn in zip(_cases(), results, strict=True)]


def assert_same_draw(case: Any, expected: Any, drawn: Any) -> None:
    """Equal tokens, except where the two best scores are within 1e-4; logprobs within 5e-5, since
    they contain a sum over the vocabulary in another order."""
    logits, temperature, seeds, positions = case
    same = expected[0] == drawn[0]
    for row in (~same).nonzero()[:, 0].tolist():
        noise = -torch.log(
            exponential(
                random_bits(seeds[row : row + 1], positions[row : row + 1], logits.shape[1])
            )
        )
        best = (logits[row].float() / temperature[row] + noise[0]).topk(2).values
        assert float(best[0] - best[1]) < 1e-4, (row, expected[0][row], drawn[0][row])
    assert int((~same).sum()) <= len(same) // 100
    torch.testing.assert_close(drawn[1][same], expected[1][same], atol=5e-5, rtol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(10))
def test_the_kernel_interpreted_draws_what_the_reference_draws(
    index: int, interpreted: list[Any]
) -> None:
    assert_same_draw(*interpreted[index])


def test_sample_is_an_operator() -> None:
    for case in _cases()[:4]:
        library.opcheck(torch.ops.weft.sample.default, case)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 151936), (64, 151936), (256, 151936), (3, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_what_the_reference_draws(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(shape, generator=generator) * 3).to(dtype)
    temperature = torch.rand(shape[0], generator=generator) * 2 - 0.3
    case = (logits, temperature, torch.arange(shape[0]) * 7 - 3, torch.arange(shape[0]))
    drawn = sample(*(x.cuda() for x in case))
    assert_same_draw(case, sample(*case), [x.cpu() for x in drawn])


@pytest.mark.gpu
def test_padding_draws_some_token() -> None:
    logits = torch.full((2, 5000), torch.nan, device="cuda")
    temperature = torch.tensor([torch.nan, 1.0], device="cuda")
    token_ids, _ = sample(
        logits, temperature, torch.arange(2, device="cuda"), torch.arange(2, device="cuda")
    )
    assert bool(((token_ids >= 0) & (token_ids < 5000)).all())


def test_the_table_says_how_tokens_are_drawn() -> None:
    assert [row.implementation for row in backends("cpu") if row.op == "sample"] == ["reference"]
    (row,) = [row for row in backends("cuda") if row.op == "sample"]
    assert row.implementation.startswith(("triton ", "missing"))
