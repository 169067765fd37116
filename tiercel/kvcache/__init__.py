"""The KV cache: who owns which slots, where keys and values lie, and which rows may see them."""
