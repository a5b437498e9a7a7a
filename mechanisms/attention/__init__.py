"""Attention mechanisms, their masks, and the positions they know."""
