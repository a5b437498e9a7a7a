"""What studies share to say what they found: names and colours, tables, claims, plots."""

# The engine shows tables as its own, and they read what it computes: it is imported first.
import studies.engine  # noqa: F401
