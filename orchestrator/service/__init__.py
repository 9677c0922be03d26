"""The HTTP API of `serve`. Nothing here is imported by a verb that does not speak HTTP."""
