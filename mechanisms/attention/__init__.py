"""Attention mechanisms, masks and position encodings."""
