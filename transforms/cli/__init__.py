"""The command line: `weft generate`, `weft bench`, `weft demo`, `weft plan` and `weft doctor`."""
