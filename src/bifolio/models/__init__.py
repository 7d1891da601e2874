"""One short file per family, its weights read strictly."""
