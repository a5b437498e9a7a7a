"""Best paths through the modules of a network: search, scores with a control, adaptation."""
