"""Parameters of models that were trained with the authors' code, as modules of this package."""
