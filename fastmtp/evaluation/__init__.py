"""How good a head is: measured by vLLM, checked without it, judged, and shown to people."""
