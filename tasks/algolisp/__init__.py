"""AlgoLisp: an interpreter, problems of published files, and generated ones."""
