"""What models have besides attention: feed-forward layers, gates, halting, depth."""
