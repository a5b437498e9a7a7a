"""Texts and images that others have stored, read from a folder or a hub."""
