"""LoRA adapters, and the slots in a stage's parameters that hold them."""
