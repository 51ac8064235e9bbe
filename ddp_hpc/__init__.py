"""Take a PyTorch training from a laptop to a Slurm cluster, and survive what the cluster does to it."""

__version__ = "0.1.0"
