"""Loops: what becomes of states and answers over the steps of a model."""
