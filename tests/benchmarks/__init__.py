"""Benchmarks: run by `make bench`, never as timed tests. Each has a named peer, or a limit, in the same run."""
