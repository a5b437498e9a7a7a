"""Interventions: patch activations from other examples and compare the answers."""
