"""The tasks of the Neural Data Router: expressions, and the graphs along which values flow."""
