"""Which retrieval serves which search, in compositional attention."""
