"""What each node has: software, GPUs, CPUs, names, limits; and whether it answered. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from ddp_hpc.cluster.node_checks.answers import NodeAnswers, agreement_finding, judge_nodes, odd_nodes, unknown_finding
from ddp_hpc.cluster.node_checks.facts import SOFTWARE, UNLIMITED
from ddp_hpc.run.run_dir.preflight import Finding, Level

FEW_OPEN_FILES = 1024
"""Loader processes pass tensors by file descriptors, and each rank holds connections to others."""
FEW_PROCESSES = 256
"""Each worker has tens of threads, and loader processes; all of a user on the node count, in all jobs."""
SLOW_LOOKUP_S = 1.0
SOFTWARE_LEVELS: Mapping[str, Level] = {
    "python": "fail",
    "torch": "fail",
    "cuda": "fail",
    "hip": "fail",
    "nccl": "fail",
    "ddp_hpc": "fail",
    "driver": "warn",
    "machine": "warn",
}
"""Software -> what a difference between nodes is."""


def check_answered(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes that did not answer, or not to the end, or left out a part."""
    silent = [node for node in answers.nodes if node not in answers.facts]
    if not answers.facts and not answers.unstarted:
        found = f"no node answered{answers.problem and f': {answers.problem}'}"
        to_do = "run `srun --overlap hostname` in the job, which shows why"
        yield unknown_finding("nodes", found, to_do)
    elif silent:
        why = answers.problem and f" ({answers.problem})"
        if answers.unstarted:  # srun has then ended it on the others
            why = f"; Slurm could not start the check on {', '.join(answers.unstarted)}"
        bad = answers.unstarted or silent
        to_do = (
            f"leave it out if `srun --nodelist={bad[0]} hostname` does not answer either; `scontrol show node {bad[0]}` "
            "shows what Slurm knows of it, maybe some minutes late"
        )
        # Where most say nothing, the fault may be of Slurm, or of the node that asks.
        named = (*bad,) if len(bad) * 2 <= len(answers.nodes) else ()
        yield Finding(
            check="nodes", level="fail", found=f"no answer from {', '.join(silent)}{why}", to_do=to_do, nodes=named
        )
    else:
        yield Finding(check="nodes", level="ok", found=f"all {len(answers.nodes)} answered")
    slow = answers.by_node(lambda facts: facts.late or None)
    hung = [
        node for node, late in slow.items() if any(part in _FILES_PARTS or part.startswith("path ") for part in late)
    ]
    for node, late in slow.items():
        # A file system that answers most nodes hangs on this one; anything else may be slow on a healthy node.
        is_proof = node in hung and len(hung) * 2 < len(answers.facts)
        yield Finding(
            check="nodes",
            level="fail" if is_proof else "unknown",
            found=f"{node} did not answer in time about: {', '.join(late)}",
            to_do="on the node, run `ls` on the path, or `getent hosts NAME`: a file system or name server does not answer",
            nodes=(node,) if is_proof else (),
        )


_FILES_PARTS = frozenset({"shared", "disks"})
"""Parts of a node's answer that wait for a file system, as `path ...` do."""


def check_software(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes with other versions."""
    told = answers.by_node(lambda facts: facts.software)
    for name in SOFTWARE:
        values = {node: software[name] for node, software in told.items() if name in software}
        if name in {"hip", "driver", "nccl", "cuda"} and not any(values.values()):
            continue  # none of these nodes has any
        to_do = "use one environment on a shared file system, or an image" if SOFTWARE_LEVELS[name] == "fail" else ""
        yield agreement_finding(name, values, level=SOFTWARE_LEVELS[name], to_do=to_do)


MIN_DRIVER_BY_CUDA: Mapping[str, int] = {"11": 450, "12": 525, "13": 580}
"""CUDA's major version -> the oldest branch of NVIDIA's driver that runs its programs:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""


def why_gpus_unused(software: Mapping[str, str]) -> str:
    """Return why a host's PyTorch does not use its GPUs of NVIDIA; empty where it does, or nothing is known."""
    torch, cuda, driver = (software.get(name, "") for name in ("torch", "cuda", "driver"))
    if not torch or not driver:
        return ""
    if not cuda:
        return (
            ""
            if software.get("hip")
            else f"PyTorch {torch} is built without CUDA, so it does not use the GPUs of driver {driver}"
        )
    least, branch = MIN_DRIVER_BY_CUDA.get(cuda.partition(".")[0], 0), driver.partition(".")[0]
    if not branch.isdecimal() or int(branch) >= least:
        return ""
    return f"PyTorch {torch} is built with CUDA {cuda}, which needs NVIDIA's driver {least} or newer, but the driver is {driver}"


DRIVER_ADVICE = "install a PyTorch for the driver (docs/install.md has the table); an older driver does only with CUDA's forward compatibility package"


def check_drivers(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes whose driver does not fit their PyTorch."""
    told = answers.by_node(lambda facts: facts.software)
    why = {node: reason for node, one in told.items() if (reason := why_gpus_unused(one))}
    for reason in sorted({*why.values()}):
        bad = [node for node in why if why[node] == reason]
        yield judge_nodes("driver", bad, answers, f"{', '.join(bad)}: {reason}", "", level="warn", to_do=DRIVER_ADVICE)


def check_gpus(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes with other GPUs, or fewer than the run asks for."""
    models = {
        node: ", ".join(f"{count} x {model}" for model, count in sorted(Counter(gpus).items()))
        for node, gpus in answers.by_node(lambda facts: facts.gpus).items()
    }
    if any(models.values()):
        to_do = "ask for one type: `resources.gpu_type`, or `slurm.constraint`"
        yield agreement_finding("GPU type", models, level="warn", to_do=to_do)
    counts = answers.by_node(lambda facts: facts.num_gpus)
    granted = answers.by_node(lambda facts: facts.granted_gpus)
    asked = answers.asked.gpus_per_node
    if not asked and not any(granted.values()):
        return
    needed = {node: max(asked, granted.get(node, 0)) for node in answers.facts}
    few = [node for node, count in counts.items() if count < needed[node]]
    unseen = [node for node in answers.facts if node not in counts and needed[node]]
    if few or not unseen:
        by_slurm = {node: number for node, number in granted.items() if number >= asked}
        wanted = {
            node: f"{by_slurm[node]} GPUs that Slurm gave the job"
            if node in by_slurm
            else f"{asked} GPUs that the run asks for"
            for node in few
        }
        found = "; ".join(f"{node} shows {counts[node]} of the {wanted[node]}" for node in few)
        good = f"each node shows as many as the job has on it: {min(needed.values())} or more"
        to_do = "compare `nvidia-smi -L` there with `scontrol show job -d`: if `nvidia-smi` lists fewer GPUs, the node has lost one: leave the node out (`slurm.exclude`)"
        yield judge_nodes("GPUs", few, answers, found, good, to_do=to_do)
    if unseen:
        found = f"nothing on {', '.join(unseen)} shows whether there are GPUs: no device of NVIDIA's or AMD's driver, and no variable of the job"
        yield unknown_finding("GPUs", found, "check `nvidia-smi` (AMD: `rocm-smi`) on the node, and the job's `--gres`")


def check_cpus(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes that give a process fewer CPUs than its workers and their loader processes need."""
    counts, asked = answers.by_node(lambda facts: facts.num_cpus), answers.asked.cpus_per_node
    if not asked:
        return
    few = [node for node, count in counts.items() if count < asked]
    found = ", ".join(f"{node} has {counts[node]}" for node in few)
    told = f"{found} CPUs for {asked} workers and loader processes"
    to_do = "raise `resources.cpus_per_worker`, lower `data.num_workers`, or check `--cpu-bind` in `slurm.srun_args`"
    yield judge_nodes("CPUs", few, answers, told, f"{asked} or more on all nodes", level="warn", to_do=to_do)


def check_names(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes that resolve the name of another one to other addresses than most."""
    told = answers.by_node(lambda facts: facts.names)
    if not told:
        yield unknown_finding("names", "no node answered in time to which addresses it resolves the nodes' names")
        return
    is_good = True
    views_of: dict[str, dict[str, str]] = defaultdict(dict)
    for node, found_there in told.items():
        for name, addresses in found_there.items():
            # To itself, a node's name may be the loopback: Debian's installer writes it so.
            # Of a name that a node's name server has not answered, nothing is known there.
            if name != node:
                outside = (text for text in addresses if not ip_address(text.partition("%")[0]).is_loopback)
                views_of[name][node] = " ".join(outside)
    for name, views in views_of.items():
        if not views or set.intersection(*(set(view.split()) for view in views.values())):
            continue  # a node may know one address more, such as an IPv6 one
        is_good = False
        common, odd = odd_nodes(views)
        unresolved = [node for node in views if not views[node]]
        to_do = f"compare `getent hosts {name}` on the nodes, and correct /etc/hosts or the DNS"
        blamed = tuple(odd) if common else ()
        seen = "; ".join(f"{node} resolves it to {views[node] or 'nothing'}" for node in odd or unresolved or views)
        others = f", the others to {common}" if common and odd else ""
        yield Finding(check="names", level="warn", found=f"{name}: {seen}{others}", to_do=to_do, nodes=blamed)
    if is_good:
        found = "each node resolves the names of the others to the same addresses"
        yield Finding(check="names", level="ok", found=found)
    slow = {
        node: seconds
        for node, seconds in answers.by_node(lambda facts: facts.reverse_s).items()
        if seconds > SLOW_LOOKUP_S
    }
    if slow:
        worst = max(slow, key=lambda node: slow[node])
        found = f"looking up the name of an address takes {slow[worst]:.1f} s on {worst}, and more than {SLOW_LOOKUP_S:.0f} s on {', '.join(slow)}"
        to_do = "each rank waits for this once for each peer; tell your cluster's support that the reverse DNS does not answer"
        yield Finding(check="reverse DNS", level="warn", found=found, to_do=to_do, nodes=())


def check_limits(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes whose limits are too low."""
    told = answers.by_node(lambda facts: facts.limits)
    rdma = answers.by_node(lambda facts: facts.has_rdma or None)
    needed = max(FEW_OPEN_FILES, answers.asked.open_files)
    few = [node for node, one in told.items() if UNLIMITED < one.get("nofile", UNLIMITED) < needed]
    if few:
        fewest = min(told[node]["nofile"] for node in few)
        found = f"a process may open only {fewest} files on {', '.join(few)}, but workers need {needed}"
        to_do = (
            "have the hard limit raised, `ulimit -Hn`: in slurmd's service (LimitNOFILE) or /etc/security/limits.conf"
        )
        level: Level = "fail" if fewest < answers.asked.open_files else "warn"
        yield judge_nodes("limits", few, answers, found, "", level=level, to_do=to_do)
    crowded = [node for node, one in told.items() if UNLIMITED < one.get("nproc", UNLIMITED) < FEW_PROCESSES]
    if crowded:
        found = f"a user may have only {min(told[node]['nproc'] for node in crowded)} processes and threads on {', '.join(crowded)}"
        to_do = "raise the limit: `slurm.setup=['ulimit -u $(ulimit -Hu)']`, or ask your cluster's support"
        yield judge_nodes("limits", crowded, answers, found, "", level="warn", to_do=to_do)
    locked = [node for node in rdma if told.get(node, {}).get("memlock", UNLIMITED) != UNLIMITED]
    if locked:
        found = (
            f"the memory that a process may lock is limited on {', '.join(locked)}, but InfiniBand needs it unlimited"
        )
        to_do = "raise the limit: `slurm.setup=['ulimit -l unlimited']`"
        yield judge_nodes("limits", locked, answers, found, "", level="warn", to_do=to_do)
    if told and not few and not crowded and not locked:
        yield Finding(check="limits", level="ok", found="open files, processes and locked memory suffice on all nodes")
