"""Pairing of searches and retrievals in compositional attention: scores, interventions, plots."""
