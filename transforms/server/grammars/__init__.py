"""`response_format`: schemas and grammars, compiled within limits to token masks."""
