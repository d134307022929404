"""The ledger: the journal of every group, and the payloads beside it."""
