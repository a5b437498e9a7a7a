"""Symbolic Raven matrices, what interventions on them need, and their ideal observer."""
