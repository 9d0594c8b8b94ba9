"""The Ray cluster that engines live in."""

from __future__ import annotations

import logging
import os

from megatron_async_rl.observe import watch
from megatron_async_rl.observe.processes import RUN_ID_VARIABLE

OBJECT_STORE_BYTES = 256 * 2**20


def join_ray(trainer_gpus: int, *, quiet: bool = False) -> None:
    """The cluster named by RAY_ADDRESS, or one of our own on this machine that ends with this process.

    `trainer_gpus`: GPUs of this machine, from the first, that the trainer ranks hold and Ray must not hand out. `quiet`: Ray says
    on this terminal only what went wrong.
    """
    import ray

    level = logging.ERROR if quiet else logging.INFO
    if os.environ.get("RAY_ADDRESS"):
        # Actors on a cluster that was there before inherit nothing: by these they are watched, and found at the end.
        inherited = {name: os.environ[name] for name in (RUN_ID_VARIABLE, watch.INHERITED) if name in os.environ}
        ray.init(log_to_driver=False, logging_level=level, runtime_env={"env_vars": inherited})
        return
    if trainer_gpus:
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[trainer_gpus:])
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=level,
        object_store_memory=OBJECT_STORE_BYTES,
        num_cpus=os.cpu_count(),
    )
