"""Strategies for engines: loads and traces of requests, with adapters, drafts and embeddings."""
