"""Supervised training on the replies of conversations: `sluice tune`, and the warm-up that makes a tiny model."""
