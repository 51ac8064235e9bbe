"""From a configuration to a started run or sweep, and to its end by request: back ends, job scripts, checks before the queue.

Public: `ddp_hpc.submit`, `ddp_hpc.load` and `ddp_hpc.Job`, which are in `api`.
"""
