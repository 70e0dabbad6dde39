"""The training loop in parts: plan, processes, objective, optimizer, saves, checks. `fastmtp.train` is the stage."""
