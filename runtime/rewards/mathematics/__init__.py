"""Compare two final answers mathematically: `answers.equal`. Pure functions; nothing here evaluates text as code."""
