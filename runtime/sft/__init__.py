"""Supervised training on the replies of conversations: `sluice sft`, and the warm-up that makes a tiny model."""
