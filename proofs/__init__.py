"""Tests for your own functions: `check` tests their laws, `assert_equivalent` compares two of them,
and `strategies` draw arguments.

**Check your own function.** `check` draws sequences of calls, and compares the function's graph
with the function itself: on tapes for arguments on a CPU, on CUDA graphs for arguments on a GPU.
`args` are the arguments, each of which may be a Hypothesis strategy (`weft.proofs.strategies` has
strategies for weft's own types).

>>> import torch
>>> from hypothesis import strategies as st
>>> from weft import BatchDescriptor, proofs
>>> from weft.proofs.strategies import Rows, tensors
>>> def step(params, state, batch):
...     state = torch.tanh(batch.sum(0) @ params + state)
...     return state, batch * state
>>> arguments = {"params": tensors(2, 2), "state": torch.zeros(2), "batch": tensors(st.integers(1, 4), 2)}
>>> proofs.check(step, arguments, donate_argnames="state", max_examples=3)  # doctest: +ELLIPSIS
6 laws of step
law          what must hold                  outcome         examples  compared
pure         equal arguments, equal results  holds                  3 ...
graph   L1   a graph of it is it, bitwise    holds                  3 ...
replay  L9   results outlive later replays   holds                  3 ...
trace   L8   captures leave no trace         holds                  3 ...
pad     L2   padding changes nothing         needs a ladder         0         0
func    L15  vmap, grad, jvp pass through    holds                  3 ...

**Plant a bug, and see it found.** A law that never fails proves nothing. Here a mean is taken over
a batch, which includes padding if there is a ladder. `check` shrinks the failing example as far as
it can: to one row of one number.

>>> def centred(rows):
...     return Rows(rows.descriptor, rows.x - rows.x.mean(0))
>>> rows = tensors(st.integers(1, 3), 1).map(lambda x: Rows(BatchDescriptor(len(x), len(x)), x))
>>> proofs.check(centred, (rows,), laws="pad", ladder=[BatchDescriptor(4, 4)])
Traceback (most recent call last):
    ...
weft.proofs.checks.equivalence.Counterexample: law 'pad' (L2) does not hold of centred: padding changes nothing
  at:                                  .x, element [0, 0] of float32 [1, 1] on cpu
  padded to 'ragged 4 tokens, 4 reqs': 0.1875
  as it is, 'ragged 1 tokens, 1 reqs': 0.0
  apart:                               0.1875, 1,044,381,696 ULPs
to see it again:
    import torch
    import weft
    import weft.proofs
    from weft.proofs.strategies import Rows
    calls = [
        {
            'rows': Rows(
                descriptor=weft.BatchDescriptor(num_tokens=1, num_reqs=1),
                x=torch.tensor([[0.25]]),
            ),
        },
    ]
    ladder = [weft.BatchDescriptor(num_tokens=4, num_reqs=4)]
    weft.proofs.check(centred, calls, laws='pad', ladder=ladder)

**Read the counterexample.** `at` is the path of the first leaf that differs, and the index of the
first such element in it. Then come both values, how far `apart` they are (in ULPs: the number of
floating-point steps from one to the other), how many elements `differ`, and how many `leaves`. The
code at the end rebuilds the arguments and raises the same error. (The remedy here is a field of the
batch that masks the padding, as `weft.axes("num_tokens", pad=0)` makes one.)

**Write your own law.** Most laws say that two functions are equal: the result of a transform, and a
version written by hand. `assert_equivalent` compares them, bitwise if no tolerance is given:

>>> def twice(x):
...     return {"x": x + x, "count": x.numel()}
>>> def doubled(x):
...     return {"x": 2 * x, "count": x.numel()}
>>> proofs.assert_equivalent(twice, doubled, args=(tensors(st.integers(0, 4)),), max_examples=10)
>>> def nearly(x):
...     return {"x": 2.0000002 * x, "count": x.numel()}
>>> proofs.assert_equivalent(nearly, doubled, args=(torch.ones(3),))
Traceback (most recent call last):
    ...
weft.proofs.checks.equivalence.Counterexample: nearly is not doubled, bitwise
  at:      ['x'], element [0] of float32 [3] on cpu
  nearly:  2.000000238418579
  doubled: 2.0
  apart:   2.38419e-07, 1 ULP
  differ:  3 of 3 elements; most at [0]: 2.000000238418579 and 2.0, apart 2.38419e-07, 1 ULP
  leaves:  1 of 2 differ; this is the first
to see it again:
    import torch
    import weft.proofs
    args = (torch.ones(3),)
    weft.proofs.assert_equivalent(nearly, doubled, args=args)

It also works inside a test with Hypothesis's own `@given`: pass the arguments that the test drew.
A law that compares other things calls `assert_equal`, which raises LawViolation, or
`find_difference`.

**In pytest.** pytest loads `weft.proofs.plugin` if weft is installed. `--weft-profile=ci`, `gpu` or
`explore` sets the number of examples, tests marked `@pytest.mark.gpu` are skipped without a GPU,
and the fixture `weft_device` runs a test on both devices.
"""

from typing import Any

from lazy_loader import attach_stub

# Lazy, because pytest imports this package to load the plugin, which must not import torch.
_find, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if error.name not in {"hypothesis", "pytest"}:
            raise
        from weft.errors import MissingPackageError
        from weft.extras import install_command

        if error.name == "pytest":
            instead = "pip install pytest"
        else:
            instead = install_command("proofs")
        raise MissingPackageError(
            f"weft.proofs.{name}", f"no {error.name} here", instead
        ) from error
