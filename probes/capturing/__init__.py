"""Run a model on batches of a task and keep the activations of chosen hooks."""
