"""Models, each of which is built from its config only."""
