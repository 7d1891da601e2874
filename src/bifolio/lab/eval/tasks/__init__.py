"""Small sets that were written for this project, and thin readers for larger ones."""
