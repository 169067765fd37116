"""Where things run: device and dtype choice, parallel groups, the contexts that drafts run in."""
