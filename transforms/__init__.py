"""Transforms, functions to functions: `graphify`, `pipeline`, `microbatch`, and what they are made of.

Of a pipeline: where its ranks run (`Local`, `Threads`, `Distributed`, `launch`), its schedules (`Job`, `decode_jobs`,
`jobs_for`, `make_programs`, `check`), and its time (`Costs`, `simulate`, `measure`, `compare`,
`plan_cohorts`). Effects and programs themselves are in `weft.effects`.

A transform of your own is a function `f -> f` written with `functools.wraps`; or a `Transform`, if it carries something
from call to call. Names are imported on first use; `__init__.pyi` lists them.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
