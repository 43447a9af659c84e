"""Drafters: stages that draft tokens, and the models beside a decoder that they read."""
