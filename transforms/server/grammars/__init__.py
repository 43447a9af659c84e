"""`response_format`: schemas and grammars, compiled within limits into token masks for the engine."""
