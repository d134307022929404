"""Which processes a run has, where they run, and when they are started again. No I/O."""
