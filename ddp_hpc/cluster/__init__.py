"""The machines: Slurm, networks, containers, GPUs, and how to ask a node or a rank that runs. Nothing here is public.

`rank_probe` and `node_checks` run on the nodes; all of it is free of torch.
"""
