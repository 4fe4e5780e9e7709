"""ReCoVer: every step sums exactly B microbatches, whoever is left (arXiv 2605.11215)."""
