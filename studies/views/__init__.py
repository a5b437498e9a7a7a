"""Plots that belong to a single study."""
