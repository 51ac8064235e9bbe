"""A real Slurm cluster of several nodes on one Debian machine, for tests.

Each node ("head", "node1" ... "nodeN") is a set of namespaces (net, uts, ipc, mount, pid) with its own hostname,
addresses on two networks (eth0 and ib0), /tmp, /dev/shm, /dev (with made-up GPUs), munged and slurmd. The head has
slurmctld, slurmdbd and MariaDB instead of slurmd. The networks' switches live in the head's namespace, so no route
leads from this machine into the lab, nor out of it.

`python3 tests/slurm/lab --help` lists the commands. It needs root and nothing but the standard library, because
it also runs as process 1 of every node.
"""
