"""Transforms from functions to functions: `graphify`, `pipeline`, `microbatch`, and the parts that
they are made of.

Pipelines also have transports (`Local`, `Threads`, `Distributed`, `launch`), schedules (`Job`,
`decode_jobs`, `jobs_for`, `make_programs`, `interleaved`, `weave`, `check`), and tools that
simulate and measure their time (`Costs`, `simulate`, `measure`, `compare`, `plan_cohorts`). Effects
and programs are in `weft.effects`.

Your own transform is a function `f -> f` written with `functools.wraps`, or a `Transform` if it
carries state from call to call. Names are imported on first use; `__init__.pyi` lists them.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
