"""`check` and `assert_equivalent`: laws of a user's own functions, and counterexamples as code to
paste."""
