"""vLLM and weft beside each other: two engines alive at once, which take turns at requests of the same lengths."""
