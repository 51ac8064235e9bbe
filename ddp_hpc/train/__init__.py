"""The training: one process a GPU. No other wing imports torch.

Public: `recipe.Recipe`, `ddp_hpc.attach` (in `attached`), `ddp_hpc.load_checkpoint`, and the modules of `adapters`.
"""
