"""Models that run beside a decoder and read its tokens: drafters, and those of one's own
(`beside=`)."""
