"""Pipelines: `pipeline`, `microbatch` and `scan`, and the programs, transports and timelines behind them."""
