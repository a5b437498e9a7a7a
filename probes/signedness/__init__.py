"""Signs and saturation of attention weights: which tokens are added, subtracted or deleted."""
