"""Whole models, each built from its config alone."""
