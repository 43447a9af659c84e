"""Models that run beside a decoder and read its tokens: drafters, and the user's models
(`beside=`)."""
