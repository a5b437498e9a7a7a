"""Plots that a single study draws."""
