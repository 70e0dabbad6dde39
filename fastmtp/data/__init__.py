"""Prompts, answers and hidden states."""
