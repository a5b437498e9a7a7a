"""The best path through the modules of a network: searched, scored against a null, adapted to."""
