"""Published data sets of texts and images, read from a folder or from Hugging Face's hub."""
