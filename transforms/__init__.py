"""What the transforms return, and the parts that a pipeline is made of. The transforms themselves,
such as `weft.graphify` and `weft.pipeline`, are in `weft`.

`graphify` returns a `Graphified`, whose calls can be lowered (`Lowered`) and compiled (`Compiled`);
`pipeline` returns a `Pipelined`, and `shard` a `Sharded`. `make_runner` and `make_state` make the
steps of a model. Pipelines have transports (`Local`, `Threads`, `Distributed`, `launch`), schedules
(`Job`, `decode_jobs`, `make_programs`, `interleaved`, `weave`, `check`), and tools that simulate
and measure their time (`Costs`, `simulate`, `measure`, `compare`, `plan_cohorts`). Effects and
programs are in `weft.effects`.

Your own transform is a function `f -> f` written with `functools.wraps`, or a `Transform` if it
carries state from call to call. Names are imported on first use; `__init__.pyi` lists them.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
