"""Who answers: the verifier in this process, or vLLM."""
