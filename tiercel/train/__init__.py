"""Train MTP layers for a frozen target: data, cached hidden states, objective, loop."""
