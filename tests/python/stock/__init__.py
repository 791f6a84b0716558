"""A client of Longshore in plain Python: docs/protocol.md with stock gRPC. NumPy beside it knows what must come out."""
