"""`response_format`: schemas and grammars, compiled within limits, as masks of the engine."""
