"""From logits to tokens: one pipeline for plain decoding, verification and drafts (docs/sampling.md)."""
