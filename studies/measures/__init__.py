"""Measures of trained models that are more than a call of a probe."""
