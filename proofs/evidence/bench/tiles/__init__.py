"""The search for tiles on a GPU, and the fit of the model that chooses them to what it measured."""
