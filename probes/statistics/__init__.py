"""Intervals, tests of paired differences, and means by label."""
