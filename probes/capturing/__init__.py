"""Run a model on a task and keep what its hooks show."""
