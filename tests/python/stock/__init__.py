"""A client of Longshore in plain Python: docs/protocol.md with stock gRPC, and the expected results in NumPy."""
