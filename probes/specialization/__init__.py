"""Specialization of modules in operations: capture, scores and plots."""
