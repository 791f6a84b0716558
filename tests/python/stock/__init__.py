"""A client of Longshore in plain Python: docs/protocol.md with stock gRPC, and NumPy beside it that knows what must come out."""
