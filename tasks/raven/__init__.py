"""Symbolic Raven matrices, with pairs for interventions and an ideal observer."""
