"""Where the claims come from: benchmarks, planted bugs, solver runs, long runs of the laws, and the
makers of the pages. It runs from a clone of the repository, and is not in the wheel."""
