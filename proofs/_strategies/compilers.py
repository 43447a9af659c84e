"""The compilers that cases of law L26 name, and those that they do not, with the reason."""

# They run torch's own kernels for the operators of a graph, so that results have the same bits.
EXACT = ("aot_eager", "eager")

# They make no code, and take milliseconds. The last one replaces operators by simpler ones, which may
# round in another way.
QUICK = (*EXACT, "aot_eager_decomp_partition")

# It makes code, which may round in another way. Each graph takes a second or more.
INDUCTOR = "inductor"

_VARIANT = "a variant of one that is drawn, for debugging torch"
_FAILS = "fails on purpose, to test torch's tools"
NOT_DRAWN = {
    "aot_eager_decomp_partition_crossref": _VARIANT,
    "aot_eager_decomp_partition_with_mode": _VARIANT,
    "aot_eager_default_partitioner": _VARIANT,
    "eager_debug": _VARIANT,
    "eager_noexcept": _VARIANT,
    "pre_dispatch_eager": _VARIANT,
    "dynamo_accuracy_minifier_backend": "writes scripts of graphs that fail",
    "dynamo_minifier_backend": "writes scripts of graphs that fail",
    "invoke_subgraph": "wraps a graph in an operator for another compiler",
    "non_leaf_compile_error_TESTING_ONLY": _FAILS,
    "relu_accuracy_error_TESTING_ONLY": _FAILS,
    "relu_compile_error_TESTING_ONLY": _FAILS,
    "relu_runtime_error_TESTING_ONLY": _FAILS,
    "aot_ts": "is TorchScript, which torch has deprecated",
    "ts": "is TorchScript, which torch has deprecated",
    "openxla": "needs a package of its own",
    "openxla_eval": "needs a package of its own",
    "tvm": "needs a package of its own",
}
"""torch's other compilers (`weft.torchapi.inductor.compilers`), and why no case names them."""
