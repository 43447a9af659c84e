"""The engine, the outermost transform: continuous batching turns a step over batches into a function over requests."""
