"""Prefect flows: thin tasks over fastmtp."""
