"""The engine: who runs next, one step at a time, and the library's front door."""
