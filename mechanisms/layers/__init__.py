"""Components besides attention: feed-forward layers, gates, halting, weight sharing."""
