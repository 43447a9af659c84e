"""GGUF, the format of llama.cpp: one file with a model's configuration, tokenizer, chat template
and tensors."""
