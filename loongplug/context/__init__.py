"""Context parallelism, the pure part: which rank holds which tokens of a row, and who sees whom."""
