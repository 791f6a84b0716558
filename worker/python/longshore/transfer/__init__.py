"""Shared by every framework: options and settings of a job, its parameters, and their way to and from the servers."""
