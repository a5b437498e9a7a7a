"""What studies share to say what they found: names and colours, tables, claims, plots."""
