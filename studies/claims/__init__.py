"""Claims of papers that are too many for the file of their study."""
