"""Measurements: contenders that take turns, samples, what a machine can do at best, and other engines on the same prompts."""
