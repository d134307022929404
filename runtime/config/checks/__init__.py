"""Cross-checks of a well-typed configuration, by what they look at."""
