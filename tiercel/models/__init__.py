"""The target decoder, the MTP layers, and how their checkpoints are read."""
