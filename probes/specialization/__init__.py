"""Does a module serve one operation? Specialization and collapse."""
