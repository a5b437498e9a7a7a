"""Linear decoding of latents from codes, and two-dimensional projections of codes."""
