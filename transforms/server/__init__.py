"""`weft serve`: the HTTP interface of OpenAI's API over an `Engine`."""
