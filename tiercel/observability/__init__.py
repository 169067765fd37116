"""Seeing every round: hooks on the engine thread, and what is made of them off it (spans, records, trace files)."""
