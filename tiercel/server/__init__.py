"""The engine as a service: it runs in a process of its own, and clients hear of every step as it ends."""
