"""Setups: each a task, the model that learns it, and how its answers are scored."""
