"""Are tokens added, subtracted or deleted? The signs of attention weights."""
