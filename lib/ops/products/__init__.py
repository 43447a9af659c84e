"""Linear layers, adapters and the gate, and what they are made of: blocks in FP8, and results left
in parts."""
