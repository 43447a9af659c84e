"""Checkpoints: folders as Hugging Face writes them and GGUFs, with their tokenizers and chat
templates."""
