"""Strategies for engines: loads and traces of requests, and what requests bring: adapters, drafts,
embeddings."""
