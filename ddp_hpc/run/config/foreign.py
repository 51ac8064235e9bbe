"""Names that torchrun, Lightning, Transformers and Slurm use for what our keys set."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES_BY_OUR_KEY: Mapping[str, str] = {
    "name": "run_name experiment experiment_name job_name wandb_name",
    "runs_dir": "output_dir out_dir save_dir log_dir logdir default_root_dir root_dir work_dir workdir ckpt_dir checkpoint_dir",
    "seed": "random_seed manual_seed seed_everything data_seed",
    "launcher": "strategy backend distributed_backend",
    "recipe.target": "model model_name entrypoint script main",
    "train.epochs": "max_epochs num_epochs n_epochs num_train_epochs total_epochs epochs_max",
    "train.max_steps": "num_steps total_steps max_iters max_iterations iterations num_train_steps max_train_steps",
    "train.global_batch_size": "batch_size batch train_batch_size total_batch_size bs bsz batchsize",
    "train.micro_batch_size": "per_device_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch microbatch_size "
    "gradient_accumulation_steps accumulate_grad_batches grad_accum grad_accum_steps accumulation_steps accum_iter",
    "train.lr": "lr learning_rate base_lr max_lr init_lr peak_lr",
    "train.precision": "fp16 bf16 amp use_amp mixed_precision dtype autocast half",
    "train.grad_clip_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clip max_grad_norm max_norm clip_norm",
    "train.ema_decay": "ema use_ema model_ema",
    "train.sync_batch_norm": "sync_batchnorm sync_bn",
    "train.compile": "torch_compile compile_model",
    "optimizer.name": "optimizer optim opt optimizer_name optimizer_type",
    "optimizer.weight_decay": "wd l2",
    "optimizer.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "lr_schedule.name": "lr_scheduler scheduler sched lr_scheduler_type lr_policy",
    "lr_schedule.warmup_steps": "warmup num_warmup_steps warmup_iters warmup_epochs warmup_ratio",
    "lr_schedule.min_factor": "min_lr eta_min",
    "data.num_workers": "workers dataloader_num_workers num_data_workers dataloader_workers loader_workers",
    "data.drop_last": "dataloader_drop_last",
    "eval.every_epochs": "eval_every eval_interval eval_steps check_val_every_n_epoch val_every eval_strategy",
    "eval.batch_size": "eval_batch_size val_batch_size per_device_eval_batch_size test_batch_size",
    "log.every_steps": "log_every log_interval log_every_n_steps logging_steps log_steps print_freq",
    "log.recorders": "use_tensorboard tensorboard_dir report_to logger loggers log_with trackers use_wandb wandb use_mlflow mlflow",
    "log.grad_norm": "log_grad_norm track_grad_norm",
    "resources.nodes": "num_nodes nnodes n_nodes nodes_count num_machines",
    "resources.gpus_per_node": "gpus gpu num_gpus n_gpus ngpus n_gpu devices accelerator gres gpus_per_task",
    "resources.workers_per_node": "nproc_per_node nproc num_processes ntasks_per_node tasks_per_node ntasks world_size",
    "resources.cpus_per_worker": "cpus cpus_per_task cpus_per_gpu num_cpus",
    "resources.mem_gb": "mem memory mem_per_node",
    "resources.time_limit_min": "time timeout time_limit timeout_min walltime wall_time time_min",
    "checkpoint.every_steps": "save_every save_steps save_interval checkpoint_every ckpt_every every_n_train_steps save_freq",
    "checkpoint.keep_last": "save_total_limit keep max_to_keep num_checkpoints",
    "checkpoint.keep_best": "save_top_k load_best_model_at_end",
    "checkpoint.best_metric": "metric_for_best_model monitor",
    "checkpoint.best_is": "greater_is_better",
    "slurm.partition": "slurm_partition queue",
    "slurm.account": "slurm_account project",
    "slurm.exclude": "exclude_nodes slurm_exclude",
    "slurm.nodelist": "nodes_list node_list slurm_nodelist",
    "slurm.modules": "module",
    "slurm.setup": "slurm_setup setup_commands pre_commands",
    "slurm.signal_lead_s": "signal signal_delay_s slurm_signal_delay_s",
    "slurm.extra": "mail comment slurm_comment additional_parameters slurm_additional_parameters sbatch_args",
    "torchrun.max_restarts": "max_restart",
    "container.image": "sif container_image docker_image singularity_image",
    "container.binds": "mounts bind container_mounts",
    "network.interfaces": "interface nic ifname nccl_socket_ifname gloo_socket_ifname",
    "env": "env_vars environment environ export",
}
"""Our key -> its names in other tools."""

KEY_BY_OTHER_NAME: Mapping[str, str] = {name: key for key, names in _NAMES_BY_OUR_KEY.items() for name in names.split()}
"""Name in another tool -> our key."""
_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "CUDA_", "UCX_", "FI_", "HF_")
"""Prefixes of environment variables that users write as if they were keys."""


def our_key_for(name: str) -> str | None:
    """Return our key for a name from another tool, whatever its section and spelling (`--batch-size`, `data.batch_size`)."""
    leaf = name.rpartition(".")[2]
    known = KEY_BY_OTHER_NAME.get(leaf.lower().replace("-", "_"))
    return f"env.{leaf}" if known is None and leaf.isupper() and leaf.startswith(_VARIABLE_PREFIXES) else known
