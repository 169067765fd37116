"""Words shared by every room: errors, configuration, requests, batches, records. Plain data, no tensors."""
