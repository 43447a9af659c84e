"""weft beside vLLM, or beside an older weft: two engines alive at once take turns at requests of
the same lengths."""
