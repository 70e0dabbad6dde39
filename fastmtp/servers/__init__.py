"""vLLM as a server, in parts: its environment, its command line, its log, and asking it. `fastmtp.serving` runs it."""
