"""Inside of the job: what starts workers, watches them, and decides what follows an attempt; free of torch.

Nothing here is public. Job scripts start `supervisor`; `script` runs beside a user's own script, `node` on each node.
"""
