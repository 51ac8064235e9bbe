"""What a run is: what the user asks for (`spec`, `config`, `workload`), and what its directory holds (`run_dir`, `checkpoints`).

Public: the classes of `spec`, as `ddp_hpc.RunSpec`; and the files of a run directory that README.md shows.
"""
