"""The command line: one file per command, and what they share (options, prompts, pictures of tokens)."""
