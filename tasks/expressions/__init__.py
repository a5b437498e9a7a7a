"""The tasks of the Neural Data Router: expressions and their dataflow graphs."""
