"""Patch a code from another example, and see what is answered."""
