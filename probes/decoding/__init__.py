"""Linear decoding of latents from codes, and codes in the plane."""
