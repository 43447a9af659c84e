"""What options of several commands take: the names that other modules define, without their import of torch."""

MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
"""What `--graph` takes: `weft.transforms.ladder.MODES`."""

DTYPES = ("float32", "bfloat16", "float16")
"""What `--dtype` takes: the names in `weft.stages.model.DTYPES`."""

TRANSPORTS = ("local", "threads", "gloo", "nccl", "peer")
"""What `--transport` takes."""
