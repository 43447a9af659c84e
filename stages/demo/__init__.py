"""The checkpoint that weft ships: a byte-level decoder of the Qwen3 architecture, in Hugging Face's
format."""
