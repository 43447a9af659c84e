"""Linear layers, adapters and the gate, with their building blocks: FP8 blocks and results in
parts."""
