"""Drafting and verification: the round, its workers, and how tokens are chosen."""
