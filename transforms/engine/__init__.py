"""The engine: continuous batching, which turns a step over batches into a function over requests.

`engine.py` has `weft.Engine`, which drives it. Its parts are functions over a `HostState`: `add`
puts a request into the queue, `schedule` decides the next step's `Work`, `observe` reads the tokens
that the step sampled, `finish` ends a request, and `outdate` notes that the parameters have
changed. The path of a request: `requests/inputs.py` checks it, `scheduler.py` admits it,
`requests/prefix_cache.py` gives it pages (`requests/pages.py`), `steps/executor.py` runs its steps,
`steps/results.py` copies its tokens to the host, and `outputs.py` turns them into text.

`evaluation` measures a model: `score` computes its perplexity and its accuracy; `trace_run` and
`compare_runs` show how its results differ between splits and graph modes.
"""
