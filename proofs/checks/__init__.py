"""`check` and `assert_equivalent`: test a user's functions, and show counterexamples as code to
paste."""
